"""What experiments that train have in common: the run of a cell, its curves, its readings.

A protocol may hold any setting of `TrainConfig` under its own name; `fit` takes those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from statistics import mean
from typing import Any, Protocol, TypeVar

import torch

from echo_lm.evaluate.recall import Source, recall
from echo_lm.experiments.base import Finished, Settings, Workbench, over_seeds
from echo_lm.model.config import EchoConfig
from echo_lm.model.lm import EchoLM
from echo_lm.results import rounded
from echo_lm.tasks.base import Task
from echo_lm.train import History, TrainConfig, train

POINTS = 100
"""The most points of a curve in a record."""
HEALTH_POINTS = 20
"""And of the curves that have many numbers a point."""
TOKENS_AT_ONCE = 1 << 17
"""Rows are read together as long as they have no more tokens than this: what tasks draw, and
what attention keeps, grows with it."""

T = TypeVar("T")

TRAIN_SETTINGS = frozenset(field.name for field in fields(TrainConfig))


class Trainable(Source, Protocol):
    """A source that a model can be made for: a task, or text."""

    @property
    def vocab_size(self) -> int: ...


@dataclass(frozen=True)
class Fitted:
    """A trained model and what its training told."""

    model: EchoLM
    history: History
    facts_only: bool

    def numbers(self) -> dict[str, Any]:
        """For the record: how it ended, and thin curves."""
        return {
            "parameters": self.model.num_parameters(),
            "steps": self.history.steps,
            "ended": self.history.ended,
            "accuracy": self.history.last("test_accuracy"),
            "training": training_curves(self.history),
            "tests": test_curves(self.history),
        }


def fit(
    config: EchoConfig,
    source: Trainable,
    protocol: Mapping[str, Any],
    seed: int,
    bench: Workbench,
    *,
    test: Source | None = None,
    **changes: Any,
) -> Fitted:
    """Train a new model; an interrupted cell goes on from its last checkpoint.

    `changes` are settings of `TrainConfig` that differ from the protocol's.
    """
    how = train_config(protocol, seed, **changes)
    model = build(config, source, seed)
    if how.compile and bench.device.startswith("cuda"):
        # The models of earlier cells count against a limit, beyond which nothing is compiled.
        torch.compiler.reset()
    history = train(
        model,
        source,
        how,
        device=bench.device,
        folder=bench.folder,
        test=test,
        console=bench.console,
    )
    return Fitted(model, history, how.facts_only)


def train_config(protocol: Mapping[str, Any], seed: int, **changes: Any) -> TrainConfig:
    """What a protocol says of training."""
    said = {name: value for name, value in protocol.items() if name in TRAIN_SETTINGS}
    return TrainConfig(**{**said, **changes, "seed": seed})


def build(config: EchoConfig, source: Trainable, seed: int) -> EchoLM:
    """A model for the symbols of a source, with the first weights of a seed."""
    torch.manual_seed(seed)
    return EchoLM(replace(config, vocab_size=source.vocab_size))


def preset(name: str, **changes: Any) -> EchoConfig:
    """A preset, with settings of its SKA layers changed."""
    config = EchoConfig.preset(name)
    return replace(config, ska=replace(config.ska, **changes))


def training_curves(history: History) -> dict[str, list[float]]:
    """Up to each step shown, since the one before: mean loss and largest gradient norm."""
    taken = [record for record in history.records if "loss" in record]
    stretches = spans(taken, POINTS)
    return {
        "step": [stretch[-1]["step"] for stretch in stretches],
        "loss": [rounded(mean(r["loss"] for r in stretch)) for stretch in stretches],
        "gradient norm": [rounded(max(r["gradient_norm"] for r in s)) for s in stretches],
    }


def test_curves(history: History) -> dict[str, Any]:
    """What the evaluations told; of each SKA layer lambda_min and the filter's coefficients."""
    told = [record for record in history.records if "test_loss" in record]
    shown, looked = thin(told, POINTS), thin(told, HEALTH_POINTS)
    return {
        "step": [record["step"] for record in shown],
        "accuracy": [rounded(record["test_accuracy"]) for record in shown],
        "loss": [rounded(record["test_loss"]) for record in shown],
        "ska": {
            "step": [record["step"] for record in looked],
            **{
                layer: {
                    "lambda_min": [
                        rounded(record["ska"][layer]["lambda_min"]) for record in looked
                    ],
                    "coefficients": [record["ska"][layer]["coefficients"] for record in looked],
                }
                for layer in told[-1]["ska"]
            },
        },
    }


def first_step(numbers: Mapping[str, Any], accuracy: float) -> int | None:
    """The step of the first evaluation, of those shown, that was as good; None if none was."""
    tests = numbers["tests"]
    good = (s for s, a in zip(tests["step"], tests["accuracy"], strict=True) if a >= accuracy)
    return next(good, None)


def steps_needed(cells: Sequence[Finished], accuracy: float) -> str:
    """Over seeds, as a table shows it, how long it took to be as good."""
    there = [cell for cell in cells if first_step(cell.numbers, accuracy) is not None]
    if not there:
        return "never" if cells else "–"
    never = len(cells) - len(there)
    found = over_seeds(there, lambda n: first_step(n, accuracy) or 0, "{:,.0f}".format)
    return found + (f" (never in {never} of {len(cells)})" if never else "")


def read_over(
    fitted: Fitted,
    grid: Iterable[tuple[Settings, Task]],
    *,
    rows: int,
    seed: int,
    tokens_at_once: int = TOKENS_AT_ONCE,
) -> list[dict[str, Any]]:
    """Recall on each task of a grid, in the words that name it; see `found_at`."""
    readings = []
    for settings, task in grid:
        found = recall(
            fitted.model,
            task,
            rows=rows,
            batch=max(1, min(rows, tokens_at_once // task.length)),
            seed=seed,
            facts_only=fitted.facts_only,
        )
        told = {"accuracy": found.accuracy, "exact": found.exact, "loss": rounded(found.loss)}
        readings.append({**settings, **told, "state bytes": found.state_bytes})
    return readings


def found_at(reading: str = "readings", **settings: Any) -> Callable[[Mapping[str, Any]], float]:
    """Reads, of a cell's numbers, the mean accuracy where a grid has these settings."""

    def value(numbers: Mapping[str, Any]) -> float:
        return mean(
            point["accuracy"]
            for point in numbers[reading]
            if all(point[name] == wanted for name, wanted in settings.items())
        )

    return value


def spans(items: Sequence[T], most: int) -> list[Sequence[T]]:
    """At most so many stretches of about equal length."""
    count = min(most, len(items))
    edges = [i * len(items) // max(count, 1) for i in range(count + 1)]
    return [items[start:end] for start, end in pairwise(edges)]


def thin(items: Sequence[T], most: int) -> list[T]:
    """At most so many, evenly spread, the last one among them."""
    return [span[-1] for span in spans(items, most)]
