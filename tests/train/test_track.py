"""Metrics for a tracker."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from echo_lm.train.track import numbers, tracked


def test_numbers_are_passed_on_and_the_rest_is_not() -> None:
    record = {"step": 3, "loss": 0.5, "tokens_per_second": 100, "ska": {"a": 1}, "note": "x"}
    assert numbers(record) == {"loss": 0.5, "tokens_per_second": 100}


def test_without_a_tracker_nothing_is_needed() -> None:
    with tracked("", Path("run"), {}) as track:
        track({"step": 1, "loss": 0.5})


@pytest.mark.parametrize("kind", ["trackio", "wandb"])
def test_a_missing_one_is_said(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, kind, None)
    with (
        pytest.raises(ValueError, match=rf"This needs {kind}, .*pip install 'echo-lm\[track\]'"),
        tracked(kind, Path("run"), {}),
    ):
        pass


def test_a_run_is_opened_and_closed_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The three functions that trackio and wandb share, called as both document them."""
    said: list[Any] = []
    stand_in = SimpleNamespace(
        init=lambda *, project, name, config: said.append((project, name, config)),
        log=lambda metrics, step: said.append((metrics, step)),
        finish=lambda: said.append("finish"),
    )
    monkeypatch.setitem(sys.modules, "trackio", stand_in)  # type: ignore[arg-type]

    def broken_off() -> None:
        with tracked("trackio", Path("runs/small"), {"lr": 1}) as track:
            track({"step": 2, "loss": 0.5, "ska": {}})
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        broken_off()
    assert said == [("echo-lm", "small", {"lr": 1}), ({"loss": 0.5}, 2), "finish"]
