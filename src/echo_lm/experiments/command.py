"""`echo-lm reproduce`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from echo_lm.experiments import EXPERIMENTS, find
from echo_lm.experiments.base import MATERIAL, Experiment, OnMaterial, Scale
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
    material: Mapping[str, Path | None],
) -> None:
    """Run what is missing of an experiment."""
    reproduce(
        prepared(name, material, out),
        scale=scale,
        seeds=seeds,
        out=out,
        device=pick_device(device),
        share=share,
        only=only,
        console=Console(),
    )


def prepared(name: str, material: Mapping[str, Path | None], results: Path) -> Experiment:
    """The experiment with what it is to read; what it would not look at is refused."""
    experiment = find(name)
    wanted = experiment.reads if isinstance(experiment, OnMaterial) else ""
    for option, path in material.items():
        if path is not None and option != wanted:
            said = MATERIAL[wanted] if wanted else "nothing of yours"
            raise ValueError(f"{name} reads {said}: leave out --{option}.")
    if isinstance(experiment, OnMaterial):
        return experiment.given(material[wanted], results)
    return experiment
