"""What a task is: a source of batches that know where their answers are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from echo_lm.model.lm import IGNORED_LABEL

Split = Literal["train", "test"]


@dataclass(frozen=True)
class Batch:
    """Sequences of equal length and what is asked of them."""

    tokens: Int[Tensor, "b t"]
    labels: Int[Tensor, "b t"]
    """At place t the token to predict from those before t; -100 where nothing is asked."""
    facts: Bool[Tensor, "b t"]
    """Tokens that carry what is asked for later: the paper's action mask."""

    @property
    def answers(self) -> Bool[Tensor, "b t"]:
        """Where there is something to predict."""
        return self.labels != IGNORED_LABEL

    def to(self, device: torch.device | str) -> Batch:
        return Batch(self.tokens.to(device), self.labels.to(device), self.facts.to(device))


class Task(ABC):
    """A family of sequences. A batch is a function of its seed, step and split alone."""

    vocab_size: int

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens of a sequence."""

    @abstractmethod
    def batch(
        self,
        rows: int,
        *,
        seed: int,
        step: int = 0,
        split: Split = "train",
        device: torch.device | str = "cpu",
    ) -> Batch:
        """The batch number `step` of a seed."""

    @abstractmethod
    def spell(self, tokens: Int[Tensor, " t"]) -> str:
        """The tokens as a person would write them."""
