"""The paper's retrieval experiments run from end to end, under protocols of a few seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from echo_lm.experiments import appendix, length, mqar, transfer
from echo_lm.experiments.base import Experiment, Finished, Scale, Settings
from echo_lm.experiments.runner import reproduce
from echo_lm.plots import figure
from echo_lm.tasks import find

ONE_STEP = {
    "steps": 1,
    "batch": 1,
    "warmup": 0,
    "evaluate_every": 1,
    "evaluate_rows": 1,
    "rows": 1,
}


def briefly(experiment: Experiment, **changes: Any) -> Experiment:
    """The same experiment with the least to compute."""

    def protocol(self: Experiment, scale: Scale) -> dict[str, Any]:
        return type(experiment).protocol(self, scale) | ONE_STEP | changes

    return type("Brief", (type(experiment),), {"protocol": protocol})()


def run(experiment: Experiment, out: Path) -> tuple[str, list[dict[str, Any]]]:
    """The report and the records of the smoke scale."""
    folder = reproduce(
        experiment, scale="smoke", seeds=1, out=out, device="cpu", console=Console(quiet=True)
    )
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert not (folder / "unfinished").exists()
    report = (folder / "README.md").read_text()
    assert "have not run" not in report
    assert "nan" not in report.split()
    cells = [path.read_text() for path in sorted((folder / "cells").iterdir())]
    return report, [json.loads(cell, parse_constant=pytest.fail) for cell in cells]


def test_transfer(tmp_path: Path) -> None:
    brief = briefly(transfer.Transfer(), lengths=[64])
    rates = {"SSM": 3e-4, "SSM+SKA (paper)": 3e-4, "SSM+SKA (ours, tied start)": 2e-3}
    cells = [{"model": model, "lr": lr} for model, lr in rates.items()]
    brief.cells = lambda scale: cells
    report, records = run(brief, tmp_path)
    assert "**NIAH: accuracy in percent, lr 0.002**" in report
    assert "| SysPrompt | trained |" in report
    assert "| MultiHop | transfer |" in report
    assert {"53.3", "75.7", "80.5"} <= set(report.split())
    tasks = {(r["task"], r["pairs"]) for r in records[0]["numbers"]["readings"]}
    assert tasks >= {(task, 8) for task in transfer.PAPER_MEANS}


def test_transfer_puts_a_number_beside_the_papers_of_the_same_model_and_length() -> None:
    def cell(model: str, accuracy: float) -> Finished:
        settings: Settings = {"task": "NIAH", "pairs": 4, "length": 1024}
        readings = [{**settings, "accuracy": accuracy}]
        return Finished({"model": model, "lr": 3e-4}, 0, {"readings": readings})

    done = [cell("SSM", 0.25), cell("SSM+SKA (paper)", 0.5), cell("SSM+SKA (ours)", 0.75)]
    table = transfer.table_of_curves(done, "NIAH")
    assert list(table.header[2:]) == [
        *("SSM", "paper's", "SSM+Attn", "paper's", "SSM+SKA (paper)", "paper's", "SSM+SKA (ours)")
    ]
    assert list(table.rows[0]) == [
        *("4", "1,024", "25.0", "47.0", "–", "75.5", "50.0", "81.0", "75.0")
    ]


def test_length(tmp_path: Path) -> None:
    far = {"lengths for ours": [128], "far lengths": [1500]}
    report, records = run(briefly(length.Length(), lengths=[64], **far), tmp_path)
    assert len(records) == len(length.MODELS) + 1
    assert "What ours remembers at 1,500 tokens takes" in report
    read = {
        r["settings"]["read"]: [point["length"] for point in r["numbers"]["readings"]]
        for r in records
        if r["settings"]["model"] == length.TIED
    }
    assert read == {"near": [64, 64, 128, 128], "far": [1500, 1500]}


def test_length_has_the_papers_numbers_beside_one_needle_only() -> None:
    readings = [{"needles": n, "length": 2048, "accuracy": 0.5} for n in (1, 4)]
    done = [Finished({"model": "SSM+Attn", "read": "near"}, 0, {"readings": readings})]
    row = ["2,048", "–", "2.0", "50.0", "42.5", "–", "81.2"]
    assert list(length.table_of(done, 1).rows) == [row]
    assert list(length.table_of(done, 4).rows) == [["2,048", "50.0"]]


def test_the_papers_lines_are_named_where_they_stand_alone(tmp_path: Path) -> None:
    readings = [{"needles": 1, "length": 2048, "accuracy": 0.5}]
    done = [Finished({"model": "SSM+Attn", "read": "near"}, 0, {"readings": readings})]
    with figure(tmp_path / "figure.png") as axes:
        length.draw_needles(done, 1, axes[0, 0])
        _, labels = axes[0, 0].get_legend_handles_labels()
    assert labels == ["SSM, the paper's", "SSM+Attn", "SSM+SKA (paper), the paper's"]


@pytest.mark.parametrize("grid", [mqar.MQARSmall(), mqar.MQAR50M()])
def test_mqar(grid: mqar.MQARGrid, tmp_path: Path) -> None:
    brief = briefly(grid)
    brief.cells = lambda scale: [{"model": m, "pairs": 4, "gap": 8} for m in grid.models]
    report, records = run(brief, tmp_path)
    assert len(records) == len(grid.models)
    assert "**Steps to 99%**" in report
    assert "| never |" in report


def test_mqar_cells_cover_the_papers_grid() -> None:
    cells = mqar.MQAR50M().cells("full")
    assert len(cells) == 6 * 4 * 4
    assert {(cell["pairs"], cell["gap"]) for cell in cells} >= {(4, 64), (32, 4096)}
    assert mqar.said("SSM+Attn", 4, 4096, 4096) == "< 100"
    assert mqar.said("SSM+Attn", 8, 4096, 4096) == "100"
    assert mqar.said("Echo", 8, 4096, 4096) is None


def test_mamba3_on_the_appendix_tasks(tmp_path: Path) -> None:
    experiment = appendix.CoTRetrievalExperiment()
    brief = briefly(experiment)
    brief.cells = lambda scale: [c for c in experiment.cells(scale) if c["tier"] == "easy"]
    report, records = run(brief, tmp_path)
    assert len(records) == len(appendix.VARIANTS)
    assert "Without the action mask, easy:" in report
    row = next(line for line in report.splitlines() if line.startswith("| + CG + SKA, η = 2.5 |"))
    assert row.endswith("| 100 | 500 |")
    told = {r["settings"]["model"]: r["numbers"]["training"]["gradient norm"] for r in records}
    assert told["+ CG + SKA, η = 1.5"] != told["+ CG + SKA, η = 1.5, no mask"]


def test_guessing_is_chance_for_results_and_more_for_small_counts() -> None:
    calls, economy = (
        appendix.guessing(find(n), 400, 0) for n in ("tool-calling", "resource-economy")
    )
    assert 0.09 < calls < 0.17  # the best of ten equally likely digits, in 400 draws
    assert economy > 0.4


@pytest.mark.parametrize(
    "experiment",
    [
        appendix.ToolCallingExperiment(),
        appendix.ResourceEconomyExperiment(),
        appendix.SpecificRecallExperiment(),
    ],
)
def test_every_appendix_task_runs_in_its_hard_tier(
    experiment: appendix.Mamba3Experiment, tmp_path: Path
) -> None:
    brief = briefly(experiment)
    brief.cells = lambda scale: [{"model": "+ SKA (ours), no mask", "tier": "hard"}]
    report, _ = run(brief, tmp_path)
    assert "**HARD: accuracy in percent**" in report
    assert "paper's" not in report
