"""Tool traces: calls and results with logs between them, committed after a delay (4.1, Fig. 2)."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from echo_lm.tasks.draws import Draws
from echo_lm.tasks.words import WordTask, scattered

CALL = 3
"""A tool, its result, and at least one token of log."""


@dataclass(frozen=True)
class ToolTrace(WordTask):
    """Pairs apart from each other in the first half, noise, then up to four asked for.

    Fig. 2 names it "Tool Trace Delayed Commit": the second half is the delay.
    """

    @property
    def room_needed(self) -> int:
        return CALL * self.pairs

    def starts(self, draws: Draws) -> Int[Tensor, "b pairs"]:
        return scattered(draws, max(self.context // 2, self.room_needed), self.pairs, CALL)
