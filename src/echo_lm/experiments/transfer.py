"""Table 3 and Figure 1: trained on two recall tasks, read on six."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from echo_lm.experiments.base import (
    Experiment,
    Finished,
    Scale,
    Settings,
    Table,
    Workbench,
    distinct,
    over_seeds,
    percent,
    select,
)
from echo_lm.experiments.training import fit, found_at, preset, read_over
from echo_lm.plots import band, figure, line
from echo_lm.tasks import MQAR, NIAH, CommonWord, Mixture, MultiHop, SystemPrompt, Task, ToolTrace

MODELS = {
    "SSM": preset("synthetic-ssm"),
    "SSM+Attn": preset("synthetic-attention"),
    "SSM+SKA (paper)": preset("synthetic-ska-paper"),
    "SSM+SKA (ours)": preset("synthetic-ska"),
    "SSM+SKA (ours, tied start)": preset("synthetic-ska", tied_start=True),
}
TRAINED = ("SysPrompt", "ToolTrace")
RATES = (3e-4, 2e-3)
"""The paper's learning rate, and a higher one in the same number of steps."""

PAPER_MODELS = {"SSM": "SSM", "SSM+Attn": "SSM+Attn", "SSM+SKA (paper)": "SSM+SKA"}
"""What the paper calls those of our models that it has."""

PAPER_MEANS = {
    "MQAR": {"SSM": 55.1, "SSM+Attn": 76.0, "SSM+SKA": 82.2},
    "SysPrompt": {"SSM": 64.2, "SSM+Attn": 81.3, "SSM+SKA": 85.3},
    "ToolTrace": {"SSM": 56.5, "SSM+Attn": 76.2, "SSM+SKA": 80.5},
    "NIAH": {"SSM": 52.0, "SSM+Attn": 81.1, "SSM+SKA": 84.2},
    "MultiHop": {"SSM": 39.3, "SSM+Attn": 71.1, "SSM+SKA": 76.7},
    "CommonWord": {"SSM": 52.9, "SSM+Attn": 68.2, "SSM+SKA": 74.1},
}
"""Table 3, in percent."""

PAPER_CURVES: dict[str, dict[int, dict[str, dict[int, float]]]] = {
    "NIAH": {
        pairs: {
            model: dict(zip((64, 128, 256, 512, 1024, 2048), curve, strict=True))
            for model, curve in curves.items()
        }
        for pairs, curves in {
            1: {
                "SSM": (0.750, 0.755, 0.700, 0.660, 0.510, 0.280),
                "SSM+Attn": (0.925, 0.910, 0.900, 0.900, 0.880, 0.660),
                "SSM+SKA": (0.925, 0.935, 0.950, 0.880, 0.860, 0.725),
            },
            4: {
                "SSM": (0.640, 0.620, 0.640, 0.550, 0.470, 0.235),
                "SSM+Attn": (0.880, 0.890, 0.850, 0.890, 0.755, 0.595),
                "SSM+SKA": (0.860, 0.890, 0.885, 0.875, 0.810, 0.680),
            },
            8: {
                "SSM": (0.545, 0.480, 0.485, 0.430, 0.260, 0.040),
                "SSM+Attn": (0.810, 0.800, 0.780, 0.750, 0.710, 0.510),
                "SSM+SKA": (0.860, 0.840, 0.835, 0.785, 0.760, 0.625),
            },
        }.items()
    },
    "MultiHop": {
        pairs: {
            model: dict(zip((16, 32, 64, 128, 256), curve, strict=True))
            for model, curve in curves.items()
        }
        for pairs, curves in {
            3: {
                "SSM": (0.530, 0.475, 0.520, 0.465, 0.385),
                "SSM+Attn": (0.760, 0.760, 0.800, 0.760, 0.685),
                "SSM+SKA": (0.840, 0.840, 0.820, 0.805, 0.735),
            },
            4: {
                "SSM": (0.575, 0.475, 0.455, 0.395, 0.325),
                "SSM+Attn": (0.740, 0.745, 0.765, 0.760, 0.660),
                "SSM+SKA": (0.835, 0.795, 0.790, 0.745, 0.740),
            },
            8: {
                "SSM": (0.365, 0.410, 0.285, 0.180, 0.005),
                "SSM+Attn": (0.690, 0.685, 0.710, 0.625, 0.425),
                "SSM+SKA": (0.770, 0.755, 0.770, 0.665, 0.555),
            },
        }.items()
    },
}
"""Figure 1, by task, pairs, model and length."""


class Transfer(Experiment):
    """Everything asks which word followed this one; two tasks teach it, all six ask."""

    name = "transfer"
    title = "Trained on system prompts and tool traces, read on six tasks"
    source = "Table 3 and Figure 1"

    def protocol(self, scale: Scale) -> dict[str, Any]:
        full = scale == "full"
        return {
            "steps": 6000 if full else 20,
            "batch": 16 if full else 4,
            "warmup": 100 if full else 5,
            "evaluate_every": 250 if full else 10,
            "evaluate_rows": 128 if full else 16,
            "trained on pairs": [1, 4, 8],
            "trained on lengths": [32, 64, 128, 256] if full else [32, 64],
            "evaluated while training on": "NIAH of 4 pairs and 256 tokens",
            "pairs": [1, 4, 8],
            "lengths": [64, 128, 256, 512, 1024, 2048] if full else [64, 128],
            "pairs of MultiHop": [3, 4, 8],
            "noise of MultiHop": [16, 32, 64, 128, 256] if full else [16, 32],
            "rows": 128 if full else 8,
        }

    def cells(self, scale: Scale) -> list[Settings]:
        return [{"model": model, "lr": lr} for lr in RATES for model in MODELS]

    def run(
        self, protocol: Mapping[str, Any], settings: Settings, seed: int, bench: Workbench
    ) -> dict[str, Any]:
        config = MODELS[settings["model"]]
        curriculum = Mixture(
            tuple(
                kind(pairs, length)
                for kind in (SystemPrompt, ToolTrace)
                for pairs in protocol["trained on pairs"]
                for length in protocol["trained on lengths"]
            )
        )
        test = NIAH(4, 256)
        fitted = fit(config, curriculum, protocol, seed, bench, test=test, lr=settings["lr"])
        readings = read_over(fitted, grid(protocol), rows=protocol["rows"], seed=seed)
        return {**fitted.numbers(), "readings": readings}

    def tables(self, done: Sequence[Finished]) -> list[Table]:
        by_rate = [select(done, lr=lr) for lr in distinct(done, "lr")]
        return [
            *(table_of_means(cells) for cells in by_rate),
            *(table_of_curves(cells, task) for task in PAPER_CURVES for cells in by_rate),
        ]

    def remarks(self, done: Sequence[Finished]) -> list[str]:
        kinds = {
            "the two tasks they were trained on": [t for t in PAPER_MEANS if t in TRAINED],
            "the four others": [t for t in PAPER_MEANS if t not in TRAINED],
        }
        return [
            "A pair (KV) is a key and its value. Means are of the rows and cells shown; the rows "
            "of the paper's Table 3 average to 53.3, 75.7 and 80.5, where it prints 54.4, 76.2 and "
            "81.1. Its training lengths, generators and number of readings are not published.",
            *(
                f"On {kind}, {rate(cells)}: "
                + ", ".join(
                    f"{model} {over_seeds(select(cells, model=model), mean_of(tasks), percent)}"
                    for model in distinct(cells, "model")
                )
                + "."
                for cells in (select(done, lr=lr) for lr in distinct(done, "lr"))
                for kind, tasks in kinds.items()
            ),
        ]

    def draw(self, done: Sequence[Finished], path: Path) -> None:
        rates = distinct(done, "lr")
        rows = [(task, lr) for lr in rates for task in PAPER_CURVES]
        columns = len(PAPER_CURVES["NIAH"])
        with figure(path, rows=len(rows), columns=columns, size=(2.9, 2.4)) as axes:
            for row, (task, lr) in zip(axes, rows, strict=True):
                for ax, pairs in zip(row, PAPER_CURVES[task], strict=True):
                    draw_curves(select(done, lr=lr), task, pairs, ax)
                row[0].set_ylabel("accuracy")
            axes[0, 0].legend(fontsize=6, loc="lower left")


def rate(cells: Sequence[Finished]) -> str:
    return f"lr {cells[0].settings['lr']:g}"


def grid(protocol: Mapping[str, Any]) -> list[tuple[Settings, Task]]:
    """Every reading: of MQAR, `length` counts all of its tokens, of MultiHop the noise."""

    def of_length(pairs: int, length: int) -> dict[str, Task]:
        return {
            "MQAR": MQAR(pairs, gap=length - 4 * pairs),
            "SysPrompt": SystemPrompt(pairs, length),
            "ToolTrace": ToolTrace(pairs, length),
            "NIAH": NIAH(pairs, length),
            "CommonWord": CommonWord(pairs, length),
        }

    points = [
        ({"task": name, "pairs": pairs, "length": length}, task)
        for pairs, length in product(protocol["pairs"], protocol["lengths"])
        for name, task in of_length(pairs, length).items()
    ]
    hops = [
        ({"task": "MultiHop", "pairs": pairs, "length": noise}, MultiHop(pairs, noise))
        for pairs, noise in product(protocol["pairs of MultiHop"], protocol["noise of MultiHop"])
    ]
    return [*points, *hops]


def mean_of(tasks: Sequence[str]) -> Any:
    """Reads, of a cell's numbers, the mean of these rows of the table."""
    return lambda numbers: mean(found_at(task=task)(numbers) for task in tasks)


def shown(done: Sequence[Finished]) -> list[str]:
    """Models that have run, and those of the paper in any case."""
    return [model for model in MODELS if select(done, model=model) or model in PAPER_MODELS]


def columns(done: Sequence[Finished]) -> list[str]:
    """A column for each model, and one beside it for what the paper says of it."""
    return [
        column
        for model in shown(done)
        for column in ([model, "paper's"] if model in PAPER_MODELS else [model])
    ]


def entries(
    done: Sequence[Finished], value: Any, said: Mapping[str, float] | None, unit: float = 1
) -> list[str]:
    """A row under these columns, in percent; `said` is what the paper says, `unit` its 100%."""
    row = []
    for model in shown(done):
        row.append(over_seeds(select(done, model=model), value, percent))
        if model in PAPER_MODELS:
            row.append("–" if said is None else percent(said[PAPER_MODELS[model]] / unit))
    return row


def table_of_means(done: Sequence[Finished]) -> Table:
    rows = [
        [
            task,
            "trained" if task in TRAINED else "transfer",
            *entries(done, found_at(task=task), PAPER_MEANS[task], unit=100),
        ]
        for task in PAPER_MEANS
    ]
    said = {
        model: mean(row[model] for row in PAPER_MEANS.values()) for model in PAPER_MODELS.values()
    }
    rows.append(["Mean", "", *entries(done, mean_of(list(PAPER_MEANS)), said, unit=100)])
    title = f"Accuracy in percent, mean over all lengths and pairs, {rate(done)}"
    return Table(title, ["Task", "seen in", *columns(done)], rows)


def table_of_curves(done: Sequence[Finished], task: str) -> Table:
    points = [point for point in done[0].numbers["readings"] if point["task"] == task]
    rows = []
    for point in points:
        pairs, length = point["pairs"], point["length"]
        curves = PAPER_CURVES[task].get(pairs, {})
        said = {m: curve[length] for m, curve in curves.items() if length in curve} or None
        value = found_at(task=task, pairs=pairs, length=length)
        rows.append([str(pairs), f"{length:,}", *entries(done, value, said)])
    what = "noise" if task == "MultiHop" else "tokens"
    title = f"{task}: accuracy in percent, {rate(done)}"
    return Table(title, ["KV", what, *columns(done)], rows)


def draw_curves(done: Sequence[Finished], task: str, pairs: int, ax: Any) -> None:
    """One panel: measured in full colour, the paper's faint behind it."""
    lengths = [
        point["length"]
        for point in done[0].numbers["readings"]
        if point["task"] == task and point["pairs"] == pairs
    ]
    for i, model in enumerate(shown(done)):
        values = [found_at(task=task, pairs=pairs, length=length) for length in lengths]
        cells = select(done, model=model)
        if cells:
            curves = [[value(cell.numbers) for value in values] for cell in cells]
            band(ax, lengths, curves, **line(i, model))
        if model in PAPER_MODELS:
            said = PAPER_CURVES[task][pairs][PAPER_MODELS[model]]
            alone = None if cells else f"{model}, the paper's"
            faint = line(i, alone) | {"alpha": 0.35, "marker": ""}
            ax.plot(list(said), list(said.values()), **faint)
    ax.set_xscale("log", base=2)
    what = "tokens of noise" if task == "MultiHop" else "tokens"
    title = f"{task}, KV = {pairs}, {rate(done)} (faint: paper)"
    ax.set(xlabel=what, ylim=(0, 1.02), title=title)
