"""What our experiments on the operator share: models alike but for it, trained alike, compared."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar

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
from echo_lm.experiments.training import (
    first_step,
    fit,
    found_at,
    preset,
    read_over,
    steps_needed,
)
from echo_lm.model.config import EchoConfig, Mamba2Config, SKAConfig
from echo_lm.plots import COLOURS, band, figure, line
from echo_lm.tasks import Family, find

Changes = Mapping[str, Any]
"""Settings of `SKAConfig` that differ from the model's."""
Named = Mapping[str, Any]
"""A task as JSON: its name under "task", its settings, and under "longer" changes of these, by
name, with which it is read besides."""

MODELS = {
    "synthetic-ska": preset("synthetic-ska"),
    "synthetic-ska, tied start": preset("synthetic-ska", tied_start=True),
    "a Mamba-2 and an SKA block of width 64": EchoConfig(
        dim=64,
        mixers=("mamba2", "ska"),
        heads=2,
        mlp="swiglu",
        tie_embeddings=False,
        ska=SKAConfig(rank=24),
        mamba2=Mamba2Config(state_dim=16),
    ),
}
Show = Callable[[Sequence[Finished]], str]
"""What a table says of the seeds of a cell."""

ORDER_1: Changes = {"filter": "power", "order": 1}
"""The filter that is quickest to find what followed a key; the small model knows no other."""

GOOD = 0.9
"""Accuracy at which a task counts as found out."""


class Ablation(Experiment):
    """Every variant on every task. Each is also read on texts longer than it was trained on."""

    source = "ours"
    setting: ClassVar[str]
    """What the variants differ in, as a table's header has it."""
    models: ClassVar[Mapping[Scale, str]] = {
        "smoke": "a Mamba-2 and an SKA block of width 64",
        "full": "synthetic-ska, tied start",
    }

    @abstractmethod
    def variants(self, scale: Scale) -> Mapping[str, Changes]:
        """By name, in the order of the tables."""

    def tasks(self, scale: Scale) -> Mapping[str, Named]:
        """What is trained on, by name."""
        if scale == "full":
            return dict([mqar(8, 128, 4096), mqar(32, 384, 4096)])
        return dict([mqar(4, 32, 256)])

    def protocol(self, scale: Scale) -> dict[str, Any]:
        full = scale == "full"
        return {
            "model": self.models[scale],
            "steps": 2000 if full else 300,
            "batch": 16,
            "lr": 2e-3,
            "warmup": 100 if full else 50,
            "evaluate_every": 50 if full else 25,
            "evaluate_rows": 128 if full else 64,
            "stop_at": 0.999 if full else 0.99,
            "rows": 128 if full else 32,
            "tasks": self.tasks(scale),
            "variants": self.variants(scale),
        }

    def cells(self, scale: Scale) -> list[Settings]:
        return [
            {"task": task, self.setting: variant}
            for task in self.tasks(scale)
            for variant in self.variants(scale)
        ]

    def run(
        self, protocol: Mapping[str, Any], settings: Settings, seed: int, bench: Workbench
    ) -> dict[str, Any]:
        config = MODELS[protocol["model"]]
        changes = protocol["variants"][settings[self.setting]]
        named = protocol["tasks"][settings["task"]]
        config = replace(config, ska=replace(config.ska, **changes))
        fitted = fit(config, task_of(named), protocol, seed, bench)
        grid = [
            ({"read": name}, task_of({**named, **changed}))
            for name, changed in named["longer"].items()
        ]
        readings = read_over(fitted, grid, rows=protocol["rows"], seed=seed)
        return {**fitted.numbers(), "readings": readings}

    def tables(self, done: Sequence[Finished]) -> list[Table]:
        tasks = distinct(done, "task")
        found: dict[str, Show] = {
            "Accuracy in percent, at the end of training": lambda cells: over_seeds(
                cells, lambda n: n["accuracy"], percent
            ),
            f"Steps until {GOOD:.0%} of the answers were right": lambda cells: steps_needed(
                cells, GOOD
            ),
            "Largest gradient norm": lambda cells: over_seeds(cells, largest_gradient),
        }
        return [
            *(self.table(done, tasks, title, show) for title, show in found.items()),
            *(
                self.table(done, having, f"Accuracy in percent, read {name}", reading_of(name))
                for name, having in readings(done).items()
            ),
        ]

    def table(
        self, done: Sequence[Finished], tasks: Sequence[str], title: str, show: Show
    ) -> Table:
        """A row for each variant, a column for each task."""
        rows = [
            [variant, *(show(self.of(done, task, variant)) for task in tasks)]
            for variant in distinct(done, self.setting)
        ]
        return Table(title, [self.setting, *tasks], rows)

    def remarks(self, done: Sequence[Finished]) -> list[str]:
        return [
            f"{task}: {ranking(self.by_variant(done, task))}." for task in distinct(done, "task")
        ]

    def draw(self, done: Sequence[Finished], path: Path) -> None:
        panels = self.panels(done)
        with figure(path, columns=len(panels) + 1, size=(3.2, 2.8)) as axes:
            for ax, (title, by_variant) in zip(axes[0], panels.items(), strict=False):
                draw_learning(by_variant, ax)
                ax.set_title(title)
            handles, labels = axes[0, 0].get_legend_handles_labels()
            axes[0, -1].legend(handles, labels, fontsize=7, loc="center left")
            axes[0, -1].axis("off")

    def panels(self, done: Sequence[Finished]) -> dict[str, dict[str, list[Finished]]]:
        """What each part of the figure shows: variants by title."""
        return {task: self.by_variant(done, task) for task in distinct(done, "task")}

    def of(self, done: Sequence[Finished], task: str, variant: Any) -> list[Finished]:
        """The seeds of one variant on one task."""
        return select(done, **{"task": task, self.setting: variant})

    def by_variant(self, done: Sequence[Finished], task: str) -> dict[str, list[Finished]]:
        """Those of the variants that have run on a task."""
        found = {str(v): self.of(done, task, v) for v in distinct(done, self.setting)}
        return {variant: cells for variant, cells in found.items() if cells}


def mqar(pairs: int, gap: int, longer: int | None = None) -> tuple[str, Named]:
    """A task and its name; it is also read at a longer gap."""
    longer_gaps = {} if longer is None else {f"at gap {longer:,}": {"gap": longer}}
    name = f"{pairs} pairs, gap {gap}"
    return name, {"task": "mqar", "pairs": pairs, "gap": gap, "longer": longer_gaps}


def task_of(named: Named) -> Family:
    """The task that JSON names."""
    settings = {name: value for name, value in named.items() if name not in ("task", "longer")}
    return find(named["task"], **settings)


def readings(done: Sequence[Finished]) -> dict[str, list[str]]:
    """What was read besides, and of which tasks."""
    found: dict[str, list[str]] = {}
    for cell in done:
        for point in cell.numbers["readings"]:
            tasks = found.setdefault(point["read"], [])
            if cell.settings["task"] not in tasks:
                tasks.append(cell.settings["task"])
    return found


def reading_of(name: str) -> Show:
    return lambda cells: over_seeds(cells, found_at(read=name), percent)


def largest_gradient(numbers: Mapping[str, Any]) -> float:
    return float(max(numbers["training"]["gradient norm"]))


def ranking(by_variant: Mapping[str, Sequence[Finished]]) -> str:
    """Who found the task out, the fastest first, and who did not."""
    steps = {
        variant: mean(first_step(c.numbers, GOOD) or 0 for c in cells)
        for variant, cells in by_variant.items()
        if all(first_step(c.numbers, GOOD) is not None for c in cells)
    }
    by_speed = sorted(steps.items(), key=lambda found: found[1])
    quick = ", ".join(f"{variant} ({step:,.0f} steps)" for variant, step in by_speed)
    slow = ", ".join(
        f"{variant} ({mean(c.numbers['accuracy'] for c in cells):.0%})"
        for variant, cells in by_variant.items()
        if variant not in steps
    )
    told = [f"{GOOD:.0%} in every seed: {quick or 'none'}"]
    return "; ".join([*told, f"not: {slow}"] if slow else told)


def draw_learning(by_variant: Mapping[str, Sequence[Finished]], ax: Any) -> None:
    """Accuracy over steps; a run that has ended stays where it was."""
    steps = sorted({s for cells in by_variant.values() for c in cells for s in steps_of(c)})
    for i, (variant, cells) in enumerate(by_variant.items()):
        curves = [held(c.numbers["tests"], steps) for c in cells]
        band(ax, steps, curves, **look(i, variant))
    ax.set(xlabel="step", ylabel="accuracy", ylim=(-0.02, 1.02))


def apart(panels: Mapping[str, Mapping[str, list[Finished]]]) -> dict[str, Any]:
    """A panel of its own for each ending of the variants' names, such as ", rank 24"."""
    found: dict[str, dict[str, list[Finished]]] = {}
    for title, by_variant in panels.items():
        for variant, cells in by_variant.items():
            name, comma, ending = variant.rpartition(", ")
            panel = found.setdefault(f"{title}{comma}{ending}" if comma else title, {})
            panel[name or variant] = cells
    return found


def look(i: int, label: str) -> dict[str, Any]:
    """Of more lines than there are colours: hollow the second time round, dark within the third."""
    within = (None, "white", "black")[min(i // len(COLOURS), 2)]
    return line(i, label) | ({"markerfacecolor": within} if within else {})


def steps_of(cell: Finished) -> list[int]:
    return list(cell.numbers["tests"]["step"])


def held(tests: Mapping[str, Any], steps: Sequence[int]) -> list[float]:
    """The accuracy last seen at each of these steps; 0 before the first."""
    curve = list(zip(tests["step"], tests["accuracy"], strict=True))
    return [next((a for s, a in reversed(curve) if s <= step), 0.0) for step in steps]
