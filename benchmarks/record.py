"""What a benchmark found, and under which circumstances: as JSON for the record, as a table."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import echo_lm

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


def stamp() -> dict[str, Any]:
    """Where, when and of what: taken before measuring, so that `load` is that of others."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": {
            "commit": os.environ.get("GIT_COMMIT") or _git("rev-parse", "HEAD"),
            "dirty": bool(_git("status", "--porcelain", "--", ".", ":!results")),
        },
        "hardware": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory_gib": round(
                os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1
            ),
            "load": round(os.getloadavg()[0], 2),
            "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "versions": {
            "echo_lm": echo_lm.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


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
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
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


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
