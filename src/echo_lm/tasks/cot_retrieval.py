"""System prompt amnesia, sub-task A of the appendix's experiment 3: chain-of-thought retrieval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from echo_lm.tasks.base import Batch, Family, check_option
from echo_lm.tasks.draws import Draws
from echo_lm.tasks.text import CHARACTERS, Tier, ask, digits, letters, line, pick

VARIABLES = 4
STEPS: dict[Tier, tuple[int, int]] = {"easy": (10, 30), "hard": (150, 300)}
VARIABLE = len("b=17;")
STEP = len("12+30=42;")
QUESTION = len("?b=17")


@dataclass(frozen=True)
class CoTRetrieval(Family):
    """Four variables `b=17;`, a scratchpad of sums `12+30=42;`, then `?b=17`.

    From the paper: four variables, a gap of 10 to 30, or of 150 to 300, in at most 400 and 3,000
    tokens. App. G counts the gap in tokens, H.2 in steps; we take steps, which its bounds on
    length agree with. Ours: names and text.
    """

    tier: Tier = "easy"

    symbols: ClassVar = CHARACTERS

    def __post_init__(self) -> None:
        check_option("tier", self.tier, STEPS)

    @property
    def most(self) -> int:
        """Steps of the longest scratchpad."""
        return STEPS[self.tier][1]

    @property
    def length(self) -> int:
        return VARIABLES * VARIABLE + self.most * STEP + QUESTION

    def examples(self, draws: Draws) -> Batch:
        name, value = letters(draws.choose(26, VARIABLES), "a"), draws.below(100, VARIABLES)
        prompt = line(name, "=", digits(value), ";").flatten(1)
        one, other = draws.below(50, self.most), draws.below(50, self.most)
        sums = digits(one + other)
        # Its first part says how many steps there are, and must be characters.
        ones, others = digits(one), digits(other)
        steps = line(ones[..., 0], ones[..., 1], "+", others, "=", sums, ";").flatten(1)
        body = torch.cat([prompt, steps], dim=1)
        facts = torch.zeros_like(body, dtype=torch.bool)
        facts[:, : prompt.shape[1]] = True
        used = prompt.shape[1] + draws.between(*STEPS[self.tier]) * STEP
        asked = draws.below(VARIABLES)
        question = line("?", pick(name, asked), "=", digits(pick(value, asked)))
        return ask(body, facts, used, question)
