"""The symbols of a task, and how a person reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True)
class Symbols:
    """Groups of symbols, numbered one group after the other.

    >>> Symbols((("k", 32), ("v", 32))).spell(torch.tensor([3, 40]))
    'k3 v8'
    """

    groups: tuple[tuple[str, int], ...]
    """Name and size; a group of one has no numbers."""

    @property
    def size(self) -> int:
        return sum(count for _, count in self.groups)

    @property
    def separator(self) -> str:
        """What stands between two symbols."""
        return " "

    def name(self, token: int) -> str:
        for group, count in self.groups:
            if token < count:
                return group if count == 1 else f"{group}{token}"
            token -= count
        raise ValueError(f"There are {self.size} symbols; {token + self.size} is none of them.")

    def spell(self, tokens: Int[Tensor, " t"]) -> str:
        return self.separator.join(self.name(int(token)) for token in tokens)


@dataclass(frozen=True)
class Characters(Symbols):
    """ASCII: the paper's 128 symbols of the appendix tasks, as we read them."""

    groups: tuple[tuple[str, int], ...] = (("", 128),)

    @property
    def separator(self) -> str:
        return ""

    def name(self, token: int) -> str:
        return chr(token)

    def tokens(self, text: str, device: torch.device | str = "cpu") -> Int[Tensor, " t"]:
        return torch.tensor(list(text.encode("ascii")), device=device)
