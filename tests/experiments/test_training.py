"""What trained cells share: runs that go on, curves that are short, readings over a grid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from echo_lm.experiments import training
from echo_lm.experiments.base import Finished, Workbench
from echo_lm.model.config import EchoConfig, Mamba2Config, SKAConfig
from echo_lm.tasks import MQAR
from echo_lm.train import History, loop

TASK = MQAR(pairs=2, gap=4)
PROTOCOL = {
    "steps": 6,
    "batch": 2,
    "warmup": 2,
    "evaluate_every": 2,
    "evaluate_rows": 4,
    "checkpoint_every": 3,
    "rows": 4,
    "what cells share": "more than settings of training",
}


def small() -> EchoConfig:
    return EchoConfig(
        dim=16,
        mixers=("mamba2", "ska"),
        vocab_size=9,
        heads=2,
        mlp="swiglu",
        mlp_hidden=16,
        ska=SKAConfig(rank=4),
        mamba2=Mamba2Config(state_dim=4, head_dim=8),
    )


def bench(folder: Path) -> Workbench:
    return Workbench("cpu", folder, folder / "weights", Console(quiet=True))


def numbers(tmp_path: Path, name: str = "run") -> dict[str, Any]:
    fitted = training.fit(small(), TASK, PROTOCOL, 0, bench(tmp_path / name))
    return fitted.numbers()


def test_curves_are_short_and_tell_of_every_layer(tmp_path: Path) -> None:
    found = numbers(tmp_path)
    assert (found["steps"], found["ended"]) == (6, "steps")
    assert found["training"]["step"] == [1, 2, 3, 4, 5, 6]
    assert found["tests"]["step"] == found["tests"]["ska"]["step"] == [2, 4, 6]
    layer = found["tests"]["ska"]["blocks.1.mixers.0"]
    assert torch.tensor(layer["coefficients"]).shape == (3, 2, 3)
    assert all(value > 0 for value in layer["lambda_min"])
    assert json.loads(json.dumps(found)) == found


def test_an_interrupted_cell_goes_on_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_step = loop.Run.take_step

    def interrupted(run: loop.Run) -> None:
        if run.step == 4:
            raise KeyboardInterrupt
        take_step(run)

    whole = numbers(tmp_path, "whole")
    monkeypatch.setattr(loop.Run, "take_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        numbers(tmp_path, "cut")
    monkeypatch.setattr(loop.Run, "take_step", take_step)
    assert numbers(tmp_path, "cut") == whole


def test_a_seed_decides_weights_and_batches() -> None:
    same, again, other = (training.build(small(), TASK, seed) for seed in (3, 3, 4))
    assert same.config.vocab_size == TASK.vocab_size
    assert torch.equal(same.embedding.weight, again.embedding.weight)
    assert not torch.equal(same.embedding.weight, other.embedding.weight)
    assert training.train_config(PROTOCOL, 3, steps=9).seed == 3
    assert training.train_config(PROTOCOL, 3, steps=9).steps == 9


def test_readings_are_named_and_found_by_their_settings() -> None:
    fitted = training.Fitted(training.build(small(), TASK, 0), History(), facts_only=False)
    grid = [({"pairs": p, "gap": g}, MQAR(p, g)) for p in (1, 2) for g in (4, 8)]
    found = {"readings": training.read_over(fitted, grid, rows=5, seed=0)}
    split = training.read_over(fitted, grid, rows=5, seed=0, tokens_at_once=1)
    assert [point["pairs"] for point in found["readings"]] == [1, 1, 2, 2]
    assert {point["state bytes"] for point in split} == {found["readings"][0]["state bytes"]}
    for value in (0.0, 1.0):
        for point in found["readings"]:
            point["accuracy"] = value if point["gap"] == 4 else 1 - value
        assert training.found_at(gap=4)(found) == value
        assert training.found_at(pairs=1)(found) == 0.5


def test_spans_cover_everything_once() -> None:
    items = list(range(257))
    spans = training.spans(items, 100)
    assert [item for span in spans for item in span] == items
    assert {len(span) for span in spans} == {2, 3}
    assert training.thin(items, 100)[-1] == 256
    assert training.thin([1, 2], 100) == [1, 2]
    assert training.thin([], 100) == []


def test_steps_needed_say_how_often_it_was_never() -> None:
    def cell(*accuracies: float) -> Finished:
        steps = [100 * i for i in range(1, len(accuracies) + 1)]
        return Finished({}, 0, {"tests": {"step": steps, "accuracy": accuracies}})

    good, never = cell(0.5, 0.9, 0.8), cell(0.1, 0.2)
    assert training.steps_needed([good], 0.9) == "200"
    assert training.steps_needed([good, good, never], 0.9) == "200 ± 0 (never in 1 of 3)"
    assert training.steps_needed([never], 0.9) == "never"
    assert training.steps_needed([], 0.9) == "–"
