"""Sequences packed end to end into one row, to and from padded rows."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def unpack(
    packed: Float[Tensor, "1 t h d"], lengths: Int[Tensor, " n"]
) -> Float[Tensor, "n longest h d"]:
    """A row for each sequence, padded with zeros to the longest."""
    rows = packed.new_zeros(len(lengths), int(lengths.max()), *packed.shape[2:])
    return rows.index_put(_places(lengths), packed[0])


def pack(
    rows: Float[Tensor, "n longest h d"], lengths: Int[Tensor, " n"]
) -> Float[Tensor, "1 t h d"]:
    return rows[_places(lengths)].unsqueeze(0)


def _places(lengths: Int[Tensor, " n"]) -> tuple[Int[Tensor, " t"], Int[Tensor, " t"]]:
    """Row and column of every packed token."""
    row = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    starts = lengths.cumsum(0) - lengths
    column = torch.arange(len(row), device=lengths.device) - starts[row]
    return row, column
