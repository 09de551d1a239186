"""What a task is: a source of batches that know where their answers are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal, Self, get_args

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from echo_lm.model.loss import IGNORED_LABEL
from echo_lm.tasks.draws import GOLDEN, Draws, keys, mix, scale
from echo_lm.tasks.symbols import Symbols

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)

TEST_SHARE = 8
"""One example in so many is for testing."""
ATTEMPTS = 500
"""How often a row is drawn until it is of the split asked for."""


@dataclass(frozen=True)
class Batch:
    """Sequences of equal length and what is asked of them."""

    tokens: Int[Tensor, "b t"]
    labels: Int[Tensor, "b t"]
    """At place t the token to predict from those before t; -100 where nothing is asked."""
    facts: Bool[Tensor, "b t"]
    """Tokens that carry what is asked for later: the paper's action mask."""

    @property
    def starts(self) -> Bool[Tensor, "b t"] | None:
        """First tokens of what shares a row and must not know of each other; None: rows are one."""
        return None

    @property
    def answers(self) -> Bool[Tensor, "b t"]:
        """Where there is something to predict."""
        return self.labels != IGNORED_LABEL

    def map(self, act: Callable[[Tensor], Tensor]) -> Self:
        """The same done to every tensor."""
        return type(self)(**{name: act(tensor) for name, tensor in vars(self).items()})

    def to(self, device: torch.device | str) -> Self:
        return self.map(lambda tensor: tensor.to(device))

    def rows(self, which: slice) -> Self:
        """Some of the examples."""
        return self.map(lambda tensor: tensor[which])

    def pieces(self, count: int) -> list[Self]:
        """The examples in so many parts of one size."""
        if len(self.tokens) % count:
            raise ValueError(
                f"{len(self.tokens)} rows cannot be read in {count} pieces of one size; choose a "
                "batch that is a multiple of accumulate times the number of processes."
            )
        size = len(self.tokens) // count
        return [self.rows(slice(start, start + size)) for start in range(0, size * count, size)]

    def replaced(self, rows: Int[Tensor, " n"], by: Self) -> Self:
        """Other examples in these rows."""
        other = vars(by)
        return type(self)(
            **{name: old.index_copy(0, rows, other[name]) for name, old in vars(self).items()}
        )


class Task(ABC):
    """A source of sequences. A batch is a function of its seed, step and split alone."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """How many different tokens there are."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens of a sequence; of the longest ones, if batches differ."""

    @abstractmethod
    def batch(
        self,
        rows: int,
        *,
        seed: int,
        step: int = 0,
        split: Split = "train",
        device: torch.device | str = "cpu",
    ) -> Batch:
        """The batch number `step` of a seed."""

    @abstractmethod
    def spell(self, tokens: Int[Tensor, " t"]) -> str:
        """The tokens as a person would write them."""


class Spelled(Task):
    """A task whose tokens have names."""

    @property
    @abstractmethod
    def symbols(self) -> Symbols:
        """What the tokens are."""

    @property
    def vocab_size(self) -> int:
        return self.symbols.size

    def spell(self, tokens: Int[Tensor, " t"]) -> str:
        return self.symbols.spell(tokens)


class Family(Spelled):
    """An endless list of examples, each drawn on its own.

    No example of one split is ever one of the other, see `is_test`.
    """

    @abstractmethod
    def examples(self, draws: Draws) -> Batch:
        """One example for each row of draws, of either split."""

    def batch(
        self,
        rows: int,
        *,
        seed: int,
        step: int = 0,
        split: Split = "train",
        device: torch.device | str = "cpu",
    ) -> Batch:
        check("rows", rows, at_least=1)
        check("step", step, at_least=0)
        return self.numbered(torch.arange(rows, device=device), seed, step, split)

    def numbered(self, numbers: Int[Tensor, " b"], seed: int, step: int, split: Split) -> Batch:
        """The examples with these numbers, drawn again until each is of the split."""
        check_option("split", split, SPLITS)
        name = (seed, split, step)
        batch = self.examples(Draws(keys(*name, 0, numbers=numbers)))
        for attempt in range(1, ATTEMPTS):
            wrong = (is_test(batch.tokens) != (split == "test")).nonzero().flatten()
            if not len(wrong):
                return batch
            draws = Draws(keys(*name, attempt, numbers=numbers[wrong]))
            batch = batch.replaced(wrong, self.examples(draws))
        raise ValueError(f"{self} has too few examples to keep some of them for testing.")


def is_test(tokens: Int[Tensor, "b t"]) -> Bool[Tensor, " b"]:
    """Which examples are for testing: one in eight, by a hash of the tokens, whatever the task."""
    places = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    weights = mix(places * GOLDEN)
    return scale(mix((weights * (tokens + 1)).sum(dim=1)), TEST_SHARE) == 0


def check(
    name: str, value: int, *, at_least: int, at_most: int | None = None, why: str = ""
) -> None:
    """Refuse a setting out of range in one sentence."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if whole and value >= at_least and (at_most is None or value <= at_most):
        return
    bounds = f"at least {at_least}" if at_most is None else f"between {at_least} and {at_most}"
    raise ValueError(f"{name} must be a whole number {bounds}{why}, got {value!r}.")


def check_option(name: str, value: object, options: Collection[str]) -> None:
    """Refuse a setting that is none of its options."""
    if value not in options:
        raise ValueError(f"{name} must be one of {', '.join(options)}, got {value!r}.")
