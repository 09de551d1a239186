"""`echo-lm bench train`: steps as training takes them, and what share of the machine they use."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from echo_lm import EchoConfig, EchoLM
from echo_lm.bench import train
from echo_lm.bench.parity import ParityError
from echo_lm.bench.record import Row
from echo_lm.train.speed import flops_per_token

from .runs import measured


def test_models_take_steps_side_by_side(tmp_path: Path) -> None:
    group = ("synthetic-ska", "synthetic-attention")
    bench = train.bench([group], [(2, 16), (1, 24)], rounds=2, seed=0, device="cpu")
    record, said = measured(bench, tmp_path)
    assert len(record["numbers"]) == 2
    for tokens, (title, rows) in zip((32, 24), record["numbers"].items(), strict=True):
        assert title.startswith("synthetic-ska, synthetic-attention; ")
        *models, best = rows
        assert [row["what"] for row in models] == list(group)
        assert best["what"] == train.RATE
        for row in models:
            flops = flops_per_token(EchoLM(EchoConfig.preset(row["what"])))
            assert row["compiled"] == "no"
            assert row["tokens/s"] == pytest.approx(1e3 * tokens / row["ms"])
            assert row["TFLOP/s"] == pytest.approx(row["tokens/s"] * flops / 1e12)
            assert row["first loss"] == pytest.approx(math.log(128), rel=0.3)
            assert row["share"] == pytest.approx(row["TFLOP/s"] / best["TFLOP/s"])
    assert "a CPU compiles nothing" in said
    assert record["targets"] == []


def test_a_step_is_one_of_training() -> None:
    """It changes the weights, and counts."""
    found = train.warm_up("synthetic-ssm", (1, 12), False, 0, "cpu")
    before = found.run.model.embedding.weight.detach().clone()
    step = found.run.step
    assert train.step_seconds(found.run, "cpu") > 0
    assert found.run.step == step + 1
    assert not torch.equal(before, found.run.model.embedding.weight)
    assert found.run.unread == []


def test_only_what_is_compiled_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise RuntimeError("cannot\nbe compiled")

    monkeypatch.setattr(train, "warm_up", fail)
    assert train.begin("a", (1, 2), True, 0, "cpu") == "RuntimeError: cannot"
    with pytest.raises(RuntimeError, match="cannot"):
        train.begin("a", (1, 2), False, 0, "cpu")


def test_a_compiled_model_is_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the compiled one, if it may be called so, begins from other weights."""
    real = train.warm_up

    def warm_up(preset: str, shape: Any, compiled: bool, seed: int, device: str) -> train.Trained:
        return real(preset, shape, False, seed + wrong * compiled, device)

    monkeypatch.setattr(train, "warm_up", warm_up)
    monkeypatch.setattr(train, "compiling", lambda device: nullcontext((False, True)))
    arguments = ["synthetic-ssm"], (1, 12), 1, 0, "cpu", lambda what: None
    wrong = False
    plain, compiled, _ = train.compare(*arguments)
    assert plain["first loss"] == compiled["first loss"]
    wrong = True
    with pytest.raises(ParityError, match=r"synthetic-ssm has a loss of .* no speed is reported"):
        train.compare(*arguments)


def test_targets_are_of_each_model_at_its_fastest() -> None:
    def row(name: str, compiled: str, speed: float | None, share: float) -> Row:
        ms = None if speed is None else 1e3 / speed
        return {
            "what": name, "compiled": compiled, "ms": ms, "tokens/s": speed, "share": share
        }  # fmt: skip

    rows = [
        row("echo-50m", "no", 100.0, 0.2),
        row("echo-50m", "yes", 300.0, 0.6),
        row("transformer-50m", "no", 200.0, 0.4),
        row("transformer-50m", "yes", None, 0.0),
    ]
    group = ("echo-50m", "transformer-50m")
    tables = {train.title_of(group, shape): rows for shape in ((16, 2048), (2, 16384), (1, 64))}
    found = {target.name: (target.value, target.met) for target in train.targets(tables)}
    assert found == {
        "echo-50m, 16 x 2,048 tokens: share of the matrix rate": (0.6, True),
        "echo-50m, 16 x 2,048 tokens: tokens/s over transformer": (1.5, True),
        "echo-50m, 2 x 16,384 tokens: tokens/s over transformer": (1.5, False),
    }


def test_as_a_user_runs_it(tmp_path: Path) -> None:
    path = train.run(
        ["synthetic-ssm"] * 2, shapes=["1x8"], rounds=1, seed=0, device="cpu", out=tmp_path
    )
    record = json.loads(path.read_text())
    assert list(record["numbers"]) == ["synthetic-ssm; 1 x 8 tokens"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"presets": ["gpt"]}, "There is no preset 'gpt'; there are echo-180m"),
        ({"shapes": ["16,2048"]}, "A shape is like"),
        ({"device": "meta"}, "Benchmarks run on cpu or cuda; got device 'meta'"),
        ({"rounds": 0}, "rounds must be at least 1, got 0"),
    ],
)
def test_what_is_wrong_is_said(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"presets": [], "shapes": ["1x8"], "rounds": 1, "seed": 0}
    given |= {"device": "cpu", "out": tmp_path, **change}
    with pytest.raises(ValueError, match=said):
        train.run(given.pop("presets"), **given)
