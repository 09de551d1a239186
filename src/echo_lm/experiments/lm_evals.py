"""Table 4's evaluation sets on the language models that `lm` has trained."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib import metadata
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from echo_lm.data.manifest import file_hash
from echo_lm.evaluate.harness import Conditions, score
from echo_lm.evaluate.local import find_file
from echo_lm.experiments.base import (
    Finished,
    OnMaterial,
    Scale,
    Settings,
    Table,
    Workbench,
    distinct,
    over_seeds,
    percent,
    select,
)
from echo_lm.experiments.language import MODELS, budget, protocol_of_training, trained
from echo_lm.extras import need
from echo_lm.plots import figure, line

WIKITEXT = "wikitext"
METRICS = {
    "hellaswag": "acc_norm",
    "piqa": "acc",
    "arc_easy": "acc",
    "arc_challenge": "acc_norm",
    "winogrande": "acc",
    "lambada_openai": "acc",
    WIKITEXT: "word_perplexity",
}
"""What Table 4 reports of each, and of WikiText, which it does not have, the perplexity a word."""
COLUMNS = {
    "hellaswag": "HS",
    "piqa": "PIQA",
    "arc_easy": "ARC-E",
    "arc_challenge": "ARC-C",
    "winogrande": "WG",
    "lambada_openai": "LMB",
    WIKITEXT: "WikiText ppl",
}
GUESSING = {
    "hellaswag": 0.25,
    "piqa": 0.5,
    "arc_easy": 0.25,
    "arc_challenge": 0.25,
    "winogrande": 0.5,
    "lambada_openai": 0.0,
}
BILLION = 1_000_000_000
PUBLISHED: dict[str, tuple[int, int, tuple[float, ...]]] = {
    "Echo-50M": (50_000_000, 3 * BILLION, (29.3, 59.5, 42.0, 24.4, 49.5, 17.1)),
    "Echo-180M": (180_000_000, 10 * BILLION, (44.3, 70.9, 58.8, 34.2, 55.4, 39.8)),
    "Transformer-180M": (180_000_000, 100 * BILLION, (39.0, 67.1, 59.8, 27.9, 51.2, 32.5)),
    "GDN-180M": (180_000_000, 100 * BILLION, (40.2, 66.3, 62.3, 28.2, 51.7, 31.3)),
    "Mamba-2-180M": (180_000_000, 100 * BILLION, (40.1, 66.8, 60.1, 27.3, 52.0, 30.9)),
    "Mamba-3-SISO-180M": (180_000_000, 100 * BILLION, (40.8, 66.1, 61.5, 27.9, 52.0, 32.5)),
    "Mamba-3-MIMO-180M": (180_000_000, 100 * BILLION, (41.0, 66.7, 60.6, 27.7, 52.9, 34.0)),
}
"""Table 4: parameters, tokens, and percent in the order of the columns."""


class Evaluations(OnMaterial):
    """Every model on every set, through lm-evaluation-harness."""

    name = "lm/evals"
    title = "Language models on the evaluation sets of Table 4"
    source = "Table 4, with another budget and text"
    reads = "evals"

    @cached_property
    def files(self) -> dict[str, Path]:
        return {task: find_file(task, self.material) for task in METRICS}

    def protocol(self, scale: Scale) -> dict[str, Any]:
        need("lm_eval", "eval")
        full = scale == "full"
        return {
            "scale": scale,
            "questions of a set": None if full else 8,
            "max_length": 2048,
            "batch": 64 if full else 8,
            "lm-eval": metadata.version("lm_eval"),
            "sets": {task: file_hash(file)[:16] for task, file in self.files.items()},
            "models": protocol_of_training(scale, self.results),
        }

    def cells(self, scale: Scale) -> list[Settings]:
        return [{"model": model, "task": task} for model, task in product(MODELS, METRICS)]

    def run(
        self, protocol: Mapping[str, Any], settings: Settings, seed: int, bench: Workbench
    ) -> dict[str, Any]:
        told, weights = trained(settings["model"], seed, protocol["scale"], self.results)
        task = settings["task"]
        how = Conditions(
            limit=protocol["questions of a set"],
            max_length=protocol["max_length"],
            batch=protocol["batch"],
        )
        separator = protocol["models"]["text"]["separator"]
        found = score(weights, [task], self.material, None, separator, how, bench.device)
        results = found["results"][task]
        error = results.get(f"{METRICS[task]}_stderr,none")
        return {
            "score": results[f"{METRICS[task]},none"],
            "standard error": error if isinstance(error, float) else None,
            "questions": found["n-samples"][task]["effective"],
            "said": {k: v for k, v in results.items() if isinstance(v, int | float)},
            **told,
        }

    def tables(self, done: Sequence[Finished]) -> list[Table]:
        asked = ", ".join(
            f"{COLUMNS[task]} {select(done, task=task)[0].numbers['questions']:,}"
            for task in distinct(done, "task")
        )
        header = ["model", "parameters", "tokens", "lr", *COLUMNS.values()]
        rows = [row_of(model, select(done, model=model)) for model in distinct(done, "model")]
        guessing = [percent(GUESSING[task]) if task in GUESSING else "–" for task in METRICS]
        return [
            Table(
                f"Percent right, and perplexity a word, after {budget(done)}; questions: {asked}",
                header,
                [*rows, ["guessing", "", "", "", *guessing]],
            ),
            Table(
                "As the paper has it, of another budget and another text: so many times the tokens",
                header,
                published(done[0].numbers["tokens"]),
            ),
        ]

    def remarks(self, done: Sequence[Finished]) -> list[str]:
        return [
            f"{model} is above guessing by more than two standard errors in "
            f"{', '.join(COLUMNS[task] for task in above(select(done, model=model))) or 'nothing'}."
            for model in distinct(done, "model")
        ]

    def draw(self, done: Sequence[Finished], path: Path) -> None:
        tasks = [task for task in GUESSING if select(done, task=task)]
        models = distinct(done, "model")
        with figure(path, size=(6.4, 3.2)) as axes:
            ax = axes[0, 0]
            for i, model in enumerate(models):
                by_task = {task: select(done, model=model, task=task) for task in tasks}
                there = {k: mean_score(cells) for k, cells in by_task.items() if cells}
                aside = 0.6 * (i / max(1, len(models) - 1) - 0.5)
                places = [tasks.index(task) + aside for task in there]
                ax.plot(places, list(there.values()), **{**line(i, model), "linestyle": ""})
            for place, task in enumerate(tasks):
                ax.plot([place - 0.4, place + 0.4], [GUESSING[task]] * 2, color="#999999")
            ax.set_xticks(range(len(tasks)), [COLUMNS[task] for task in tasks])
            ax.set(ylabel="share right (bars: guessing)", ylim=(-0.02, 1.02))
            ax.legend(fontsize=6, ncols=2)


def row_of(model: str, cells: Sequence[Finished]) -> list[str]:
    told = cells[0].numbers
    return [
        model,
        f"{told['parameters']:,}",
        f"{told['tokens']:,}",
        f"{told['learning rate']:g}",
        *(
            over_seeds(select(cells, task=task), lambda n: n["score"], FORM.get(task, percent))
            for task in METRICS
        ),
    ]


FORM = {WIKITEXT: "{:,.1f}".format}


def published(tokens: int) -> list[list[str]]:
    """The paper's rows, each with how many times as many tokens it is of."""
    return [
        [
            model,
            f"{size:,}",
            f"{read:,} ({read / tokens:,.0f}x)",
            "–",
            *(f"{score:.1f}" for score in scores),
            "–",
        ]
        for model, (size, read, scores) in PUBLISHED.items()
    ]


def mean_score(cells: Sequence[Finished]) -> float:
    return mean(cell.numbers["score"] for cell in cells)


def above(cells: Sequence[Finished]) -> list[str]:
    """The tasks in which a model does better than guessing."""
    return [
        task
        for task, guess in GUESSING.items()
        if (same := select(cells, task=task))
        and mean_score(same) - guess > 2 * mean(error_of(cell) for cell in same)
    ]


def error_of(cell: Finished) -> float:
    """Of a single question nothing is known."""
    error = cell.numbers["standard error"]
    return math.inf if error is None else error
