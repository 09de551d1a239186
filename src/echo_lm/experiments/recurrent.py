"""Whether a trained model says the same read at once, in pieces, and token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from echo_lm.experiments.ablation import MODELS, ORDER_1, Ablation, mqar, task_of
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
from echo_lm.experiments.training import fit
from echo_lm.model.lm import EchoLM
from echo_lm.model.state import EchoState
from echo_lm.ops.backends import autocast
from echo_lm.plots import band, figure, line
from echo_lm.tasks import Batch

Precision = Literal["fp32", "bf16"]

VARIANTS: dict[str, dict[str, Any]] = {
    "exact": {"causal": "exact"},
    "exact, fading": {"causal": "exact", "half_life": 1024},
    "exact, not itself": {"causal": "exact", "sees_itself": False},
    "chunk": {"causal": "chunk"},
}
READINGS = {"in pieces": 100, "token by token": 1}
"""Tokens of a call; compared with one call for all."""


class Recurrent(Experiment):
    """Models trained in parallel answer through the state."""

    name = "recurrent"
    title = "Recurrent against parallel reading, of trained models"
    source = "ours"

    def protocol(self, scale: Scale) -> dict[str, Any]:
        full = scale == "full"
        _, task = mqar(8, 128) if full else mqar(4, 32)
        return {
            "model": Ablation.models[scale],
            "filter": {} if full else {**ORDER_1, "tied_start": True},
            "chunk_size": 64 if full else 16,
            "task": task,
            "steps": 2000 if full else 250,
            "batch": 16,
            "lr": 2e-3,
            "warmup": 100 if full else 50,
            "evaluate_every": 50 if full else 25,
            "evaluate_rows": 128 if full else 64,
            "stop_at": 0.999 if full else 0.99,
            "gaps": [128, 1024, 4096, 16_384] if full else [32, 256],
            "rows": 32 if full else 8,
            "difference": "the largest of any answer's logits, over their root mean square",
        }

    def cells(self, scale: Scale) -> list[Settings]:
        precisions = ("fp32", "bf16") if scale == "full" else ("fp32",)
        return [{"causality": name, "precision": p} for p in precisions for name in VARIANTS]

    def run(
        self, protocol: Mapping[str, Any], settings: Settings, seed: int, bench: Workbench
    ) -> dict[str, Any]:
        config = MODELS[protocol["model"]]
        how = {**protocol["filter"], **VARIANTS[settings["causality"]]}
        config = replace(config, ska=replace(config.ska, chunk_size=protocol["chunk_size"], **how))
        task = protocol["task"]
        precision = settings["precision"]
        fitted = fit(config, task_of(task), protocol, seed, bench, precision=precision)
        found = []
        for gap in protocol["gaps"]:
            batch = task_of({**task, "gap": gap}).batch(
                protocol["rows"], seed=seed, split="test", device=bench.device
            )
            found.append({"gap": gap, **compare(fitted.model, batch, precision)})
        return {**fitted.numbers(), "readings": found}

    def tables(self, done: Sequence[Finished]) -> list[Table]:
        rows = []
        for precision in distinct(done, "precision"):
            for name in distinct(done, "causality"):
                cells = select(done, precision=precision, causality=name)
                for i, gap in enumerate(gaps(done)):
                    accuracies = [
                        over_seeds(cells, at(i, "accuracy", reading), percent)
                        for reading in ("at once", *READINGS)
                    ]
                    differences = [
                        over_seeds(cells, at(i, "difference", reading), "{:.1e}".format)
                        for reading in READINGS
                    ]
                    rows.append([name, precision, f"{gap:,}", *accuracies, *differences])
        header = ["SKA", "precision", "gap", "right in percent: at once", *READINGS]
        header += [f"difference: {reading}" for reading in READINGS]
        return [Table("One call for all tokens, against many", header, rows)]

    def remarks(self, done: Sequence[Finished]) -> list[str]:
        told = []
        for precision in distinct(done, "precision"):
            points = [
                point
                for cell in select(done, precision=precision)
                for point in cell.numbers["readings"]
            ]
            worst = max(point["difference"][r] for point in points for r in READINGS)
            changed = sum(point["answers that differ"][r] for point in points for r in READINGS)
            answers = len(READINGS) * sum(point["answers"] for point in points)
            told.append(
                f"In {precision}, {changed:,} of {answers:,} answers differ from those of one "
                f"call; the largest difference is {worst:.1e} of a logit's usual size."
            )
        return told

    def draw(self, done: Sequence[Finished], path: Path) -> None:
        precisions = distinct(done, "precision")
        with figure(path, columns=len(precisions), size=(3.6, 2.8)) as axes:
            for ax, precision in zip(axes[0], precisions, strict=True):
                for i, name in enumerate(distinct(done, "causality")):
                    cells = select(done, precision=precision, causality=name)
                    values = [at(k, "difference", "token by token") for k in range(len(gaps(done)))]
                    curves = [[value(cell.numbers) for value in values] for cell in cells]
                    band(ax, gaps(done), curves, **line(i, name))
                ax.set(
                    xscale="log", yscale="log", xlabel="gap", title=f"token by token, {precision}"
                )
                ax.set_xticks(gaps(done), [f"{gap:,}" for gap in gaps(done)])
                ax.set_xticks([], minor=True)
            axes[0, 0].set_ylabel("largest difference / usual logit")
            axes[0, 0].legend(fontsize=7)


def gaps(done: Sequence[Finished]) -> list[int]:
    return [point["gap"] for point in done[0].numbers["readings"]]


def at(i: int, number: str, reading: str) -> Any:
    """Reads one number of the i-th gap."""
    return lambda numbers: numbers["readings"][i][number][reading]


@torch.inference_mode()
def compare(model: EchoLM, batch: Batch, precision: Precision) -> dict[str, Any]:
    """Accuracies, and how far logits are from those of one call."""
    wanted = batch.labels[:, 1:][batch.answers[:, 1:]]
    with autocast(model.embedding.weight.device, precision):
        whole = answers(model.eval(), batch, batch.tokens.shape[1])
        parts = {name: answers(model, batch, piece) for name, piece in READINGS.items()}
    usual = whole.square().mean().sqrt()
    right = {name: (x.argmax(-1) == wanted) for name, x in {"at once": whole, **parts}.items()}
    said = whole.argmax(-1)
    return {
        "accuracy": {name: float(x.double().mean()) for name, x in right.items()},
        "difference": {n: float((x - whole).abs().max() / usual) for n, x in parts.items()},
        "answers that differ": {n: int((x.argmax(-1) != said).sum()) for n, x in parts.items()},
        "answers": len(wanted),
    }


def answers(model: EchoLM, batch: Batch, piece: int) -> Float[Tensor, "n vocab"]:
    """The logits of every answer, read so many tokens a call."""
    asked = batch.answers.roll(-1, 1)
    state: EchoState | None = None
    found = []
    for start in range(0, batch.tokens.shape[1], piece):
        here = slice(start, start + piece)
        out = model(batch.tokens[:, here], state=state, return_state=True)
        state = out.state
        found.append(out.logits)
    return torch.cat(found, dim=1)[asked].double()
