"""What a run has told: one record a step and one an evaluation, in memory and as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from typing import Any

from echo_lm.results import sayable

Record = dict[str, Any]
"""Of a step: `step`, `loss`, `lr`, `gradient_norm` (before clipping), `tokens_per_second`, and,
where someone watches, `utilisation`: these over what the model's matrix products alone would allow.
Of an evaluation: `step`, `test_loss`, `test_accuracy`, `test_exact`, and `ska`, the health of each
SKA layer."""

METRICS_FILE = "metrics.jsonl"


@dataclass
class History:
    """The records of a run in order, and why it ended."""

    records: list[Record] = field(default_factory=list)
    ended: str = ""
    """What ended it: "steps", "target" or "patience"."""

    def curve(self, name: str, every: int = 1) -> list[tuple[int, Any]]:
        """`(step, value)` of one entry, such as "loss"; every so many, and always the last."""
        points = [(record["step"], record[name]) for record in self.records if name in record]
        return [p for i, p in enumerate(points) if i % every == 0 or i == len(points) - 1]

    def last(self, name: str) -> Any:
        """The latest value of one entry."""
        return self.curve(name)[-1][1]

    @property
    def steps(self) -> int:
        """Steps taken."""
        return int(self.records[-1]["step"]) if self.records else 0


def append_records(folder: Path, records: Iterable[Record]) -> None:
    """Add lines to the metrics file."""
    path = folder / METRICS_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(line_of(record) for record in records)
    except OSError as error:
        raise ValueError(
            f"{path} could not be written ({error}); checkpoints are whole: make room and run "
            "the same again to go on."
        ) from None


def records_until(folder: Path, step: int) -> list[Record]:
    """What the metrics file has up to a step; a line that was cut short ends it."""
    path = folder / METRICS_FILE
    kept: list[Record] = []
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for line in lines:
        try:
            record = known(json.loads(line))
        except json.JSONDecodeError:
            break
        if record["step"] > step:
            break
        kept.append(record)
    return kept


def write_records(folder: Path, records: Iterable[Record]) -> None:
    """Make these the metrics file, if there is one."""
    path = folder / METRICS_FILE
    if path.exists():
        unfinished = path.with_name(f"{path.name}.unfinished")
        unfinished.write_text("".join(map(line_of, records)), encoding="utf-8")
        unfinished.replace(path)


def line_of(record: Record) -> str:
    """A line of JSON, which has no word for what is not finite but null."""
    return json.dumps(sayable(record), allow_nan=False) + "\n"


def known(value: Any) -> Any:
    """What a line has said, null being a number that is none."""
    if isinstance(value, dict):
        return {name: known(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [known(entry) for entry in value]
    return nan if value is None else value
