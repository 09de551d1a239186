"""What an experiment is: cells that run apart and are kept, then tables and a figure of all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any, ClassVar, Literal, Self

from rich.console import Console

Scale = Literal["smoke", "full"]
"""`smoke` shows in minutes on a CPU that everything runs; `full` is what is reported."""

Settings = Mapping[str, Any]
"""What tells one cell of an experiment from the others; goes to JSON."""


@dataclass(frozen=True)
class Workbench:
    """Where a cell runs."""

    device: str
    folder: Path
    """The cell's own, for checkpoints: an interrupted cell finds what it left there. Removed when
    the cell is done."""
    keep: Path
    """The cell's own too, for weights that other experiments go on from. Stays, outside of git."""
    console: Console


@dataclass(frozen=True)
class Finished:
    """A cell that has run."""

    settings: Settings
    seed: int
    numbers: Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """Rows of text and numbers under a header."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        ruler = ["---", *["---:"] * (len(self.header) - 1)]
        # A bar inside a cell, as in |q|, would end it.
        rows = [[cell.replace("|", "\\|") for cell in row] for row in (self.header, *self.rows)]
        lines = [f"| {' | '.join(row)} |" for row in (rows[0], ruler, *rows[1:])]
        return "\n".join([f"**{self.title}**", "", *lines])


class Experiment(ABC):
    """One table or figure. A cell is a pure function of its protocol, settings, seed and device."""

    name: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]
    """Where the paper has it, or "ours"."""

    @abstractmethod
    def protocol(self, scale: Scale) -> dict[str, Any]:
        """What all cells share: steps, batch, learning rate, sizes."""

    @abstractmethod
    def cells(self, scale: Scale) -> list[Settings]:
        """What varies, one entry for each cell of a seed."""

    @abstractmethod
    def run(
        self, protocol: Mapping[str, Any], settings: Settings, seed: int, bench: Workbench
    ) -> dict[str, Any]:
        """Run one cell and return its numbers, curves included."""

    @abstractmethod
    def tables(self, done: Sequence[Finished]) -> list[Table]:
        """What was found, beside the paper's own numbers where it has any."""

    @abstractmethod
    def draw(self, done: Sequence[Finished], path: Path) -> None:
        """The figure, through `echo_lm.plots.figure`."""

    def remarks(self, done: Sequence[Finished]) -> list[str]:
        """Sentences that the numbers bear out, for the report."""
        return []


MATERIAL = {
    "text": "a folder of tokens, which echo-lm data prepare makes",
    "evals": "a folder of evaluation sets, as of echo-lm eval --data",
    "haystack": "a file of prose, as of echo-lm needle --text",
}
"""What a user may bring, by the option of `echo-lm reproduce`."""


class OnMaterial(Experiment):
    """An experiment on what the user brings. Its records name that by hashes, not by paths."""

    reads: ClassVar[str]
    """Which of `MATERIAL`."""

    def __init__(self, material: Path | None = None, results: Path = Path("results")) -> None:
        self._material, self.results = material, results

    def given(self, material: Path | None, results: Path) -> Self:
        """The same experiment on this; `results` is where others have left what it goes on from."""
        if material is None:
            raise ValueError(
                f"{self.name} reads {MATERIAL[self.reads]}: name it with --{self.reads}."
            )
        return type(self)(material, results)

    @property
    def material(self) -> Path:
        assert self._material is not None, f"{self.name} was given nothing"
        return self._material


def select(done: Sequence[Finished], **wanted: Any) -> list[Finished]:
    """The cells whose settings have these values."""
    return [
        cell
        for cell in done
        if all(cell.settings.get(name) == value for name, value in wanted.items())
    ]


def distinct(done: Sequence[Finished], setting: str) -> list[Any]:
    """The values a setting takes, in the order of the cells."""
    return list(dict.fromkeys(cell.settings[setting] for cell in done))


def over_seeds(
    cells: Sequence[Finished],
    value: Callable[[Mapping[str, Any]], float],
    form: Callable[[float], str] = "{:.3g}".format,
) -> str:
    """Mean and standard deviation over seeds, one number for one seed, a dash for none."""
    found = [float(value(cell.numbers)) for cell in cells]
    if not found:
        return "–"
    if len(found) == 1:
        return form(found[0])
    return f"{form(mean(found))} ± {form(stdev(found))}"


def percent(share: float) -> str:
    """A share as a table shows it."""
    return f"{100 * share:.1f}"
