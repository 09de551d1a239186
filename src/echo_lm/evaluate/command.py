"""`echo-lm held-out`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from echo_lm.data import TextSource, TokenShards
from echo_lm.data.source import Windows
from echo_lm.evaluate.text import Share, TextLoss, text_loss
from echo_lm.model.lm import EchoLM
from echo_lm.ops.backends import pick_device, weights_dtype
from echo_lm.results import circumstances, writable_file, write_json


def run(
    checkpoint: Path,
    tokens: Path,
    *,
    length: int,
    windows: Windows,
    first: int | None,
    out: Path | None,
    device: str,
    console: Console | None = None,
) -> TextLoss:
    """Read, show, and write down if asked to."""
    console = console or Console()
    out = out and writable_file(out)
    source = TextSource(TokenShards(tokens), length, windows=windows)
    taken = circumstances()
    place = pick_device(device)
    model = EchoLM.from_pretrained(checkpoint, device=place, dtype=weights_dtype(place))
    found = text_loss(model, source, first=first)
    console.print(
        f"{found.loss:.4f} nats a token, {found.bits_per_byte:.4f} bits a byte, over "
        f"{found.tokens:,} tokens.",
        highlight=False,
    )
    for title, shares in (
        ("By source", found.by_source),
        (f"By place in the {'document' if windows == 'packed' else 'window'}", found.by_place),
        ("Rare tokens in a document", found.rare),
        ("Rare pairs of tokens in a document, the second of them", found.rare_pairs),
    ):
        console.print(table_of(title, shares))
    if out is not None:
        settings = {"checkpoint": str(checkpoint), **source.describe(), "first": first}
        write_json(out, {"settings": settings, **taken, "numbers": asdict(found)})
        console.print(f"Written to {out}.")
    return found


def table_of(title: str, shares: tuple[Share, ...]) -> Table:
    table = Table("", "Tokens", "Nats a token", title=title, title_justify="left")
    for one in shares:
        table.add_row(one.name, f"{one.tokens:,}", f"{one.loss:.4f}")
    return table
