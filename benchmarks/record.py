"""What a benchmark found, and under which circumstances: as JSON for the record, as a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from echo_lm.results import write_json

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"

Row = dict[str, str | int | float]


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
    tables: dict[str, list[Row]]
    targets: list[Target]
    device: str = "cpu"
    """The folder of `results` these belong to."""


def save(name: str, findings: Findings, circumstances: dict[str, Any]) -> Path:
    """Write `results/DEVICE/NAME.json`; returns its path seen from the repository."""
    entries = {
        "benchmark": name,
        "config": findings.config,
        "seed": findings.seed,
        **circumstances,
        "targets": [target.to_dict() for target in findings.targets],
        "numbers": findings.tables,
    }
    path = RESULTS / findings.device / f"{name}.json"
    write_json(path, entries)
    return path.relative_to(ROOT)


def show(name: str, findings: Findings, console: Console) -> None:
    for title, rows in findings.tables.items():
        table = Table(title=f"{name}: {title}", title_justify="left")
        for column, value in rows[0].items():
            text = isinstance(value, str)
            table.add_column(column, justify="left" if text else "right", no_wrap=text)
        for row in rows:
            table.add_row(*(_readable(value) for value in row.values()))
        console.print(table)
    for target in findings.targets:
        sign, limit = (">=", target.at_least) if target.at_most is None else ("<=", target.at_most)
        verdict = "[green]met[/green]" if target.met else "[red]missed[/red]"
        console.print(f"{target.name}: {_readable(target.value)} {sign} {limit:g}, {verdict}")


def _readable(value: str | int | float) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else value
