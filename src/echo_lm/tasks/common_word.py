"""The word that most often follows another (4.1, Fig. 4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from echo_lm.tasks.base import Batch, check
from echo_lm.tasks.draws import Draws
from echo_lm.tasks.words import QUESTION_AND_ANSWER, WORDS, WordTask, ask_some, recall, scattered

TIMES, COMMON = 3, 2
"""How often a key occurs, and how often with its common word."""
PER_KEY = 3
"""Words of each: a key, a common word and another one."""


@dataclass(frozen=True)
class CommonWord(WordTask):
    """Each key occurs three times anywhere in the noise: twice with one word, once with another.

    One key is asked for its common word. From the paper: the name. Ours: that a word is common to
    its key, without which a model that learned to recall could not know what is asked. Who
    remembers one occurrence only is right two times in three.
    """

    def __post_init__(self) -> None:
        check("pairs", self.pairs, at_least=1, at_most=WORDS // PER_KEY)
        super().__post_init__()

    @property
    def asked(self) -> int:
        return 1 if self.queries is None else self.queries

    @property
    def room_needed(self) -> int:
        return 2 * TIMES * self.pairs

    def starts(self, draws: Draws) -> Int[Tensor, "b pairs"]:
        return scattered(draws, self.context, TIMES * self.pairs, 2)

    def examples(self, draws: Draws) -> Batch:
        words = draws.choose(WORDS, PER_KEY * self.pairs).unflatten(1, (self.pairs, PER_KEY))
        common, other = words[..., [0, 1]], words[..., [0, 2]]
        said = torch.cat([common] * COMMON + [other] * (TIMES - COMMON), dim=1)
        order = draws.choose(TIMES * self.pairs, TIMES * self.pairs)
        return recall(
            draws,
            context=self.context,
            pairs=said.gather(1, order[..., None].expand(-1, -1, 2)),
            starts=self.starts(draws),
            asked=ask_some(draws, common, self.asked),
            answered=QUESTION_AND_ANSWER,
        )
