"""Our experiments on the operator run from end to end, and say what their numbers bear out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from echo_lm.experiments import ablation, find, forgetting, long_conditioning, recurrent
from echo_lm.experiments.base import Finished
from echo_lm.experiments.runner import reproduce
from echo_lm.layers import SpectralKoopmanAttention
from echo_lm.model.lm import EchoLM
from echo_lm.tasks import MQAR
from echo_lm.tasks.overwritten import Overwritten

ABLATIONS = ("filters", "causality", "rank", "ridge", "convolutions", "forgetting")
BRIEF = {
    "steps": 2,
    "batch": 2,
    "warmup": 1,
    "evaluate_every": 1,
    "evaluate_rows": 2,
    "rows": 2,
    "gaps": [8, 40],
}


def make_brief(name: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    """The experiment with two steps of two rows, and texts as short as can be."""
    experiment = find(name)
    protocol = type(experiment).protocol

    def brief(self: Any, scale: Any) -> dict[str, Any]:
        usual = protocol(self, scale)
        return {**usual, **{k: v for k, v in BRIEF.items() if k in usual}, **changes}

    monkeypatch.setattr(type(experiment), "protocol", brief)
    return experiment


def run(experiment: Any, out: Path, share: str = "1/1") -> tuple[str, list[dict[str, Any]]]:
    """The report and all records."""
    quiet = Console(quiet=True)
    folder = reproduce(
        experiment, scale="smoke", seeds=1, out=out, device="cpu", share=share, console=quiet
    )
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    cells = sorted((folder / "cells").iterdir())
    # NaN is no JSON.
    records = [json.loads(cell.read_text(), parse_constant=pytest.fail) for cell in cells]
    return (folder / "README.md").read_text(), records


@pytest.mark.parametrize("name", ABLATIONS)
def test_ablations_run_from_end_to_end(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = make_brief(name, monkeypatch)
    report, records = run(experiment, tmp_path)
    assert "have not run" not in report
    tasks, variants = experiment.tasks("smoke"), experiment.variants("smoke")
    assert len(records) == len(tasks) * len(variants)
    for title in ("Accuracy in percent, at the end of training", "Steps until 90%"):
        assert title in report
    for task in tasks:
        assert f"\n{task}: 90% in every seed" in report
    for variant in variants:
        assert f"| {variant} |" in report


@pytest.mark.parametrize("name", ABLATIONS)
@pytest.mark.parametrize("scale", ["smoke", "full"])
def test_every_variant_is_a_model_and_every_task_a_task(name: str, scale: Any) -> None:
    """Settings that no layer takes, or no length holds, are found before a GPU is."""
    experiment = find(name)
    protocol = experiment.protocol(scale)
    assert json.loads(json.dumps(protocol)) == protocol
    config = ablation.MODELS[protocol["model"]]
    for changes in protocol["variants"].values():
        ska = config.ska.__class__(**{**vars(config.ska), **changes})
        SpectralKoopmanAttention(config.dim, heads=config.heads, **vars(ska))
    for named in protocol["tasks"].values():
        for changed in ({}, *named["longer"].values()):
            assert ablation.task_of({**named, **changed}).length > 0


def test_fading_is_not_told_where_a_round_ends() -> None:
    tasks = map(ablation.task_of, find("forgetting").tasks("full").values())
    (rounds,) = {task.round_length for task in tasks if isinstance(task, Overwritten)}
    assert rounds % forgetting.FADES_EVERY


def cell(settings: dict[str, Any], seed: int, accuracies: Sequence[float]) -> Finished:
    tests = {"step": [100 * i for i in range(1, len(accuracies) + 1)], "accuracy": accuracies}
    return Finished(settings, seed, {"tests": tests, "accuracy": accuracies[-1]})


def test_the_ranking_names_who_was_quick_and_who_never_was() -> None:
    found = {
        "slow": [cell({}, 0, [0.1, 0.2, 0.9])],
        "quick": [cell({}, 0, [0.95]), cell({}, 1, [0.1, 0.95])],
        "unsure": [cell({}, 0, [0.95]), cell({}, 1, [0.3])],
    }
    assert ablation.ranking(found) == (
        "90% in every seed: quick (150 steps), slow (300 steps); not: unsure (62%)"
    )
    assert ablation.ranking({"a": found["slow"]}) == "90% in every seed: a (300 steps)"
    assert ablation.ranking({"b": [cell({}, 0, [0.0])]}) == "90% in every seed: none; not: b (0%)"


def test_a_run_that_has_ended_stays_where_it_was() -> None:
    tests = {"step": [50, 100], "accuracy": [0.5, 1.0]}
    assert ablation.held(tests, [25, 50, 75, 100, 400]) == [0.0, 0.5, 0.5, 1.0, 1.0]


def test_recurrent_runs_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, records = run(make_brief("recurrent", monkeypatch), tmp_path)
    assert [len(record["numbers"]["readings"]) for record in records] == [2] * 4
    assert "In fp32, " in report


@pytest.mark.parametrize("causality", recurrent.VARIANTS)
def test_what_is_said_in_pieces_is_compared_with_what_is_said_at_once(causality: str) -> None:
    """As equal as rounding allows while all is well, and not when the state is not handed on."""
    config = ablation.MODELS["a Mamba-2 and an SKA block of width 64"]
    ska = config.ska.__class__(**{**vars(config.ska), **recurrent.VARIANTS[causality]})
    torch.manual_seed(0)
    model = EchoLM(config.__class__(**{**vars(config), "ska": ska, "vocab_size": 128}))
    for module in model.modules():
        if isinstance(module, SpectralKoopmanAttention):
            torch.nn.init.normal_(module.out_proj.weight, std=0.1)
    batch = MQAR(4, gap=100).batch(3, seed=0)
    found = recurrent.compare(model, batch, "fp32")
    assert found["answers"] == 12
    assert set(found["answers that differ"].values()) == {0}
    # Two blocks, each off by a rounding that the ridge of 0.03 magnifies, and a factor of a few.
    assert 0 < max(found["difference"].values()) < 16 * 2 * torch.finfo(torch.float32).eps / 0.03
    forgetful = model.forward
    model.forward = lambda *a, state=None, **k: forgetful(*a, **k)  # type: ignore[method-assign]
    assert min(recurrent.compare(model, batch, "fp32")["difference"].values()) > 0.01


SHORT = {"4 pairs, gap 16": {"task": "mqar", "pairs": 4, "gap": 16, "longer": {}}}


def test_long_conditioning_runs_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, records = run(make_brief("long-conditioning", monkeypatch, tasks=SHORT), tmp_path)
    assert "have not run" not in report
    assert len(records) == len(long_conditioning.variants(24))
    assert "the rank correlation of the worst condition number" in report
    for record in records:
        numbers, change = record["numbers"], record["settings"]["change"]
        assert len(numbers["training"]["step"]) == 2
        parts = numbers["gradient by part"]
        assert all(norm >= 0 for norm in parts.values())
        assert ("SKA: queries and keys" in parts) == (change != "Mamba-2 for SKA")
        assert bool(numbers["health"]["condition"]) == (change != "Mamba-2 for SKA")


def test_a_run_that_diverges_is_kept_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = dict(list(long_conditioning.variants(24).items())[:2])
    experiment = make_brief(
        "long-conditioning", monkeypatch, tasks=SHORT, variants=two, lr=1e30, steps=4
    )
    report, records = run(experiment, tmp_path)
    assert all("Step " in record["numbers"]["diverged"] for record in records)
    assert report.count("| 1 of 1 |") == 2
    assert all(record["numbers"]["health"]["condition"] == [] for record in records)


def test_every_change_of_the_50m_model_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    config = long_conditioning.MODELS["echo-50m"]
    made = {
        name: long_conditioning.changed(config, change)
        for name, change in long_conditioning.variants(config.ska.rank).items()
    }
    same = [name for name, other in made.items() if other == config]
    assert same == ["default", "a tenth of the learning rate"]
    assert set(made["Mamba-2 for SKA"].mixers) == {"mamba2"}


def test_every_parameter_has_its_part() -> None:
    config = list(long_conditioning.MODELS.values())[1]
    model = EchoLM(config)
    parts = long_conditioning.gradient_by_part(model, MQAR(2, gap=8).batch(2, seed=0))
    assert set(parts) == {
        "SKA: queries and keys",
        "SKA: values and output",
        "SKA: filter, ridge, scale",
        "Mamba-2",
        "MLP",
        "embedding, head, norms",
    }
    square = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
    assert sum(norm**2 for norm in parts.values()) == pytest.approx(square, rel=1e-2)


def test_rank_correlation() -> None:
    rising = [1.0, 10.0, 30.0, 1e6]
    assert long_conditioning.rank_correlation(rising, [2.0, 3.0, 4.0, 5.0]) == pytest.approx(1)
    assert long_conditioning.rank_correlation(rising, [9.0, 3.0, 2.0, 1.0]) == pytest.approx(-1)
