"""`echo-lm data`: what the commands show."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from echo_lm.data.preparation import prepare
from echo_lm.data.tokenizer import train_tokenizer


def run_prepare(files: Sequence[Path], *, out: Path, **settings: Any) -> None:
    """Prepare, then show what the folder holds."""
    console = Console()
    manifest = prepare(files, out=out, console=console, **settings)
    table = Table("Split", "Documents", "Tokens", "Bytes of text", "Shards")
    for split, entry in manifest["splits"].items():
        counts = [f"{entry[name]:,}" for name in ("documents", "tokens", "bytes")]
        table.add_row(split, *counts, str(len(entry["shards"])))
    console.print(table)
    console.print(
        f"In {out}, as {manifest['recipe']['dtype']}; a document's separator is among its tokens.",
        highlight=False,
    )


def run_train_tokenizer(files: Sequence[Path], *, out: Path, **settings: Any) -> None:
    """Train, then say what came out."""
    console = Console()
    start = time.perf_counter()
    size = train_tokenizer(files, out=out, console=console, **settings)
    seconds = time.perf_counter() - start
    console.print(f"{out} has {size:,} tokens, after {seconds:.0f} s.", highlight=False)
