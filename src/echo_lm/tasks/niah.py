"""Needles in a haystack (4.1, Fig. 1a, Table 2)."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from echo_lm.tasks.draws import Draws
from echo_lm.tasks.words import WordTask, scattered


@dataclass(frozen=True)
class NIAH(WordTask):
    """Pairs at any depth of the noise, one of them asked for.

    From the paper: 1, 4 and 8 needles, 64 to 2,048 tokens, one needle up to 4,096.
    """

    @property
    def asked(self) -> int:
        return 1 if self.queries is None else self.queries

    def starts(self, draws: Draws) -> Int[Tensor, "b pairs"]:
        return scattered(draws, self.context, self.pairs, 2)
