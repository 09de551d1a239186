"""Training streams made of other tasks: several in turn, or a finite set again and again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Int
from torch import Tensor

from echo_lm.tasks.base import Batch, Family, Spelled, Split, check
from echo_lm.tasks.draws import keys
from echo_lm.tasks.symbols import Symbols


@dataclass(frozen=True)
class Mixture(Spelled):
    """Each batch is of one part. In every round a part has as many turns as it weighs, shuffled."""

    parts: tuple[Spelled, ...]
    weights: tuple[int, ...] = ()
    """Turns of each part; one each if not given."""

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("A mixture needs at least one part.")
        weights = self.weights or (1,) * len(self.parts)
        if len(weights) != len(self.parts):
            raise ValueError(f"{len(self.parts)} parts need as many weights, got {len(weights)}.")
        for weight in weights:
            check("weights", weight, at_least=1)
        if len({part.symbols for part in self.parts}) > 1:
            raise ValueError("The parts of a mixture must have the same symbols.")
        object.__setattr__(self, "weights", weights)

    @property
    def symbols(self) -> Symbols:
        return self.parts[0].symbols

    @property
    def length(self) -> int:
        """Of the longest part."""
        return max(part.length for part in self.parts)

    def turn(self, seed: int, step: int) -> tuple[Spelled, int]:
        """Whose turn it is, and which of its own."""
        round_, place = divmod(step, sum(self.weights))
        order = shuffled(sum(self.weights), seed, round_)
        owners = torch.arange(len(self.parts)).repeat_interleave(torch.tensor(self.weights))[order]
        part = int(owners[place])
        before = int((owners[:place] == part).sum())
        return self.parts[part], round_ * self.weights[part] + before

    def batch(
        self,
        rows: int,
        *,
        seed: int,
        step: int = 0,
        split: Split = "train",
        device: torch.device | str = "cpu",
    ) -> Batch:
        check("step", step, at_least=0)
        part, own_step = self.turn(seed, step)
        return part.batch(rows, seed=seed, step=own_step, split=split, device=device)


@dataclass(frozen=True)
class Repeated(Spelled):
    """A finite set of training examples, in a new order every epoch; test examples are endless."""

    task: Family
    count: int = 100_000

    def __post_init__(self) -> None:
        check("count", self.count, at_least=1)

    @property
    def symbols(self) -> Symbols:
        return self.task.symbols

    @property
    def length(self) -> int:
        return self.task.length

    def batch(
        self,
        rows: int,
        *,
        seed: int,
        step: int = 0,
        split: Split = "train",
        device: torch.device | str = "cpu",
    ) -> Batch:
        if split == "test":
            return self.task.batch(rows, seed=seed, step=step, split=split, device=device)
        check("rows", rows, at_least=1, at_most=self.count)
        check("step", step, at_least=0)
        epoch, place = divmod(step, self.count // rows)
        numbers = shuffled(self.count, seed, epoch)[place * rows : (place + 1) * rows]
        return self.task.numbered(numbers.to(device), seed, 0, split)


@lru_cache(maxsize=16)
def shuffled(count: int, seed: int, round_: int) -> Int[Tensor, " count"]:
    """The numbers below count in an order of their own for every round."""
    return keys("order", seed, round_, numbers=torch.arange(count)).argsort(stable=True)
