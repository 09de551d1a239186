"""Resource economy: the appendix's experiment 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from echo_lm.tasks.base import Batch, Family, check_option
from echo_lm.tasks.draws import Draws, scale
from echo_lm.tasks.text import CHARACTERS, Tier, ask, blank, digits, letters, line, one_of, pick


class Size(NamedTuple):
    steps: tuple[int, int]
    agents: int
    gap: tuple[int, int]


SIZES: dict[Tier, Size] = {
    "easy": Size(steps=(5, 15), agents=3, gap=(0, 0)),
    "hard": Size(steps=(40, 100), agents=6, gap=(200, 400)),
}
STEP = len("A sell 3g 2wB;")
QUESTION = len("?Ag=07")

MINE, SELL, BUILD = 0, 1, 2
VERBS = ("mine", "sell", "make")
RESOURCES = ("g", "w")
MOST_MINED, MOST_TRADED = 5, 3
MOST_HELD = 99
"""Two digits; who has that many mines no more."""


@dataclass(frozen=True)
class ResourceEconomy(Family):
    """Agents mine, trade and build; a gap of noise; then `?Ag=07`: how much gold does A have?

    `A mine 3g` adds to what A has, `A sell 3g 2wB` gives 3 gold to B for 2 wood, `A make 3g 2w`
    uses both up. All begin with nothing, and none gives what it does not have. From the paper:
    5 to 15 steps of 3 agents, or 40 to 100 of 6 and 200 to 400 tokens of noise; at most 400 and
    3,000 tokens. Ours: the text and the numbers. Small counts are the more likely ones.
    """

    tier: Tier = "easy"

    symbols: ClassVar = CHARACTERS

    def __post_init__(self) -> None:
        check_option("tier", self.tier, SIZES)

    @property
    def size(self) -> Size:
        return SIZES[self.tier]

    @property
    def room(self) -> int:
        """Tokens before the question, at most."""
        return self.size.steps[1] * STEP + self.size.gap[1]

    @property
    def length(self) -> int:
        return self.room + QUESTION

    def examples(self, draws: Draws) -> Batch:
        steps, gap = draws.between(*self.size.steps), draws.between(*self.size.gap)
        noise = letters(draws.below(26, self.room), "a")
        told, held = self.history(draws, steps)
        end = steps * STEP
        facts = torch.arange(self.room, device=draws.device) < end[:, None]
        body = torch.where(facts, F.pad(told, (0, self.size.gap[1])), noise)
        agent, resource = draws.below(self.size.agents), draws.below(2)
        count = pick(held, agent * 2 + resource)
        A, g = letters(agent, "A"), one_of(RESOURCES, resource)
        return ask(body, facts, end + gap, line("?", A, g, "=", digits(count)))

    def history(
        self, draws: Draws, steps: Int[Tensor, " b"]
    ) -> tuple[Int[Tensor, "b text"], Int[Tensor, "b agents_resources"]]:
        """What is told, and what everyone has after so many steps."""
        most, agents = self.size.steps[1], self.size.agents
        agent = draws.below(agents, most)
        other = (agent + 1 + draws.below(agents - 1, most)) % agents
        resource = draws.below(2, most)
        wishes = draws.below(len(VERBS), most), agent, other, resource
        wished = torch.stack([*wishes, draws.bits(most), draws.bits(most)])
        held = torch.zeros(draws.rows, 2 * agents, dtype=torch.int64, device=draws.device)
        done = []
        for i, wish in enumerate(wished.unbind(dim=2)):
            outcome, after = fulfil(Wish(*wish), held)
            done.append(outcome)
            held = torch.where((i < steps)[:, None], after, held)
        kind, first, second = torch.stack(done, dim=2)
        told = tell(kind, agent, first, resource, second, other)
        return told.flatten(1), held


class Wish(NamedTuple):
    """Someone mines a resource, sells it for the other one, or builds with both."""

    kind: Int[Tensor, " b"]
    agent: Int[Tensor, " b"]
    other: Int[Tensor, " b"]
    resource: Int[Tensor, " b"]
    much: Int[Tensor, " b"]
    """Bits that decide how much of the resource."""
    more: Int[Tensor, " b"]
    """And of the other one."""


def fulfil(
    wish: Wish, held: Int[Tensor, "b agents_resources"]
) -> tuple[Int[Tensor, "3 b"], Int[Tensor, "b agents_resources"]]:
    """What happens (kind, how much of the resource and of the other one), and who has what then.

    Who lacks what it takes mines instead.
    """
    kind, agent, other, resource, much, more = wish
    own, wanted = agent * 2 + resource, agent * 2 + 1 - resource
    their, offered = other * 2 + resource, other * 2 + 1 - resource
    available = pick(held, torch.where(kind == SELL, offered, wanted))
    largest = torch.maximum(pick(held, their), pick(held, wanted))
    possible = (pick(held, own) > 0) & (available > 0) & (largest + MOST_TRADED <= MOST_HELD)
    kind = torch.where(possible, kind, MINE)
    mines, sells = kind == MINE, kind == SELL
    mined = (1 + scale(much, MOST_MINED)).minimum(MOST_HELD - pick(held, own))
    paid = 1 + scale(much, pick(held, own).clamp(1, MOST_TRADED))
    first = torch.where(mines, mined, paid)
    second = torch.where(mines, 0, 1 + scale(more, available.clamp(1, MOST_TRADED)))
    changes = {
        own: torch.where(mines, first, -first),
        wanted: torch.where(sells, second, -second),
        their: first * sells,
        offered: -second * sells,
    }
    after = held.scatter_add(1, torch.stack([*changes], 1), torch.stack([*changes.values()], 1))
    return torch.stack([kind, first, second]), after


def tell(
    kind: Int[Tensor, "*n"],
    agent: Int[Tensor, "*n"],
    first: Int[Tensor, "*n"],
    resource: Int[Tensor, "*n"],
    second: Int[Tensor, "*n"],
    other: Int[Tensor, "*n"],
) -> Int[Tensor, "*n step"]:
    """Steps as text, all of one width."""
    alone = kind == MINE
    return line(
        letters(agent, "A"),
        " ",
        one_of(VERBS, kind),
        " ",
        letters(first, "0"),
        one_of(RESOURCES, resource),
        " ",
        blank(letters(second, "0"), alone),
        blank(one_of(RESOURCES, 1 - resource), alone),
        blank(letters(other, "A"), kind != SELL),
        ";",
    )
