"""What the front door hands to every form once it has checked and prepared its arguments."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

FORGET = -1e30
"""The logarithm of a decay that is 0 in every precision; unlike infinity, 0 times it is 0."""


@dataclass(frozen=True)
class Trapezoid:
    """The previous token's share: its weights, and what came before the first token."""

    beta: Float[Tensor, "b t h"]
    x: Float[Tensor, "b h r p"]
    B: Float[Tensor, "b g r n"]


@dataclass(frozen=True)
class Problem:
    """One call of the scan in fp32 or fp64, B and C rotated; x, B and C may still be narrower.

    Padding at the end of a row is zero everywhere and so leaves h as it is.
    """

    x: Float[Tensor, "b t h r p"]
    B: Float[Tensor, "b t g r n"]
    C: Float[Tensor, "b t g r n"]
    log_decay: Float[Tensor, "b t h"]
    gamma: Float[Tensor, "b t h"]
    trapezoid: Trapezoid | None
    h: Float[Tensor, "b h p n"]
    chunk_size: int
    starts: Bool[Tensor, "b t"] | None = None
    """Tokens that nothing before them reaches: there log_decay is `FORGET` and beta 0 already."""
    in_place: bool = False
    """`h` may be written over."""

    def widened(self) -> Problem:
        """With x, B and C in the dtype of the sums too."""
        x, B, C = (v.to(self.h.dtype) for v in (self.x, self.B, self.C))
        return replace(self, x=x, B=B, C=C)

    def as_plain_scan(self) -> tuple[Float[Tensor, "b t h"], Float[Tensor, "b h p n"]]:
        """The weight of a token that is past, and the state to begin with.

        A token of a trapezoid enters twice: with its own gamma, and with its successor's beta.
        """
        if self.trapezoid is None:
            return self.gamma, self.h
        beta, x, B = self.trapezoid.beta, self.trapezoid.x, self.trapezoid.B
        past = self.gamma + F.pad(beta[:, 1:], (0, 0, 0, 1))
        return past, self.h + beta[:, 0, :, None, None] * outer(x, B)


def outer(x: Float[Tensor, "b h r p"], B: Float[Tensor, "b g r n"]) -> Float[Tensor, "b h p n"]:
    """u = sum_r x^r (B^r)'"""
    B = to_heads(B, x.shape[1])
    return x.mT * B if x.shape[2] == 1 else x.mT @ B


def to_heads(v: Tensor, heads: int, dim: int = 1) -> Tensor:
    """Give every head along `dim` its group's own."""
    groups = v.shape[dim]
    return v if groups == heads else v.repeat_interleave(heads // groups, dim=dim)
