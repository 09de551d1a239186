"""Language models of one size side by side: the same tokens in the same order, one schedule."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from echo_lm.evaluate.text import text_loss
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
from echo_lm.experiments.language import (
    LANGUAGE_MODELS,
    MODELS,
    OURS,
    SHAPES,
    WITHOUT_SKA,
    OnText,
    as_finished,
    budget,
    kept,
    weights_hash,
    whole,
)
from echo_lm.experiments.lm_sweep import Sweep, best_rate
from echo_lm.experiments.runner import finished_records
from echo_lm.plots import band, figure, line
from echo_lm.train import Diverged

TOKENS: dict[Scale, int] = {"smoke": 100_000, "full": 200_000_000}

SPEED = (
    "Tokens a second are of training, the median of the run; what else the machine did at its "
    "start is the load in each record."
)

Numbers = Mapping[str, Any]


class LanguageModels(OnText):
    """Each with the learning rate that a sweep has found for it."""

    name = LANGUAGE_MODELS
    title = "Language models of one size on the same text"
    source = "5.3, with another budget and text"

    def __init__(self, material: Path | None = None, results: Path = Path("results")) -> None:
        super().__init__(material, results)
        self._swept: dict[Scale, dict[str, float]] = {}

    def protocol(self, scale: Scale) -> dict[str, Any]:
        narrow, wide = (SHAPES[scale][kind]["heads"] for kind in ("sweep", "full"))
        return {
            **self.schedule(scale, TOKENS[scale]),
            "shape": SHAPES[scale]["full"],
            "held-out windows": None if scale == "full" else 128,
            "learning rates": {
                model: float(f"{best * narrow / wide:.3g}")
                for model, best in self.swept(scale).items()
            },
            "learning rates are": f"the best of {Sweep.name} for each model, times {narrow}/{wide},"
            " the width there over the width here, as the steps of Adam ask for",
        }

    def swept(self, scale: Scale) -> dict[str, float]:
        """The best learning rate of each model at the smaller width."""
        if scale not in self._swept:
            sweep = Sweep(self.material, self.results)
            cells = sweep.cells(scale)
            seeds = len(kept(sweep.name, cells, scale, self.results, by=self.name)) // len(cells)
            # What was run on another text, or otherwise, is refused on the way.
            folder = self.results / sweep.name / scale
            done = as_finished(list(finished_records(sweep, scale, seeds, folder)))
            self._swept[scale] = {model: rate_of(model, done) for model in MODELS}
        return self._swept[scale]

    def cells(self, scale: Scale) -> list[Settings]:
        return [{"model": model} for model in MODELS]

    def run(
        self, protocol: Mapping[str, Any], settings: Settings, seed: int, bench: Workbench
    ) -> dict[str, Any]:
        model = settings["model"]
        lr = protocol["learning rates"][model]
        try:
            fitted, told = self.learn(protocol, model, lr, seed, bench)
        except Diverged as error:
            return {"diverged": str(error)}
        source = self.windows(protocol["length"])
        found = text_loss(fitted.model, source, first=protocol["held-out windows"])
        fitted.model.save_pretrained(bench.keep)
        shutil.copyfile(self.shards.tokenizer, bench.keep / self.shards.tokenizer.name)
        return {**told, "held out": asdict(found), "weights": weights_hash(bench.keep)}

    def tables(self, done: Sequence[Finished]) -> list[Table]:
        good = whole(done)
        if not good:
            return []
        return [
            table_of_models(done),
            table_of_shares(good, "by_source", "By source: nats a token"),
            table_of_shares(good, "by_place", "By place in the window: nats a token"),
            table_of_recall(good),
        ]

    def remarks(self, done: Sequence[Finished]) -> list[str]:
        good = whole(done)
        lost = [f"{c.settings['model']}: {c.numbers['diverged']}" for c in done if c not in good]
        return [same_order(good), *standing(good), *recalling(good), SPEED, *lost] if good else lost

    def draw(self, done: Sequence[Finished], path: Path) -> None:
        with figure(path, columns=3, size=(4.0, 3.2)) as axes:
            for i, model in enumerate(distinct(whole(done), "model")):
                cells = select(whole(done), model=model)
                draw_learning(axes[0, 0], cells, line(i, model))
                draw_shares(axes[0, 1], cells, "by_place", line(i, model))
                draw_shares(axes[0, 2], cells, "rare_pairs", line(i, model))
            axes[0, 0].set(xlabel="tokens read", ylabel="held-out loss, nats a token")
            axes[0, 1].set(xlabel="place in the window", ylabel="nats a token")
            axes[0, 2].set(xlabel="second token of a rare pair", ylabel="nats a token")
            axes[0, 0].locator_params(axis="x", nbins=5)
            axes[0, 1].tick_params(axis="x", rotation=60, labelsize=6)
            if whole(done):
                axes[0, 0].legend(fontsize=6)


def rate_of(model: str, swept: Sequence[Finished]) -> float:
    best = best_rate(select(swept, model=model))
    if best is None:
        raise ValueError(f"{model} diverged in {Sweep.name} at every learning rate: try smaller.")
    return best


def table_of_models(done: Sequence[Finished]) -> Table:
    rows = []
    for model in distinct(done, "model"):
        cells = whole(select(done, model=model))
        if not cells:
            rows.append([model, *["diverged"] * 6])
            continue
        told = cells[0].numbers
        rows.append(
            [
                model,
                f"{told['parameters']:,}",
                f"{told['learning rate']:g}",
                over_seeds(cells, lambda n: n["held out"]["loss"], "{:.4f}".format),
                over_seeds(cells, lambda n: n["held out"]["bits_per_byte"], "{:.4f}".format),
                over_seeds(cells, lambda n: n["accuracy"], "{:.3f}".format),
                over_seeds(cells, lambda n: n["tokens per second"], "{:,.0f}".format),
            ]
        )
    header = ["model", "parameters", "lr", "nats a token", "bits a byte", "right", "tokens/s"]
    return Table(f"Held-out text after {budget(whole(done))}", header, rows)


def shares(numbers: Numbers, kind: str) -> dict[str, dict[str, Any]]:
    """Parts of the held-out text by name."""
    return {one["name"]: one for one in numbers["held out"][kind]}


def loss_of(kind: str, name: str) -> Callable[[Numbers], float]:
    return lambda numbers: float(shares(numbers, kind)[name]["loss"])


def table_of_shares(done: Sequence[Finished], kind: str, title: str) -> Table:
    """A row for each part, a column for each model."""
    models = distinct(done, "model")
    rows = [
        [
            name,
            f"{told['tokens']:,}",
            *(
                over_seeds(select(done, model=model), loss_of(kind, name), "{:.3f}".format)
                for model in models
            ),
        ]
        for name, told in shares(done[0].numbers, kind).items()
    ]
    return Table(title, ["", "tokens", *models], rows)


def table_of_recall(done: Sequence[Finished]) -> Table:
    """Where a document has a rare token or pair first, and where it has it again."""
    kinds = {"rare_pairs": "second of a rare pair", "rare": "rare token"}
    there = {
        kind: named
        for kind, named in kinds.items()
        if all({"first", "again"} <= shares(cell.numbers, kind).keys() for cell in done)
    }
    rows = [
        [
            model,
            *(
                over_seeds(select(done, model=model), value, "{:.3f}".format)
                for kind in there
                for value in (loss_of(kind, "first"), loss_of(kind, "again"), saved(kind))
            ),
        ]
        for model in distinct(done, "model")
    ]
    header = [
        f"{named}, {when}" for named in there.values() for when in ("first", "again", "saved")
    ]
    return Table("Recall in text: nats a token", ["model", *header], rows)


def saved(kind: str) -> Callable[[Numbers], float]:
    """What less it costs again than first."""
    return lambda n: loss_of(kind, "first")(n) - loss_of(kind, "again")(n)


def same_order(done: Sequence[Finished]) -> str:
    """Whether all models of a seed have read the same, as their records have it."""
    orders = {(cell.seed, cell.numbers["order"]) for cell in done}
    seeds = sorted(cell_seed for cell_seed, _ in orders)
    apart = [str(seed) for seed in dict.fromkeys(seeds) if seeds.count(seed) > 1]
    if apart:
        return f"Not comparable: models of seed {', '.join(apart)} have read different windows."
    return "All models of a seed have read the same windows in the same order."


def mean_loss(cells: Sequence[Finished]) -> float:
    return mean(cell.numbers["held out"]["loss"] for cell in cells)


def best_of(done: Sequence[Finished], models: Sequence[str]) -> str | None:
    """The model with the least mean loss on held-out text, of those that have run."""
    there = [model for model in models if select(done, model=model)]
    return min(there, key=lambda model: mean_loss(select(done, model=model)), default=None)


def standing(done: Sequence[Finished]) -> list[str]:
    """Ours beside the best that recalls otherwise or not at all, and beside other models of SKA."""
    ours = best_of(done, OURS)
    baseline = best_of(done, WITHOUT_SKA)
    others = {f"{baseline}, the best without SKA": baseline}
    others |= {
        model: best_of(done, [model]) for model in MODELS if model not in (*OURS, *WITHOUT_SKA)
    }
    return [
        f"{ours} against {named}: {difference(done, ours, other)}."
        for named, other in others.items()
        if ours and other
    ]


def difference(done: Sequence[Finished], one: str, other: str) -> str:
    """Of the losses, seed by seed: the text and its order are the same."""
    pairs = [
        mean_loss([a]) - mean_loss([b])
        for a in select(done, model=one)
        for b in select(done, model=other)
        if a.seed == b.seed
    ]
    if not pairs:
        return "no seed has run with both"
    spread = f" ± {stdev(pairs):.4f} over {len(pairs)} seeds" if len(pairs) > 1 else " in one seed"
    verdict = "no worse" if mean(pairs) <= 0 else "worse"
    return f"{mean(pairs):+.4f} nats a token{spread}, {verdict}"


def recalling(done: Sequence[Finished]) -> list[str]:
    """Whether what a document has had before costs less."""
    there = [c for c in done if {"first", "again"} <= shares(c.numbers, "rare_pairs").keys()]
    by_model = {
        model: mean(saved("rare_pairs")(cell.numbers) for cell in select(there, model=model))
        for model in distinct(there, "model")
    }
    if not by_model:
        return []
    ordered = sorted(by_model.items(), key=lambda found: -found[1])
    told = ", ".join(f"{model} {less:.3f}" for model, less in ordered)
    return [
        f"The second token of a rare pair costs less again than first, by nats: {told}. What comes "
        "again is commoner too, so that only what models differ in tells of recall."
    ]


def draw_learning(ax: Any, cells: Sequence[Finished], look: Mapping[str, Any]) -> None:
    """Held-out loss over the tokens read."""
    told = cells[0].numbers
    a_step = told["rows"] * told["length"]
    steps = told["tests"]["step"]
    curves = [cell.numbers["tests"]["loss"] for cell in cells]
    band(ax, [step * a_step for step in steps], curves, **{**look, "marker": ""})


def draw_shares(ax: Any, cells: Sequence[Finished], kind: str, look: Mapping[str, Any]) -> None:
    names = list(shares(cells[0].numbers, kind))
    curves = [[loss_of(kind, name)(cell.numbers) for name in names] for cell in cells]
    if names:
        band(ax, range(len(names)), curves, **look)
        ax.set_xticks(range(len(names)), names)
