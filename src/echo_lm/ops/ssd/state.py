"""The memory of one Mamba-2 or Mamba-3 layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from echo_lm.ops.state import TensorState


@dataclass
class SSDState(TensorState):
    """Fixed-size memory of everything read so far.

    A trapezoidal step needs the last token's `x` and `B`, the rotation of B and C needs the
    `angle` reached. What a recurrence does not use is None.
    """

    h: Float[Tensor, "b h p n"]
    x: Float[Tensor, "b h r p"] | None = None
    B: Float[Tensor, "b g r n"] | None = None
    """As it entered h, that is rotated, and then with g = h."""
    angle: Float[Tensor, "b h s"] | None = None
    """In [0, 2 pi), fp64: a million fp32 roundings would turn it visibly."""

    @staticmethod
    def shapes(
        batch: int,
        heads: int,
        head_dim: int,
        state_dim: int,
        *,
        groups: int = 1,
        rank: int = 1,
        trapezoid: bool = False,
        angles: int = 0,
    ) -> dict[str, tuple[int, ...]]:
        """The tensors that a recurrence of these sizes remembers."""
        shapes: dict[str, tuple[int, ...]] = {"h": (batch, heads, head_dim, state_dim)}
        if trapezoid:
            shapes["x"] = (batch, heads, rank, head_dim)
            shapes["B"] = (batch, heads if angles else groups, rank, state_dim)
        if angles:
            shapes["angle"] = (batch, heads, angles)
        return shapes

    @classmethod
    def zeros(
        cls,
        shapes: dict[str, tuple[int, ...]],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> SSDState:
        """The state of someone who has read nothing."""
        state = {
            name: torch.zeros(shape, device=device, dtype=dtype) for name, shape in shapes.items()
        }
        if "angle" in state:
            state["angle"] = state["angle"].to(sum_dtype(state["angle"].device))
        return cls(**state)


def sum_dtype(device: torch.device) -> torch.dtype:
    """For long sums of scalars: fp64, except on Apple's GPUs, which have none."""
    return torch.float32 if device.type == "mps" else torch.float64
