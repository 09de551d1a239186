"""What the front door hands to every form once it has checked and prepared its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from echo_lm.ops.ska.state import SKAState

Causal = Literal["exact", "chunk", False]
Relative = Literal[False, True, "trace"]
"""What a ridge is multiplied by: nothing, the largest key energy, or the trace of G over r."""

SMALLEST_KEY_ENERGY = 1e-12
"""A relative ridge stays positive when all keys are zero: the paper clamps the norm at 1e-6."""


@dataclass(frozen=True)
class Problem:
    """One call of SKA in fp32 or fp64. Masked tokens have zero keys and values."""

    q: Float[Tensor, "b t h r"]
    k: Float[Tensor, "b t h r"]
    v: Float[Tensor, "b t h p"]
    coef: Float[Tensor, "h order"]
    ridge: Float[Tensor, " h"]
    relative_ridge: Relative
    decay: Float[Tensor, " h"] | None
    """What is left of the sums where a new chunk begins; None if nothing fades."""
    causal: Causal
    chunk_size: int
    lengths: Int[Tensor, " b"] | None
    """Real tokens of each right-padded row; None when all are."""
    state: SKAState
    fresh: bool
    """No state was given: every row starts from nothing."""
    in_place: bool = False
    """The tensors of `state` may be written over."""

    def ridge_at(
        self, gram: Float[Tensor, "*batch h r r"], key_energy: Float[Tensor, "*batch h"]
    ) -> Float[Tensor, "*batch h"]:
        """lam, given the Gram matrix and the largest key energy seen so far."""
        return self.ridge_of(relative_scale(self.relative_ridge, gram, key_energy))

    def ridge_of(self, scale: Float[Tensor, "*batch h"]) -> Float[Tensor, "*batch h"]:
        """lam, given what a relative one is multiplied by."""
        if self.relative_ridge:
            return self.ridge * scale.clamp_min(SMALLEST_KEY_ENERGY)
        return self.ridge.expand_as(scale)

    @property
    def chunked(self) -> bool:
        """Answers depend on where chunks begin."""
        return self.causal == "chunk" or self.decay is not None

    def begins_chunk(self, state: SKAState, active: Bool[Tensor, " b"]) -> Bool[Tensor, " b"]:
        """Rows whose next token is the first of a chunk."""
        return active & (state.count % self.chunk_size == 0)

    def left_of_sums(self, begins: Bool[Tensor, " n"]) -> Float[Tensor, "n h"] | None:
        """The share of its sums that each row (or chunk) keeps before it reads on."""
        if self.decay is None:
            return None
        return torch.where(begins[:, None], self.decay, torch.ones_like(self.decay))

    def active(self, t: int) -> Bool[Tensor, " b"]:
        """Rows that have a token at step t."""
        if self.lengths is None:
            return torch.ones(self.k.shape[0], dtype=torch.bool, device=self.k.device)
        return t < self.lengths


def relative_scale(
    relative: Relative, gram: Float[Tensor, "*batch h r r"], key_energy: Float[Tensor, "*batch h"]
) -> Float[Tensor, "*batch h"]:
    """What a relative ridge is multiplied by."""
    return gram.diagonal(dim1=-2, dim2=-1).mean(-1) if relative == "trace" else key_energy


def add_ridge(
    gram: Float[Tensor, "*batch r r"], ridge: Float[Tensor, "*batch"]
) -> Float[Tensor, "*batch r r"]:
    """G + lam I"""
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return gram + ridge[..., None, None] * identity
