"""System prompt amnesia, sub-task B of the appendix's experiment 3: specific recall."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from echo_lm.tasks.base import Batch, Family, check_option
from echo_lm.tasks.draws import Draws
from echo_lm.tasks.text import CHARACTERS, Tier, ask, digits, letters, line, pick

VARIABLES = 6
DISTRACTORS: dict[Tier, tuple[int, int]] = {"easy": (10, 30), "hard": (80, 200)}
VARIABLE = len("qx=42;")
QUESTION = len("?qx=42")


@dataclass(frozen=True)
class SpecificRecall(Family):
    """Six variables `qx=42;`, then assignments to names half of which is theirs, then `?qx=42`.

    From the paper: six variables, "confusing distractors", a gap of 10 to 30, or of 80 to 200, in
    at most 500 and 2,500 tokens. Ours: a gap counts distractors, as its bounds on length suggest,
    and what confuses: each shares one letter with a variable, in its place, and none both.
    """

    tier: Tier = "easy"

    symbols: ClassVar = CHARACTERS

    def __post_init__(self) -> None:
        check_option("tier", self.tier, DISTRACTORS)

    @property
    def most(self) -> int:
        """Distractors of the longest sequence."""
        return DISTRACTORS[self.tier][1]

    @property
    def length(self) -> int:
        return (VARIABLES + self.most) * VARIABLE + QUESTION

    def examples(self, draws: Draws) -> Batch:
        # Each place of the name has its own order of the alphabet: the first six letters are the
        # variables', the other twenty are for distractors.
        left, right = letters(draws.choose(26, 26), "a"), letters(draws.choose(26, 26), "a")
        like, unlike = draws.below(VARIABLES, self.most), draws.below(26 - VARIABLES, self.most)
        unlike = unlike + VARIABLES
        shares_left = draws.below(2, self.most) == 0
        first = torch.where(shares_left, left.gather(1, like), left.gather(1, unlike))
        second = torch.where(shares_left, right.gather(1, unlike), right.gather(1, like))
        first = torch.cat([left[:, :VARIABLES], first], dim=1)
        second = torch.cat([right[:, :VARIABLES], second], dim=1)
        value = draws.below(100, VARIABLES + self.most)
        body = line(first, second, "=", digits(value), ";").flatten(1)
        facts = torch.zeros_like(body, dtype=torch.bool)
        facts[:, : VARIABLES * VARIABLE] = True
        used = (VARIABLES + draws.between(*DISTRACTORS[self.tier])) * VARIABLE
        asked = draws.below(VARIABLES)
        named = pick(first, asked), pick(second, asked)
        return ask(body, facts, used, line("?", *named, "=", digits(pick(value, asked))))
