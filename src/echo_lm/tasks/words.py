"""What the paper's transfer tasks share: words in noise, and one rule for all of them.

The paper trains on two of these tasks and reads six (4.1), so that all must ask the same thing:
*which word followed this one?* A pair is two neighbouring words, its key and its value; everything
else is noise; questions come last, each followed by its answer. A word may be a key in one
example and a value in another: else the middle of two hops could be no answer.

From the paper: 128 symbols, pairs ("KV") and length as the axes, "clean fact/distractor/query
structure", "2-4 answer tokens per sequence". Ours: all layouts, since it publishes no generator.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from echo_lm.model.loss import IGNORED_LABEL
from echo_lm.tasks.base import Batch, Family, check
from echo_lm.tasks.draws import Draws
from echo_lm.tasks.symbols import Symbols

WORDS = 64
NOISE = 64
"""Noise symbols are numbered after the words."""

MOST_QUERIES = 4
QUESTION_AND_ANSWER = (False, True)


@dataclass(frozen=True)
class WordTask(Family):
    """Pairs somewhere in a sequence of a given length, some of them asked for at its end."""

    pairs: int = 4
    length: int = 128
    queries: int | None = None
    """How many pairs are asked for; all of them up to four, unless the task says otherwise."""

    symbols: ClassVar = Symbols((("w", WORDS), ("n", NOISE)))

    def __post_init__(self) -> None:
        check("pairs", self.pairs, at_least=1, at_most=WORDS // 2)
        check("queries", self.asked, at_least=1, at_most=self.pairs)
        needed = self.room_needed + 2 * self.asked
        check("length", self.length, at_least=needed, why=" to hold these pairs and questions")

    @property
    def asked(self) -> int:
        return min(self.pairs, MOST_QUERIES) if self.queries is None else self.queries

    @property
    def context(self) -> int:
        """Tokens before the questions."""
        return self.length - 2 * self.asked

    @property
    def room_needed(self) -> int:
        """The shortest context."""
        return 2 * self.pairs

    @abstractmethod
    def starts(self, draws: Draws) -> Int[Tensor, "b pairs"]:
        """Where each pair's key stands."""

    def examples(self, draws: Draws) -> Batch:
        pairs = draws.choose(WORDS, 2 * self.pairs).unflatten(1, (self.pairs, 2))
        return recall(
            draws,
            context=self.context,
            pairs=pairs,
            starts=self.starts(draws),
            asked=ask_some(draws, pairs, self.asked),
            answered=QUESTION_AND_ANSWER,
        )


def side_by_side(draws: Draws, pairs: int) -> Int[Tensor, "b pairs"]:
    """Pairs one after the other from the start."""
    return 2 * torch.arange(pairs, device=draws.device).expand(draws.rows, -1)


def scattered(draws: Draws, room: int, blocks: int, width: int) -> Int[Tensor, "b blocks"]:
    """Where blocks of a width begin that lie anywhere in the room without overlap, in order."""
    slots = draws.choose(room - blocks * (width - 1), blocks).sort(dim=1).values
    return slots + torch.arange(blocks, device=draws.device) * (width - 1)


def ask_some(
    draws: Draws, pairs: Int[Tensor, "b pairs 2"], queries: int
) -> Int[Tensor, "b two_queries"]:
    """Different pairs in random order."""
    picked = draws.choose(pairs.shape[1], queries)
    return pairs.gather(1, picked[..., None].expand(-1, -1, 2)).flatten(1)


def recall(
    draws: Draws,
    *,
    context: int,
    pairs: Int[Tensor, "b pairs 2"],
    starts: Int[Tensor, "b pairs"],
    asked: Int[Tensor, "b ask"],
    answered: Sequence[bool],
) -> Batch:
    """Pairs where they start in a noisy context, then what is asked.

    Args:
        draws: For the noise.
        context: Tokens before the questions.
        pairs: Keys and values.
        starts: Where each pair's key stands.
        asked: Questions and their answers as they stand at the end.
        answered: Which of these are answers; repeated to the end.
    """
    tokens = draws.below(NOISE, context + asked.shape[1]).add_(WORDS)
    places = torch.stack([starts, starts + 1], dim=2).flatten(1)
    tokens.scatter_(1, places, pairs.flatten(1))
    tokens[:, context:] = asked
    facts = torch.zeros_like(tokens, dtype=torch.bool).scatter_(1, places, True)
    pattern = torch.tensor(answered, device=tokens.device).repeat(asked.shape[1] // len(answered))
    labels = torch.full_like(tokens, IGNORED_LABEL)
    labels[:, context:] = asked.masked_fill(~pattern, IGNORED_LABEL)
    return Batch(tokens, labels, facts)
