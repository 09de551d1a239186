"""Zoology's MQAR runs from end to end, picks the best rate, and stands beside what is published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from echo_lm.experiments import zoology
from echo_lm.experiments.base import Finished
from echo_lm.experiments.runner import reproduce
from echo_lm.experiments.training import build, train_config
from echo_lm.tasks.zoology import PROTOCOL_2_TEST, protocol_2

BRIEF = {
    "trained on": [{"length": 8, "pairs": 2, "examples": 8}],
    "tested on": [{"length": n, "pairs": 2, "examples": 2} for n in (8, 16)],
    "steps": 1,
    "batch": 2,
    "evaluate_every": 1,
    "evaluate_rows": 2,
}


class Brief(zoology.ZoologyMQAR):
    """One step of two short rows; one run diverges."""

    def protocol(self, scale: Any) -> dict[str, Any]:
        return super().protocol(scale) | BRIEF

    def cells(self, scale: Any) -> list[Any]:
        cells = super().cells(scale)
        return [*cells, {**cells[0], "lr": 1e38}]


def test_runs_from_end_to_end(tmp_path: Path) -> None:
    brief = {"steps": 3, "read_every": 1}
    experiment = Brief()
    experiment.protocol = lambda scale: Brief().protocol(scale) | brief  # type: ignore[method-assign]
    folder = reproduce(
        experiment, scale="smoke", seeds=1, out=tmp_path, device="cpu", console=Console(quiet=True)
    )
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    report = (folder / "README.md").read_text()
    assert "| lr 0.00316 | lr 1e+38 |" in report
    assert "| 2 in 8 | 2 in 16 |" in report
    assert "Nothing is published of these tests." in report
    assert "As published" not in report
    texts = [path.read_text() for path in sorted((folder / "cells").iterdir())]
    records = [json.loads(text, parse_constant=pytest.fail) for text in texts]
    assert len(records) == len(zoology.SMOKE) + 1
    lost = [r["settings"]["lr"] for r in records if r["numbers"]["diverged"]]
    assert lost == [1e38]
    sizes = {
        r["settings"]["model"]: [point["state bytes"] for point in r["numbers"]["readings"]]
        for r in records
        if not r["numbers"]["diverged"]
    }
    assert all((short == long) == (m != "Attention") for m, (short, long) in sizes.items())


def test_the_protocol_is_the_published_one() -> None:
    protocol = zoology.ZoologyMQAR().protocol("full")
    assert json.loads(json.dumps(protocol)) == protocol
    config = train_config(protocol, seed=0, lr=1e-3)
    assert (config.steps, config.batch, config.clip, config.warmup) == (32 * 703, 256, None, 0)
    source = zoology.mixed([zoology.Size(**size) for size in protocol["trained on"]])
    assert source == protocol_2()
    assert [(s["length"], s["pairs"]) for s in protocol["tested on"]][-1] == (1024, 256)
    cells = zoology.ZoologyMQAR().cells("full")
    sizes = sum(map(len, zoology.MODELS.values()))
    assert len(cells) == 4 * sizes
    assert {cell["lr"] for cell in cells[:sizes]} == {3.16e-3}


@torch.no_grad()
def test_every_size_of_ska_is_within_the_budget() -> None:
    for model, sizes in zoology.MODELS.items():
        for size, config in sizes.items():
            built = build(config, protocol_2(), seed=0).eval()
            state = built(torch.zeros(1, 3, dtype=torch.int64), return_state=True).state
            assert config.mlp == "none"
            assert len(config.mixers) == 2
            assert state.nbytes <= zoology.BUDGET or not model.startswith("SKA"), size


def cell(model: str, size: str, lr: float, accuracy: float, held: int = 1000) -> Finished:
    readings = [
        {"tokens": s.length, "pairs": s.pairs, "accuracy": accuracy, "state bytes": held}
        for s in PROTOCOL_2_TEST
    ]
    numbers = {"diverged": "", "parameters": 5, "readings": readings}
    return Finished({"model": model, "size": size, "lr": lr}, 0, numbers)


def test_the_best_rate_stands_for_a_size_and_what_diverged_for_none() -> None:
    lost = Finished({"model": "SKA", "size": "b", "lr": 0.1}, 0, {"diverged": "Step 3"})
    done = [
        cell("DeltaNet", "width 64", 0.1, 0.75, held=9_000),
        cell("SKA", "width 128, rank 32", 0.1, 0.5, held=40_000),
        cell("SKA", "width 128, rank 32", 0.01, 0.875, held=40_000),
        cell("SKA", "width 64, rank 16", 0.01, 0.25, held=8_000),
        cell("SKA", "width 256, rank 40", 0.01, 1.0, held=70_000),
        lost,
    ]
    points = list(zoology.best_of(done))
    assert [(p.bytes, p.lr, p.accuracy) for p in points] == [
        (8_000, 0.01, 0.25),
        (40_000, 0.01, 0.875),
        (70_000, 0.01, 1.0),
        (9_000, 0.1, 0.75),
    ]
    best, *others = zoology.ZoologyMQAR().remarks(done)
    assert best == (
        "The best with at most 65,536 bytes is SKA (width 128, rank 32): 0.875 in 40,000 bytes."
    )
    assert others == [
        "DeltaNet: 0.750 in 9,000 bytes; published, to 0.01: 0.79 in 9,000, 0.963 in 34,000, "
        "0.995 in 134,000."
    ]
    assert zoology.of_rate([lost]) == "diverged"
    assert zoology.of_rate([lost, done[1]]) == "50.0 (1 diverged)"
    assert zoology.of_rate([]) == "–"
    titles = [table.title for table in zoology.ZoologyMQAR().tables(done)]
    assert titles[-1].startswith("As published, read off a plot")


def test_a_report_of_runs_that_all_diverged_says_so(tmp_path: Path) -> None:
    lost = Finished(
        {"model": "SKA", "size": "width 64, rank 16", "lr": 0.1}, 0, {"diverged": "Step 3"}
    )
    experiment = zoology.ZoologyMQAR()
    rates = experiment.tables([lost])[1]
    assert list(rates.rows[0]) == ["SKA", "width 64, rank 16", "diverged"]
    assert experiment.remarks([lost]) == []
    experiment.draw([lost], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").exists()
