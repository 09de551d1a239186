"""`echo-lm reproduce`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from echo_lm.experiments import EXPERIMENTS, find
from echo_lm.experiments.base import Scale
from echo_lm.experiments.runner import reproduce
from echo_lm.ops.backends import pick_device


def list_experiments(console: Console | None = None) -> None:
    """Every experiment, and where the paper has it."""
    table = Table("Name", "What it shows", "Paper", "Cells (smoke, full)")
    for name, experiment in EXPERIMENTS.items():
        sizes = f"{len(experiment.cells('smoke'))}, {len(experiment.cells('full'))}"
        table.add_row(name, experiment.title, experiment.source, sizes)
    (console or Console()).print(table)


def run(
    name: str,
    *,
    scale: Scale,
    seeds: int,
    out: Path,
    device: str,
    share: str,
    only: Sequence[str],
) -> None:
    """Run what is missing of an experiment."""
    reproduce(
        find(name),
        scale=scale,
        seeds=seeds,
        out=out,
        device=pick_device(device),
        share=share,
        only=only,
        console=Console(),
    )
