"""`echo-lm analyze`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from echo_lm.analysis.material import Material, at_random, of_task, of_text
from echo_lm.analysis.model import read_layers, ska_layers
from echo_lm.analysis.show import draw_layer, draw_spectra, record, remarks, table_of
from echo_lm.data.tokenise import tokenizer_of
from echo_lm.info import describe_mixers
from echo_lm.model.lm import EchoLM
from echo_lm.ops.backends import pick_device
from echo_lm.results import circumstances, writable_folder, write_json
from echo_lm.tasks import parse_settings

RECORD = "analysis.json"


def run(
    checkpoint: Path,
    *,
    task: Sequence[str],
    text: Path | None,
    tokenizer: Path | None,
    tokens: int,
    rows: int,
    seed: int,
    out: Path,
    device: str,
    console: Console | None = None,
) -> None:
    """Read, show, draw, write down."""
    if tokens < 1 or rows < 1:
        raise ValueError(f"tokens and rows must be at least 1, got {tokens} and {rows}.")
    console = console or Console()
    model = EchoLM.from_pretrained(checkpoint, device=pick_device(device), dtype=torch.float64)
    if not ska_layers(model):
        raise ValueError(
            f"{checkpoint} has no SKA layer to look at; its blocks are "
            f"{describe_mixers(model.config)}."
        )
    size = model.config.vocab_size
    material = choose(checkpoint, task, text, tokenizer, tokens, rows, seed, size)
    writable_folder(out)
    console.print(f"{checkpoint}, {model.num_parameters():,} parameters, reads {material.told}.")
    taken = circumstances()
    readings = read_layers(model, material.tokens.to(model.embedding.weight.device))
    for reading in readings:
        console.print(table_of(reading, material.kinds))
        for line in remarks(reading):
            console.print(line)
        draw_spectra(reading, out / f"block-{reading.block}-spectra.png")
        draw_layer(reading, material.kinds, out / f"block-{reading.block}.png")
    write_json(
        out / RECORD,
        {
            "checkpoint": str(checkpoint),
            "read": material.told,
            "seed": seed,
            **taken,
            "layers": [record(reading, material.kinds) for reading in readings],
        },
    )
    console.print(f"Written to {out}: {RECORD}, and two figures for each layer.")


def choose(
    checkpoint: Path,
    task: Sequence[str],
    text: Path | None,
    tokenizer: Path | None,
    tokens: int,
    rows: int,
    seed: int,
    vocab_size: int,
) -> Material:
    """A text, a task, or random tokens if neither is given."""
    if task and text is not None:
        raise ValueError("Give --text or --task, not both.")
    if tokenizer is not None and text is None:
        raise ValueError("--tokenizer is for a text: give --text FILE too.")
    if text is not None:
        return of_text(text, tokenizer_of(checkpoint, tokenizer, vocab_size), length=tokens)
    if task:
        name, *settings = task
        return of_task(name, parse_settings(settings), rows=rows, seed=seed, vocab_size=vocab_size)
    return at_random(rows=rows, length=tokens, seed=seed, vocab_size=vocab_size)
