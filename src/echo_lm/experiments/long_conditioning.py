"""What makes gradients of deep models grow on long texts, and what keeps them small."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf, isfinite
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from echo_lm.experiments.ablation import look, mqar, task_of
from echo_lm.experiments.base import (
    Experiment,
    Finished,
    Scale,
    Settings,
    Table,
    Workbench,
    distinct,
    over_seeds,
    select,
)
from echo_lm.experiments.training import (
    HEALTH_POINTS,
    fit,
    thin,
    training_curves,
)
from echo_lm.layers import Mamba2, SpectralKoopmanAttention
from echo_lm.model.config import EchoConfig, Mamba2Config, SKAConfig
from echo_lm.model.lm import EchoLM
from echo_lm.ops.backends import autocast
from echo_lm.plots import band, figure
from echo_lm.results import rounded
from echo_lm.tasks import Batch
from echo_lm.train import Diverged, History, Record
from echo_lm.train.history import records_until

LARGE = 10.0
"""A gradient norm that clipping to 1 shortens to a tenth and less."""

MODELS = {
    "echo-50m": EchoConfig.preset("echo-50m"),
    "two of Mamba-2, Mamba-2, SKA, of width 48": EchoConfig(
        dim=48,
        mixers=("mamba2", "mamba2", "ska") * 2,
        heads=2,
        ska=SKAConfig(rank=24),
        mamba2=Mamba2Config(state_dim=16, head_dim=48),
    ),
}
CHUNKED = {"causal": "chunk", "chunk_size": 64}


def variants(rank: int) -> dict[str, dict[str, dict[str, Any]]]:
    """By name, what differs from the default (exact, bank, a ridge learned from 0.03 r): settings
    of SKA, of the model, and of training. Causes that are suspected, cures that are offered, and
    controls that leave a suspect out."""

    def ska(**changes: Any) -> dict[str, dict[str, Any]]:
        return {"ska": changes}

    return {
        "default": {},
        "paper: order 2, chunks, 0.001 of the energy": ska(
            filter="power", **CHUNKED, ridge=1e-3, relative_ridge=True
        ),
        "chunks, 0.001 of the energy": ska(**CHUNKED, ridge=1e-3, relative_ridge=True),
        "chunks, 0.03 of the energy": ska(**CHUNKED, ridge=0.03, relative_ridge=True),
        "chunks, 0.01 of tr(G) over r": ska(**CHUNKED, ridge=0.01, relative_ridge="trace"),
        "chunks, 0.1 of tr(G) over r": ska(**CHUNKED, ridge=0.1, relative_ridge="trace"),
        "chunks, ridge from 0.03 r": ska(**CHUNKED),
        "ridge from 0.001 r": ska(ridge=0.001 * rank),
        "ridge from r": ska(ridge=1.0 * rank),
        "ridge from 30 r": ska(ridge=30.0 * rank),
        "half-life 512": ska(half_life=512),
        "keys of one length": ska(key_norm=True),
        "tokens that do not see themselves": ska(sees_itself=False),
        "tied start": ska(tied_start=True),
        "order 0": ska(filter="power", order=0),
        "order 1": ska(filter="power", order=1),
        "eta from 0.1": ska(eta=0.1),
        "a tenth of the learning rate": {"train": {"lr": 0.1}},
        "SwiGLU for the Koopman MLP": {"model": {"mlp": "swiglu"}},
        "Mamba-2 for SKA": {"model": {"mixers": "mamba2"}},
    }


class LongConditioning(Experiment):
    """The same model with one thing changed at a time, on a short and on a long text."""

    name = "long-conditioning"
    title = "Gradients and conditioning of deep models on long texts"
    source = "ours; the bound of Appendix J"

    def protocol(self, scale: Scale) -> dict[str, Any]:
        full = scale == "full"
        name = list(MODELS)[0 if full else 1]
        tasks = [mqar(32, 384), mqar(32, 4096)] if full else [mqar(4, 112), mqar(4, 496)]
        return {
            "model": name,
            "tasks": dict(tasks),
            "steps": 250 if full else 15,
            "batch": 8 if full else 2,
            "lr": 2e-3,
            "warmup": 100 if full else 5,
            "evaluate_every": 10 if full else 5,
            "evaluate_rows": 16 if full else 4,
            "read_every": 1,
            "variants": variants(MODELS[name].ska.rank),
        }

    def cells(self, scale: Scale) -> list[Settings]:
        protocol = self.protocol(scale)
        return [
            {"task": task, "change": name}
            for task in protocol["tasks"]
            for name in protocol["variants"]
        ]

    def run(
        self, protocol: Mapping[str, Any], settings: Settings, seed: int, bench: Workbench
    ) -> dict[str, Any]:
        changes = protocol["variants"][settings["change"]]
        task = task_of(protocol["tasks"][settings["task"]])
        lr = changes.get("train", {}).get("lr", 1.0) * protocol["lr"]
        config = changed(MODELS[protocol["model"]], changes)
        try:
            fitted = fit(config, task, protocol, seed, bench, lr=lr)
        except Diverged as error:
            kept = records_until(bench.folder, protocol["steps"])
            if not kept:
                raise
            return {"diverged": str(error), **told(kept), "gradient by part": {}}
        batch = task.batch(protocol["batch"], seed=seed, split="test", device=bench.device)
        parts = gradient_by_part(fitted.model, batch)
        return {"diverged": "", **told(fitted.history.records), "gradient by part": parts}

    def tables(self, done: Sequence[Finished]) -> list[Table]:
        return [table_of(done, task) for task in distinct(done, "task")]

    def remarks(self, done: Sequence[Finished]) -> list[str]:
        return [
            *(sentence_of(select(done, task=task), task) for task in distinct(done, "task")),
            *correlation(done),
        ]

    def draw(self, done: Sequence[Finished], path: Path) -> None:
        tasks = distinct(done, "task")
        with figure(path, rows=len(tasks), columns=3, size=(4.0, 3.2)) as axes:
            for row, task in zip(axes, tasks, strict=True):
                for i, name in enumerate(distinct(done, "change")):
                    cells = [c for c in select(done, task=task, change=name) if whole(c)]
                    if cells:
                        draw_cells(cells, row, look(i, name))
                row[0].set(ylabel=task, title="largest gradient norm since the last point")
                row[1].set(title="worst condition number of G + λI")
                for ax in row[:2]:
                    ax.set(yscale="log", xlabel="step")
                row[2].axis("off")
            handles, labels = axes[0, 0].get_legend_handles_labels()
            axes[0, 2].legend(handles, labels, fontsize=7, loc="center left")


def changed(config: EchoConfig, changes: Mapping[str, Mapping[str, Any]]) -> EchoConfig:
    """A configuration with one thing changed; a mixer given by name takes the place of SKA."""
    model = dict(changes.get("model", {}))
    if "mixers" in model:
        model["mixers"] = tuple(model["mixers"] if m == "ska" else m for m in config.mixers)
    return replace(config, **model, ska=replace(config.ska, **changes.get("ska", {})))


def told(records: Sequence[Record]) -> dict[str, Any]:
    """Curves, and numbers over all steps."""
    norms = [record["gradient_norm"] for record in records if "gradient_norm" in record]
    tests = [record for record in records if isfinite(record.get("test_loss", inf))]
    shown = thin([record for record in tests if record["ska"]], HEALTH_POINTS)
    return {
        "training": training_curves(History(list(records))),
        "gradient norm": {
            "median": rounded(median(norms)),
            "largest": rounded(max(norms)),
            "share of steps above ten": mean(norm > LARGE for norm in norms),
        },
        "loss": tests[-1]["test_loss"] if tests else None,
        "accuracy": tests[-1]["test_accuracy"] if tests else None,
        "health": {
            "step": [record["step"] for record in shown],
            "condition": [worst(record, "condition", max) for record in shown],
            "lambda_min": [worst(record, "lambda_min", min) for record in shown],
            "ridge": [worst_ridge(record) for record in shown],
        },
    }


def worst(record: Record, number: str, which: Any) -> float:
    """Over all layers."""
    return rounded(which(layer[number] for layer in record["ska"].values()))


def worst_ridge(record: Record) -> float:
    return rounded(min(min(layer["ridge"]) for layer in record["ska"].values()))


def gradient_by_part(model: EchoLM, batch: Batch) -> dict[str, float]:
    """The norm of what one batch asks of each part of a model, after training."""
    model.train().zero_grad()
    with autocast(model.embedding.weight.device):
        out = model(batch.tokens, labels=batch.labels)
    assert out.loss is not None
    out.loss.backward()
    squares: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            part = part_of(model, name)
            squares[part] = squares.get(part, 0.0) + float(parameter.grad.square().sum())
    return {part: rounded(square**0.5) for part, square in squares.items()}


def part_of(model: EchoLM, name: str) -> str:
    """Which part of a model a parameter belongs to."""
    home, _, own = name.partition(".mixers.")
    if own:
        mixer = model.get_submodule(f"{home}.mixers.{own.partition('.')[0]}")
        if isinstance(mixer, SpectralKoopmanAttention):
            keys = ("q_proj", "k_proj", "conv", "lift")
            values = ("v_proj", "out_proj")
            layer = own.split(".")[1]
            if layer in keys:
                return "SKA: queries and keys"
            return "SKA: values and output" if layer in values else "SKA: filter, ridge, scale"
        return "Mamba-2" if isinstance(mixer, Mamba2) else "other mixers"
    if ".mlp." in name:
        return "MLP"
    return "embedding, head, norms"


def whole(cell: Finished) -> bool:
    return not cell.numbers["diverged"]


def of_norm(name: str) -> Any:
    return lambda numbers: numbers["gradient norm"][name]


def table_of(done: Sequence[Finished], task: str) -> Table:
    rows = []
    for name in distinct(done, "change"):
        cells = select(done, task=task, change=name)
        with_ska = [cell for cell in cells if cell.numbers["health"]["condition"]]
        rows.append(
            [
                name,
                over_seeds(cells, of_norm("median")),
                over_seeds(cells, of_norm("largest")),
                over_seeds(cells, of_norm("share of steps above ten"), "{:.0%}".format),
                over_seeds(with_ska, worst_condition, "{:.1e}".format),
                over_seeds(with_ska, smallest_eigenvalue, "{:.1e}".format),
                over_seeds([c for c in cells if c.numbers["loss"] is not None], final_loss),
                largest_part(cells),
                f"{sum(not whole(cell) for cell in cells)} of {len(cells)}",
            ]
        )
    header = [
        "changed",
        "median gradient norm",
        "largest",
        f"steps above {LARGE:.0f}",
        "worst condition",
        "smallest λ_min",
        "test loss",
        "where the gradient ends up",
        "diverged",
    ]
    return Table(f"{task}: gradients before clipping, and conditioning", header, rows)


def worst_condition(numbers: Mapping[str, Any]) -> float:
    return float(max(numbers["health"]["condition"]))


def smallest_eigenvalue(numbers: Mapping[str, Any]) -> float:
    return float(min(numbers["health"]["lambda_min"]))


def final_loss(numbers: Mapping[str, Any]) -> float:
    return float(numbers["loss"])


def largest_part(cells: Sequence[Finished]) -> str:
    """The part with the largest gradient at the end, and its share of the whole's square."""
    squares: dict[str, float] = {}
    for cell in cells:
        for part, norm in cell.numbers["gradient by part"].items():
            squares[part] = squares.get(part, 0.0) + norm**2
    if not squares:
        return "–"
    part = max(squares, key=lambda name: squares[name])
    return f"{part} ({squares[part] / sum(squares.values()):.0%})"


def sentence_of(done: Sequence[Finished], task: str) -> str:
    """Which changes keep gradients small, and which do not."""
    largest = {
        name: max(of_norm("largest")(c.numbers) for c in select(done, change=name))
        for name in distinct(done, "change")
    }
    order = sorted(largest.items(), key=lambda found: found[1])
    few = ", ".join(f"{name} ({norm:.3g})" for name, norm in order[:3])
    most = ", ".join(f"{name} ({norm:.3g})" for name, norm in order[:-4:-1])
    return f"{task}: the largest gradients are smallest with {few}, and largest with {most}."


def correlation(done: Sequence[Finished]) -> list[str]:
    """Whether gradients follow the condition number, as the bound of Appendix J has it."""
    cells = [cell for cell in done if cell.numbers["health"]["condition"]]
    conditions = [worst_condition(cell.numbers) for cell in cells]
    norms = [of_norm("largest")(cell.numbers) for cell in cells]
    if len(cells) < 3:
        return []
    return [
        f"Over {len(cells)} runs with SKA, the rank correlation of the worst condition number and "
        f"the largest gradient norm is {rank_correlation(conditions, norms):.2f}."
    ]


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's, of numbers that differ."""
    ranks = torch.stack([torch.tensor(x).argsort().argsort().double() for x in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


def draw_cells(cells: Sequence[Finished], row: Any, style: dict[str, Any]) -> None:
    """Gradients on the left, conditioning on the right."""
    training = [cell.numbers["training"] for cell in cells]
    band(row[0], training[0]["step"], [t["gradient norm"] for t in training], **style)
    health = [cell.numbers["health"] for cell in cells]
    if health[0]["step"]:
        band(row[1], health[0]["step"], [h["condition"] for h in health], **style)
