"""Metrics in a tracker as well, for who wants to watch a run from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from echo_lm.extras import need
from echo_lm.train.history import Record


@contextmanager
def tracked(
    kind: str, folder: Path, settings: dict[str, Any]
) -> Iterator[Callable[[Record], None]]:
    """Yields what takes in each record: trackio and wandb have the same three functions."""
    if not kind:
        yield lambda record: None
        return
    tracker = need(kind, "track")
    tracker.init(project="echo-lm", name=folder.name, config=settings)
    try:
        yield lambda record: tracker.log(numbers(record), step=record["step"])
    finally:
        tracker.finish()


def numbers(record: Record) -> dict[str, float]:
    """What of a record is a number, but the step."""
    return {
        name: value
        for name, value in record.items()
        if isinstance(value, int | float) and name != "step"
    }
