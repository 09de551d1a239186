"""The rotation of B and C by an angle that accumulates along the sequence (Mamba-3)."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from echo_lm.ops.ssd.state import sum_dtype


def accumulate(
    increments: Float[Tensor, "b t h s"], start: Float[Tensor, "b h s"]
) -> Float[Tensor, "b t h s"]:
    """The angle at every token, in [0, 2 pi). Summed in fp64, it holds over millions of tokens."""
    wide = sum_dtype(increments.device)
    travelled = increments.to(wide).cumsum(dim=1)
    return (start.to(wide).unsqueeze(1) + travelled) % (2 * math.pi)


def rotate(
    v: Float[Tensor, "b t h r n"], angle: Float[Tensor, "b t h s"]
) -> Float[Tensor, "b t h r n"]:
    """Turn each of the first S pairs of coordinates (2i, 2i+1) by its angle; leave the rest."""
    angle = angle.to(v.dtype).unsqueeze(-2)
    cos, sin = angle.cos(), angle.sin()
    pairs = angle.shape[-1]
    even, odd = v[..., : 2 * pairs].unflatten(-1, (pairs, 2)).unbind(-1)
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
    return torch.cat([turned, v[..., 2 * pairs :]], dim=-1)
