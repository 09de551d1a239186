"""The appendix's experiments 1 to 3: Mamba-3 with and without SKA, and the action mask (G, H)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

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
from echo_lm.experiments.training import fit, read_over, steps_needed
from echo_lm.model.config import EchoConfig, SKAConfig
from echo_lm.plots import band, figure, line
from echo_lm.tasks import Family, find
from echo_lm.tasks.text import Tier

GOOD = 0.99
"""The accuracy whose first step is told."""


@dataclass(frozen=True)
class Variant:
    """A preset's name with its place open for the experiment's, and what it remembers."""

    preset: str
    masked: bool = False
    """Only what the task marks as facts goes into SKA's memory: the paper's action mask."""
    ours: SKAConfig | None = None
    """Our operator in the place of the paper's, on keys that are not lifted."""

    def config(self, size: str) -> EchoConfig:
        config = EchoConfig.preset(self.preset.format(size))
        return replace(config, ska=self.ours) if self.ours else config


VARIANTS = {
    "Mamba-3": Variant("mamba3-{}"),
    "+ CG + SKA, η = 1.5": Variant("mamba3-cg-ska-{}", masked=True),
    "+ CG + SKA, η = 2.5": Variant("mamba3-cg-ska-{}-strong", masked=True),
    "+ CG + SKA, η = 1.5, no mask": Variant("mamba3-cg-ska-{}"),
    "+ SKA (ours), no mask": Variant("mamba3-cg-ska-{}", ours=SKAConfig(rank=24)),
    "+ SKA (ours, tied start), no mask": Variant(
        "mamba3-cg-ska-{}", ours=SKAConfig(rank=24, tied_start=True)
    ),
}
Said = Mapping[tuple[str, str], tuple[str, str]]
"""Of a variant and a tier: accuracy in percent, and steps to it."""

SAID_OF_COT: Said = {
    ("Mamba-3", "easy"): ("10 to 20", "never"),
    ("Mamba-3", "hard"): ("at most 16", "never"),
    ("+ CG + SKA, η = 1.5", "easy"): ("100", "500"),
    ("+ CG + SKA, η = 1.5", "hard"): ("100", "750 to 1,000"),
    ("+ CG + SKA, η = 2.5", "easy"): ("100", "500"),
    ("+ CG + SKA, η = 2.5", "hard"): ("100", "750 to 1,000"),
}
"""H.2 in words; of the other tasks the paper has no numbers."""


class Mamba3Experiment(Experiment):
    """One task in two tiers; every variant is trained and tested on each."""

    task: ClassVar[str]
    size: ClassVar[Literal["tool", "cot"]]
    """Of the presets: three layers or four."""
    steps: ClassVar[int]
    said: ClassVar[Said] = {}

    def protocol(self, scale: Scale) -> dict[str, Any]:
        full = scale == "full"
        return {
            "steps": self.steps if full else 4,
            "batch": 16 if full else 1,
            "lr": 3e-4,
            "warmup": 100 if full else 1,
            "evaluate_every": 250 if full else 2,
            "evaluate_rows": 128 if full else 2,
            "rows": 512 if full else 2,
        }

    def cells(self, scale: Scale) -> list[Settings]:
        return [{"model": model, "tier": tier} for tier in get_args(Tier) for model in VARIANTS]

    def run(
        self, protocol: Mapping[str, Any], settings: Settings, seed: int, bench: Workbench
    ) -> dict[str, Any]:
        variant = VARIANTS[settings["model"]]
        task = find(self.task, tier=settings["tier"])
        config = variant.config(self.size)
        fitted = fit(config, task, protocol, seed, bench, facts_only=variant.masked)
        readings = read_over(fitted, [({}, task)], rows=protocol["rows"], seed=seed)
        guessed = guessing(task, protocol["rows"], seed)
        return {**fitted.numbers(), "reading": readings[0], "guessing": guessed}

    def tables(self, done: Sequence[Finished]) -> list[Table]:
        return [self.table_of(select(done, tier=tier)) for tier in distinct(done, "tier")]

    def remarks(self, done: Sequence[Finished]) -> list[str]:
        said = [
            "An answer has two digits, the second one asked for with the first one given. Guessing "
            "is to say the most common digit of each place, which is far more than 10% where "
            "numbers are small. The masked variants keep in SKA's memory only what the task marks "
            "as facts, more than a reader of the text could always know; the others read it all."
        ]
        for tier in distinct(done, "tier"):
            masked = select(done, tier=tier, model="+ CG + SKA, η = 1.5")
            free = select(done, tier=tier, model="+ CG + SKA, η = 1.5, no mask")
            if masked and free:
                said.append(
                    f"Without the action mask, {tier}: {over_seeds(free, accuracy, percent)}% of "
                    f"the digits are right, with it {over_seeds(masked, accuracy, percent)}%."
                )
        return said

    def table_of(self, cells: Sequence[Finished]) -> Table:
        """One tier, beside what the paper says in words."""
        tier = cells[0].settings["tier"]
        header = ["model", "digits", "whole answers", f"steps to {GOOD:.0%}", "parameters"]
        header += ["paper's digits", "paper's steps"] if self.said else []
        rows = []
        for model in distinct(cells, "model"):
            mine = select(cells, model=model)
            row = [
                model,
                over_seeds(mine, accuracy, percent),
                over_seeds(mine, lambda numbers: numbers["reading"]["exact"], percent),
                steps_needed(mine, GOOD),
                f"{mine[0].numbers['parameters']:,}",
            ]
            row += self.said.get((model, tier), ("–", "–")) if self.said else ()
            rows.append(row)
        every_seed = select(cells, model=cells[0].settings["model"])
        guessed = over_seeds(every_seed, lambda numbers: numbers["guessing"], percent)
        rows.append(["guessing", guessed, *("–" for _ in header[2:])])
        return Table(f"{tier.upper()}: accuracy in percent", header, rows)

    def draw(self, done: Sequence[Finished], path: Path) -> None:
        tiers = distinct(done, "tier")
        with figure(path, rows=len(tiers), columns=2, size=(3.6, 2.5)) as axes:
            for row, tier in zip(axes, tiers, strict=True):
                cells = select(done, tier=tier)
                draw_tests(cells, "loss", row[0])
                draw_tests(cells, "accuracy", row[1])
                row[0].set(yscale="log", title=f"{tier.upper()}: test loss")
                row[1].set(ylim=(-0.02, 1.04), title=f"{tier.upper()}: test accuracy")
            axes[0, 1].legend(fontsize=6)
            for ax in axes[-1]:
                ax.set_xlabel("training step")


class ToolCallingExperiment(Mamba3Experiment):
    name = "mamba3-tool"
    title = "Tool-calling retrieval: Mamba-3 with and without SKA"
    source = "appendix G, experiment 1, and H.1"
    task = "tool-calling"
    size = "tool"
    steps = 2500


class ResourceEconomyExperiment(Mamba3Experiment):
    """The paper gives this experiment no sizes of its own; those of tool calling are taken."""

    name = "mamba3-economy"
    title = "Resource economy: Mamba-3 with and without SKA"
    source = "appendix G, experiment 2"
    task = "resource-economy"
    size = "tool"
    steps = 2500


class CoTRetrievalExperiment(Mamba3Experiment):
    name = "mamba3-cot"
    title = "System prompt amnesia, CoT retrieval: Mamba-3 with and without SKA"
    source = "appendix G, experiment 3A, and H.2"
    task = "cot-retrieval"
    size = "cot"
    steps = 6000
    said = SAID_OF_COT


class SpecificRecallExperiment(Mamba3Experiment):
    name = "mamba3-recall"
    title = "System prompt amnesia, specific recall: Mamba-3 with and without SKA"
    source = "appendix G, experiment 3B"
    task = "specific-recall"
    size = "cot"
    steps = 6000


def accuracy(numbers: Mapping[str, Any]) -> float:
    return float(numbers["reading"]["accuracy"])


def guessing(task: Family, rows: int, seed: int) -> float:
    """The share of digits right of who says the most common one of each place."""
    batch = task.batch(rows, seed=seed, split="test")
    digits = batch.labels[batch.answers].unflatten(0, (rows, -1))
    common = digits.mode(dim=0).values
    return float((digits == common).double().mean())


def draw_tests(cells: Sequence[Finished], what: str, ax: Any) -> None:
    for i, model in enumerate(distinct(cells, "model")):
        tests = [cell.numbers["tests"] for cell in select(cells, model=model)]
        band(ax, tests[0]["step"], [test[what] for test in tests], **line(i, model))
