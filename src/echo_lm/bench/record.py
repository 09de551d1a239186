"""What a benchmark found, and under which circumstances: as JSON for the record, as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from echo_lm.results import write_json

Row = dict[str, Any]
"""Text and numbers under the names of columns; None where there is nothing to tell."""


@dataclass(frozen=True)
class Target:
    """A promise: `value` must be at least, or at most, `limit`."""

    name: str
    value: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def met(self) -> bool:
        low = self.at_least is None or self.value >= self.at_least
        return low and (self.at_most is None or self.value <= self.at_most)

    def to_dict(self) -> dict[str, Any]:
        limits = {key: value for key, value in asdict(self).items() if value is not None}
        return {**limits, "met": self.met}


@dataclass(frozen=True)
class Findings:
    config: dict[str, Any]
    seed: int | None
    tables: Mapping[str, Sequence[Row]]
    targets: Sequence[Target]
    device: str = "cpu"
    """The folder of `results` that a benchmark of `benchmarks/` is filed under."""


def save(path: Path, name: str, findings: Findings, circumstances: Mapping[str, Any]) -> None:
    """Write the record of a benchmark."""
    entries = {
        "benchmark": name,
        "config": findings.config,
        "seed": findings.seed,
        **circumstances,
        "targets": [target.to_dict() for target in findings.targets],
        "numbers": findings.tables,
    }
    write_json(path, entries)


def show(name: str, findings: Findings, console: Console) -> None:
    for title, rows in findings.tables.items():
        notes = list(dict.fromkeys(row["note"] for row in rows if row.get("note") is not None))
        console.print()
        _show_table(f"{name}: {title}", [_numbered(row, notes) for row in rows], console)
        for number, note in enumerate(notes, 1):
            console.print(f"({number}) {note}", highlight=False, markup=False, soft_wrap=True)
    console.print()
    for target in findings.targets:
        sign, limit = (">=", target.at_least) if target.at_most is None else ("<=", target.at_most)
        verdict = "[green]met[/green]" if target.met else "[red]missed[/red]"
        (value,) = _readable([target.value])
        console.print(f"{target.name}: {value} {sign} {limit:.3g}, {verdict}")


def _show_table(title: str, rows: Sequence[Row], console: Console) -> None:
    """Columns that tell something; where there is little room text is folded, never a number."""
    table = Table(
        title=Text(title),
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
        show_edge=False,
    )
    told = [column for column in rows[0] if any(row[column] is not None for row in rows)]
    for column in told:
        if any(isinstance(row[column], str) for row in rows):
            table.add_column(column, overflow="fold")
        else:
            heading = "\n".join(column.rsplit(" ", 1))
            table.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    for row in rows:
        table.add_row(*map(Text, _readable(row[column] for column in told)))
    console.print(table)


def _numbered(row: Row, notes: Sequence[str]) -> Row:
    """With the number of its note, which is told in full under the table."""
    note = row.get("note")
    return row if note is None else row | {"note": 1 + notes.index(note)}


def _readable(values: Iterable[Any]) -> list[str]:
    def form(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
        return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)

    return [form(value) for value in values]
