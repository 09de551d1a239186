"""Padded batches: every row's real tokens move to its start, and the answers move back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int, Shaped
from torch import Tensor


@dataclass(frozen=True)
class Alignment:
    """Where each row's real tokens are, wherever its padding lies.

    Layers then need to know padding on the right alone, where no causal layer looks.
    """

    order: Int[Tensor, "b t"]
    lengths: Int[Tensor, " b"]

    @classmethod
    def of(cls, attention_mask: Int[Tensor, "b t"]) -> Alignment | None:
        """None if there is no padding."""
        real = attention_mask.bool()
        if bool(real.all()):
            return None
        return cls(torch.argsort(~real, dim=1, stable=True), real.sum(1))

    def align(self, x: Shaped[Tensor, "b t *d"]) -> Shaped[Tensor, "b t *d"]:
        return _pick(x, self.order)

    def restore(self, x: Shaped[Tensor, "b t *d"]) -> Shaped[Tensor, "b t *d"]:
        return _pick(x, torch.argsort(self.order, dim=1))

    @property
    def padding(self) -> Shaped[Tensor, "b t"]:
        """True where there is no token, after alignment."""
        return torch.arange(self.order.shape[1], device=self.order.device) >= self.lengths[:, None]


def _pick(x: Shaped[Tensor, "b t *d"], places: Int[Tensor, "b t"]) -> Shaped[Tensor, "b t *d"]:
    return x.gather(1, places.view(*places.shape, *[1] * (x.dim() - 2)).expand_as(x))
