"""Two hops from word to word (4.1, Fig. 1b)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from echo_lm.tasks.base import Batch, Family, check
from echo_lm.tasks.draws import Draws
from echo_lm.tasks.symbols import Symbols
from echo_lm.tasks.words import NOISE, WORDS, recall, scattered

HOPS = 2


@dataclass(frozen=True)
class MultiHop(Family):
    """Pairs that lead from word to word, out of order in the noise; from one word, go two on.

    From the paper: 3, 4 and 8 pairs at lengths of 16 to 256. Eight pairs are 16 tokens already, so
    that its length cannot count them; we count the noise. Ours: all pairs belong to one path, so
    that only the question tells where to begin.
    """

    pairs: int = 4
    noise: int = 64
    written: bool = True
    """Both hops are answered, each answer being the next question, which a model that knows one
    hop can do unseen. If False only the second one is, straight after the question."""

    symbols: ClassVar = Symbols((("w", WORDS), ("n", NOISE)))

    def __post_init__(self) -> None:
        check("pairs", self.pairs, at_least=HOPS, at_most=WORDS - 1)
        why = ", one after each of the pairs"
        check("noise", self.noise, at_least=self.pairs, why=why)

    @property
    def context(self) -> int:
        """Tokens before the question."""
        return 2 * self.pairs + self.noise

    @property
    def length(self) -> int:
        return self.context + (1 + HOPS if self.written else 2)

    def examples(self, draws: Draws) -> Batch:
        path = draws.choose(WORDS, self.pairs + 1)
        order = draws.choose(self.pairs, self.pairs)
        pairs = torch.stack([path.gather(1, order), path.gather(1, order + 1)], dim=2)
        first = draws.below(self.pairs - HOPS + 1, 1)
        walk = path.gather(1, first + torch.arange(HOPS + 1, device=draws.device))
        return recall(
            draws,
            context=self.context,
            pairs=pairs,
            starts=scattered(draws, self.context, self.pairs, 3),
            asked=walk if self.written else walk[:, [0, HOPS]],
            answered=(False, True, True) if self.written else (False, True),
        )
