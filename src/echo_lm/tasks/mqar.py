"""Multi-query associative recall across a gap of noise, as the paper's grid has it (4.2, 5.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from echo_lm.tasks.base import Batch, Family, check
from echo_lm.tasks.draws import Draws
from echo_lm.tasks.symbols import Symbols
from echo_lm.tasks.words import NOISE, QUESTION_AND_ANSWER, WORDS, ask_some, recall, side_by_side

KEYS = VALUES = WORDS // 2


@dataclass(frozen=True)
class MQAR(Family):
    """Pairs, a gap of noise, then every key again in another order, each followed by its value.

    From the paper: 4 to 32 pairs, gaps of 64 to 4,096. Ours: 32 keys, 32 values and 64 noise
    symbols, disjoint; in one example keys differ, and values do.
    """

    pairs: int = 8
    gap: int = 128
    queries: int | None = None
    """How many pairs are asked for; all, if not said."""

    symbols: ClassVar = Symbols((("k", KEYS), ("v", VALUES), ("n", NOISE)))

    def __post_init__(self) -> None:
        check("pairs", self.pairs, at_least=1, at_most=KEYS)
        check("gap", self.gap, at_least=0)
        check("queries", self.asked, at_least=1, at_most=self.pairs)

    @property
    def asked(self) -> int:
        return self.pairs if self.queries is None else self.queries

    @property
    def length(self) -> int:
        return 2 * self.pairs + self.gap + 2 * self.asked

    def examples(self, draws: Draws) -> Batch:
        keys, values = draws.choose(KEYS, self.pairs), draws.choose(VALUES, self.pairs)
        pairs = torch.stack([keys, KEYS + values], dim=2)
        return recall(
            draws,
            context=2 * self.pairs + self.gap,
            pairs=pairs,
            starts=side_by_side(draws, self.pairs),
            asked=ask_some(draws, pairs, self.asked),
            answered=QUESTION_AND_ANSWER,
        )
