"""Tool-calling retrieval: the appendix's experiment 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from echo_lm.tasks.base import Batch, Family, check, check_option
from echo_lm.tasks.draws import Draws
from echo_lm.tasks.text import CHARACTERS, Tier, ask, digits, letters, line, pick

CALLS: dict[Tier, tuple[int, int]] = {"easy": (10, 30), "hard": (60, 120)}
CALL = len("B:f->42;")
QUESTION = len("?B:f=42")


@dataclass(frozen=True)
class ToolCalling(Family):
    """`B:f->42;` for each call, then `?B:f=42`: what did this agent last get from this tool?

    From the paper: the format; 10 to 30 calls in at most 400 tokens, or 60 to 120 in 1,500. Ours:
    the numbers of agents and tools, and that of repeated calls the latest counts. The facts are
    the results that still stand at the end, which is more than a reader can know on the way.
    """

    tier: Tier = "easy"
    agents: int = 8
    tools: int = 16

    symbols: ClassVar = CHARACTERS

    def __post_init__(self) -> None:
        check_option("tier", self.tier, CALLS)
        check("agents", self.agents, at_least=1, at_most=26)
        check("tools", self.tools, at_least=1, at_most=26)

    @property
    def most(self) -> int:
        """Calls of the longest sequence."""
        return CALLS[self.tier][1]

    @property
    def length(self) -> int:
        return self.most * CALL + QUESTION

    def examples(self, draws: Draws) -> Batch:
        count = draws.between(*CALLS[self.tier])
        agent, tool = draws.below(self.agents, self.most), draws.below(self.tools, self.most)
        result = draws.below(100, self.most)
        latest = self.latest(agent, tool, count)
        asked = draws.below(count)
        answer = pick(result, pick(latest, asked))
        A, f = letters(agent, "A"), letters(tool, "a")
        stands = latest == torch.arange(self.most, device=draws.device)
        return ask(
            line(A, ":", f, "->", digits(result), ";").flatten(1),
            stands.repeat_interleave(CALL, dim=1),
            count * CALL,
            line("?", pick(A, asked), ":", pick(f, asked), "=", digits(answer)),
        )

    def latest(
        self, agent: Int[Tensor, "b most"], tool: Int[Tensor, "b most"], count: Int[Tensor, " b"]
    ) -> Int[Tensor, "b most"]:
        """For each call, the last one by the same agent of the same tool."""
        pair = agent * self.tools + tool
        call = torch.arange(self.most, device=pair.device).expand_as(pair)
        made = torch.where(call < count[:, None], call, -1)
        last = pair.new_full((len(pair), self.agents * self.tools), -1)
        return last.scatter_reduce(1, pair, made, "amax").gather(1, pair)
