"""System prompts: variables at the start, asked for at the end (4.1)."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from echo_lm.tasks.draws import Draws
from echo_lm.tasks.words import WordTask, side_by_side


@dataclass(frozen=True)
class SystemPrompt(WordTask):
    """Pairs side by side at the start, noise, then up to four of their keys with their values."""

    def starts(self, draws: Draws) -> Int[Tensor, "b pairs"]:
        return side_by_side(draws, self.pairs)
