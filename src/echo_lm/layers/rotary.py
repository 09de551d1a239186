"""Rotary position embedding: pair (2i, 2i+1) turns by `position * theta^(-2i / width)`."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def rotary_tables(
    positions: Int[Tensor, "b t"],
    width: int,
    *,
    theta: float = 10_000.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Float[Tensor, "b t half"], Float[Tensor, "b t half"]]:
    """Cosine and sine of every angle, as exact at position 1,000,000 as at the start.

    An fp32 angle of a million radians is off by 0.03. In fp64 it is off by 1e-10, and the fp64
    cosine reduces it modulo 2 pi, so only the result is rounded to `dtype`.
    """
    if width < 2 or width % 2:
        raise ValueError(f"width is {width}, but rotary positions turn pairs: it must be even.")
    if not theta > 0:
        raise ValueError(f"theta is {theta}, but the rotary base must be positive, such as 10000.")
    even = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device)
    angles = positions.to(torch.float64).unsqueeze(-1) * theta ** (-even / width)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(
    x: Float[Tensor, "b t h n"], cos: Float[Tensor, "b t half"], sin: Float[Tensor, "b t half"]
) -> Float[Tensor, "b t h n"]:
    """Turn each pair of every head: `x e^{i angle}` in complex notation."""
    even, odd = torch.unflatten(x, -1, (-1, 2)).unbind(-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1)
    return turned.flatten(-2).to(x.dtype)
