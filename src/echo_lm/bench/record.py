"""What a benchmark found, and under which circumstances: as JSON for the record, as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

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
        table = Table(title=f"{name}: {title}", title_justify="left")
        for column in rows[0]:
            text = any(isinstance(row[column], str) for row in rows)
            table.add_column(column, justify="left" if text else "right", no_wrap=column == "what")
        for row in rows:
            table.add_row(*_readable(row.values()))
        console.print(table)
    for target in findings.targets:
        sign, limit = (">=", target.at_least) if target.at_most is None else ("<=", target.at_most)
        verdict = "[green]met[/green]" if target.met else "[red]missed[/red]"
        (value,) = _readable([target.value])
        console.print(f"{target.name}: {value} {sign} {limit:.3g}, {verdict}")


def _readable(values: Iterable[Any]) -> list[str]:
    def form(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
        return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)

    return [form(value) for value in values]
