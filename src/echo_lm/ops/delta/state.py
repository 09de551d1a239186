"""The memory of one DeltaNet layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from echo_lm.ops.state import TensorState


@dataclass
class DeltaState(TensorState):
    """Fixed-size memory of everything read so far: what each key is answered with."""

    S: Float[Tensor, "b h p r"]

    @classmethod
    def zeros(
        cls,
        batch: int,
        heads: int,
        value_dim: int,
        key_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> DeltaState:
        """The state of someone who has read nothing."""
        return cls(torch.zeros(batch, heads, value_dim, key_dim, device=device, dtype=dtype))
