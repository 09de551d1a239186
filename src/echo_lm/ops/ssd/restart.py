"""Running sums that begin anew where a document does."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

BLOCK = 64
"""Tokens summed by one product with a mask; the sums of more are chained."""


def running_sum(
    v: Float[Tensor, "b t *d"], starts: Bool[Tensor, "b t"] | None
) -> Float[Tensor, "b t *d"]:
    """The sum along time of all since the last start.

    What is before a start is multiplied by 0 rather than subtracted again, so that not even its
    rounding comes through.
    """
    tokens = v.shape[1]
    if starts is None:
        return v.cumsum(dim=1)
    if tokens <= BLOCK:
        number = starts.cumsum(1)
        summed = (number.unsqueeze(2) == number.unsqueeze(1)).tril()
        return torch.einsum("bij,bj...->bi...", summed.to(v.dtype), v)
    blocks, begins = (to_chunks(x, BLOCK) for x in (v, starts))
    sums = running_sum(blocks.flatten(0, 1), begins.flatten(0, 1)).view_as(blocks)
    reached = running_sum(sums[:, :, -1], begins.any(2))
    before = torch.cat([torch.zeros_like(reached[:, :1]), reached[:, :-1]], dim=1)
    goes_on = (begins.cumsum(2) == 0).view(*begins.shape, *[1] * (v.dim() - 2))
    return (sums + torch.where(goes_on, before.unsqueeze(2), 0)).flatten(1, 2)[:, :tokens]


def to_chunks(v: Shaped[Tensor, "b t ..."], size: int) -> Shaped[Tensor, "b c i ..."]:
    """Cut time into chunks, the last filled up with zeros."""
    missing = -v.shape[1] % size
    if missing:
        v = F.pad(v, (0, 0) * (v.dim() - 2) + (0, missing))
    return v.unflatten(1, (-1, size))
