"""`echo-lm demo`: a memory that does not grow, and three ways to the same answer."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

from echo_lm.model.config import EchoConfig
from echo_lm.model.lm import EchoLM
from echo_lm.model.state import EchoState

STEPS = 64
"""Tokens read one by one at the end."""
LONGEST_PIECE = 4096
TOLERANCE = 1e-3
"""Of the logits' spread: what fp32 sums over 100,000 tokens in another order may differ by."""


def run(tokens: int, seed: int, console: Console | None = None) -> bool:
    """Read, show, compare; True if the two ways agree."""
    if tokens < 2 * STEPS:
        raise ValueError(f"tokens must be at least {2 * STEPS}, got {tokens}.")
    console = console or Console()
    torch.manual_seed(seed)
    model = untrained("synthetic-ska")
    text = torch.randint(model.config.vocab_size, (1, tokens))
    console.print(
        f"A model of {model.num_parameters():,} parameters (random weights) reads {tokens:,} "
        f"random tokens: first in pieces of random length, the last {STEPS} one by one, then all "
        "in one pass."
    )
    with torch.inference_mode():
        in_steps = read_in_pieces(model, text, console)
        start = time.perf_counter()
        at_once = model(text).logits[:, -STEPS:]
        console.print(f"In one pass: {tokens / (time.perf_counter() - start):,.0f} tokens/s.")
    difference = float((in_steps - at_once).abs().max() / at_once.std())
    agrees = difference < TOLERANCE
    console.print(
        f"Largest difference of the last {STEPS} predictions, relative to their spread: "
        f"{difference:.1e} ({'they agree' if agrees else f'above {TOLERANCE:.0e}'})."
    )
    return agrees


def untrained(preset: str) -> EchoLM:
    """A model whose SKA layers speak: they start silent, and random weights give them a voice."""
    model = EchoLM(EchoConfig.preset(preset)).eval()
    for mixer in model.mixers():
        nn.init.xavier_uniform_(mixer.out_proj.weight)
    return model


def read_in_pieces(
    model: EchoLM, text: Int[Tensor, "1 t"], console: Console
) -> Float[Tensor, "1 steps vocab"]:
    """Read to the end, show the state's size on the way, return the last predictions."""
    table = Table("Tokens read", "State", "A Transformer's cache", title_justify="left")
    state: EchoState | None = None
    shown, started, last = 0, time.perf_counter(), []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("Reading", total=text.shape[1])
        for piece in pieces(text):
            out = model(piece, state=state, return_state=True)
            state = out.state
            progress.advance(task, piece.shape[1])
            last.append(out.logits)
            del last[:-STEPS]
            read = int(state.count)
            if read >= 10 * shown or read == text.shape[1]:
                shown = read
                table.add_row(f"{read:,}", f"{state.nbytes:,} B", f"{cache(model, read):,} B")
    console.print(table)
    seconds = time.perf_counter() - started
    console.print(f"In pieces and steps: {text.shape[1] / seconds:,.0f} tokens/s.")
    return torch.cat(last, dim=1)


def pieces(text: Int[Tensor, "1 t"]) -> Iterator[Int[Tensor, "1 piece"]]:
    """Random cuts, growing from short to long, and single tokens at the end."""
    start, end = 0, text.shape[1] - STEPS
    while start < end:
        longest = min(64 + start // 2, LONGEST_PIECE)
        size = min(end - start, int(torch.randint(1, longest, ())))
        yield text[:, start : start + size]
        start += size
    yield from text[:, end:].split(1, dim=1)


def cache(model: EchoLM, tokens: int) -> int:
    """Bytes that keys and values of as many attention layers would take, in fp32."""
    return 2 * 4 * model.config.dim * len(model.config.mixers) * tokens
