"""A small recall task: keys with values, then the keys again, whose values are asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from echo_lm.tasks.base import Batch, Split, Task


@dataclass(frozen=True)
class Pairs(Task):
    """`pairs` of 8 keys and 8 values; the answers stand in the sequence behind their queries."""

    pairs: int = 2
    vocab_size: int = 16

    @property
    def length(self) -> int:
        return 4 * self.pairs

    def batch(
        self,
        rows: int,
        *,
        seed: int,
        step: int = 0,
        split: Split = "train",
        device: torch.device | str = "cpu",
    ) -> Batch:
        source = torch.Generator().manual_seed(2 * (1_000_003 * seed + step) + (split == "test"))
        keys = torch.rand(rows, 8, generator=source).argsort(1)[:, : self.pairs]
        values = 8 + torch.randint(8, (rows, self.pairs), generator=source)
        order = torch.rand(rows, self.pairs, generator=source).argsort(1)
        told = torch.stack([keys, values], 2).flatten(1)
        asked = torch.stack([keys.gather(1, order), values.gather(1, order)], 2).flatten(1)
        tokens = torch.cat([told, asked], 1)
        labels = torch.full_like(tokens, -100)
        answers = slice(2 * self.pairs + 1, None, 2)
        labels[:, answers] = tokens[:, answers]
        facts = (torch.arange(self.length) < 2 * self.pairs).expand_as(tokens)
        return Batch(tokens, labels, facts).to(device)

    def spell(self, tokens: Tensor) -> str:
        return " ".join(f"k{t}" if t < 8 else f"v{t - 8}" for t in tokens.tolist())
