"""Bindings that change: every key is written again and again, and the latest value counts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from echo_lm.tasks.base import Batch, Family, check
from echo_lm.tasks.draws import Draws
from echo_lm.tasks.mqar import KEYS, MQAR, VALUES
from echo_lm.tasks.words import QUESTION_AND_ANSWER, ask_some, recall


@dataclass(frozen=True)
class Overwritten(Family):
    """Rounds of all pairs, each followed by a gap of noise; then every key, followed by its value.

    A round has the keys in another order and draws their values anew. Ours, for memories that
    never forget: sums average a value with the one that replaced it. The facts are the pairs of
    the last round.
    """

    pairs: int = 4
    rounds: int = 4
    gap: int = 16

    symbols: ClassVar = MQAR.symbols

    def __post_init__(self) -> None:
        check("pairs", self.pairs, at_least=1, at_most=KEYS)
        check("rounds", self.rounds, at_least=1)
        check("gap", self.gap, at_least=0)

    @property
    def round_length(self) -> int:
        return 2 * self.pairs + self.gap

    @property
    def context(self) -> int:
        """Tokens before the questions."""
        return self.rounds * self.round_length

    @property
    def length(self) -> int:
        return self.context + 2 * self.pairs

    def examples(self, draws: Draws) -> Batch:
        keys = draws.choose(KEYS, self.pairs)
        orders = [draws.choose(self.pairs, self.pairs) for _ in range(self.rounds)]
        values = [KEYS + draws.choose(VALUES, self.pairs) for _ in range(self.rounds)]
        of_keys, of_values = (
            torch.stack([keys.gather(1, o) for o in orders], 1),
            torch.stack(values, 1),
        )
        written = torch.stack([of_keys, of_values], dim=3)
        rounds, places = (torch.arange(n, device=draws.device) for n in (self.rounds, self.pairs))
        starts = (self.round_length * rounds[:, None] + 2 * places).flatten()
        batch = recall(
            draws,
            context=self.context,
            pairs=written.flatten(1, 2),
            starts=starts.expand(draws.rows, -1),
            asked=ask_some(draws, written[:, -1], self.pairs),
            answered=QUESTION_AND_ANSWER,
        )
        last = torch.arange(self.length, device=draws.device) >= self.context - self.round_length
        return replace(batch, facts=batch.facts & last)
