"""The rotation of B and C by an angle that accumulates along the sequence (Mamba-3)."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from echo_lm.ops.ssd.restart import running_sum
from echo_lm.ops.ssd.state import sum_dtype


def accumulate(
    increments: Float[Tensor, "b t h s"],
    begun: Float[Tensor, "b h s"],
    starts: Bool[Tensor, "b t"] | None = None,
) -> Float[Tensor, "b t h s"]:
    """The angle at every token, in [0, 2 pi), since the last start or after what has `begun`.

    Summed in fp64, it holds over millions of tokens.
    """
    wide = sum_dtype(increments.device)
    travelled = running_sum(increments.to(wide), starts)
    begun = begun.to(wide).unsqueeze(1)
    if starts is not None:
        begun = torch.where((starts.cumsum(1) == 0)[..., None, None], begun, 0)
    return (begun + travelled) % (2 * math.pi)


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
