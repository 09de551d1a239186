"""Benchmarks at sizes for tests."""

from __future__ import annotations

import pytest

from echo_lm.bench import decode, timing, train
from echo_lm.train import speed


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed to compare with, and how often."""
    monkeypatch.setitem(timing.COPIED, "cpu", 2**16)
    monkeypatch.setitem(speed.SIDES, "cpu", 64)
    monkeypatch.setitem(train.STEPS, "cpu", 1)
    monkeypatch.setattr(decode, "STEPS", 3)
