"""Learning rates for the language models, each tried on a narrower one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from echo_lm.experiments.base import (
    Finished,
    Scale,
    Settings,
    Table,
    Workbench,
    distinct,
    over_seeds,
    select,
)
from echo_lm.experiments.language import MODELS, SHAPES, OnText, budget, whole
from echo_lm.plots import band, figure, line
from echo_lm.train import Diverged

RATES: dict[Scale, tuple[float, ...]] = {
    "smoke": (4e-3, 8e-3),
    "full": (1e-3, 2e-3, 4e-3, 8e-3),
}
TOKENS: dict[Scale, int] = {"smoke": 30_000, "full": 20_000_000}


class Sweep(OnText):
    """The loss on held-out text that every model comes to at every learning rate."""

    name = "lm/sweep"
    title = "Language models: the learning rate of each, tried at a smaller width"
    source = "ours"

    def protocol(self, scale: Scale) -> dict[str, Any]:
        return {**self.schedule(scale, TOKENS[scale]), "shape": SHAPES[scale]["sweep"]}

    def cells(self, scale: Scale) -> list[Settings]:
        return [{"model": model, "lr": lr} for lr, model in product(RATES[scale], MODELS)]

    def run(
        self, protocol: Mapping[str, Any], settings: Settings, seed: int, bench: Workbench
    ) -> dict[str, Any]:
        try:
            _, told = self.learn(protocol, settings["model"], settings["lr"], seed, bench)
        except Diverged as error:
            return {"diverged": str(error)}
        return told

    def tables(self, done: Sequence[Finished]) -> list[Table]:
        rates = sorted(distinct(done, "lr"))
        rows = [
            [
                model,
                parameters(cells),
                *(loss_at(select(cells, lr=lr)) for lr in rates),
                f"{best:g}" if (best := best_rate(cells)) else "–",
            ]
            for model in distinct(done, "model")
            if (cells := select(done, model=model))
        ]
        header = ["model", "parameters", *(f"lr {lr:g}" for lr in rates), "best"]
        title = "Held-out loss in nats a token"
        return [Table(f"{title}: {budget(good)}" if (good := whole(done)) else title, header, rows)]

    def remarks(self, done: Sequence[Finished]) -> list[str]:
        edges = [
            f"{model} ({best:g})"
            for model in distinct(done, "model")
            if (best := best_rate(select(done, model=model)))
            and best in (min(distinct(done, "lr")), max(distinct(done, "lr")))
        ]
        without = [m for m in distinct(done, "model") if not best_rate(select(done, model=m))]
        said = [f"At every rate a run diverged: {', '.join(without)}."] if without else []
        if edges:
            return [
                *said,
                f"At the edge of what was tried, so that a better one may lie beyond: "
                f"{', '.join(edges)}.",
            ]
        return said or ["Every best rate lies between others that were tried."]

    def draw(self, done: Sequence[Finished], path: Path) -> None:
        with figure(path, size=(5.4, 3.2)) as axes:
            ax = axes[0, 0]
            for i, model in enumerate(distinct(done, "model")):
                cells = whole(select(done, model=model))
                rates = sorted(distinct(cells, "lr"))
                by_seed = [
                    [cell for cell in cells if cell.seed == seed]
                    for seed in sorted({cell.seed for cell in cells})
                ]
                curves = [
                    [cell.numbers["loss"] for lr in rates for cell in select(same, lr=lr)]
                    for same in by_seed
                ]
                complete = [curve for curve in curves if len(curve) == len(rates)]
                if complete:
                    band(ax, rates, complete, **line(i, model))
            ax.set(xscale="log", xlabel="learning rate", ylabel="held-out loss, nats a token")
            if ax.lines:
                ax.legend(fontsize=6)


def first(done: Sequence[Finished]) -> Finished | None:
    return next(iter(whole(done)), None)


def parameters(cells: Sequence[Finished]) -> str:
    one = first(cells)
    return f"{one.numbers['parameters']:,}" if one else "–"


def loss_at(cells: Sequence[Finished]) -> str:
    """Over seeds; what diverged is said."""
    lost = len(cells) - len(whole(cells))
    if cells and lost == len(cells):
        return "diverged"
    told = over_seeds(whole(cells), lambda n: n["loss"], "{:.3f}".format)
    return told + (f" ({lost} diverged)" if lost else "")


def best_rate(cells: Sequence[Finished]) -> float | None:
    """Of one model: the least mean loss, of the rates at which no seed diverged."""
    by_rate = {lr: select(cells, lr=lr) for lr in distinct(cells, "lr")}
    tried = {lr: same for lr, same in by_rate.items() if len(whole(same)) == len(same)}
    return min(tried, key=lambda lr: mean(c.numbers["loss"] for c in tried[lr]), default=None)
