"""Sequences packed end to end into one row, to and from padded rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int, Shaped
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """Where packed tokens lie once each sequence has a row of its own."""

    lengths: Int[Tensor, " n"]
    width: int
    """Of the longest."""
    places: Int[Tensor, " t"]
    """Among the tokens of all rows, padding included."""

    @classmethod
    def of(cls, lengths: Int[Tensor, " n"]) -> Packing:
        """Waits for the device, to know the longest."""
        width = max(1, int(lengths.max()))
        row = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
        starts = lengths.cumsum(0) - lengths
        column = torch.arange(len(row), device=lengths.device) - starts[row]
        return cls(lengths, width, row * width + column)

    def unpack(self, packed: Shaped[Tensor, "1 t *d"]) -> Shaped[Tensor, "n longest *d"]:
        """A row for each sequence, padded with zeros."""
        rows = packed.new_zeros(len(self.lengths) * self.width, *packed.shape[2:])
        return rows.index_copy(0, self.places, packed[0]).unflatten(0, (-1, self.width))

    def pack(self, rows: Shaped[Tensor, "n longest *d"]) -> Shaped[Tensor, "1 t *d"]:
        return rows.flatten(0, 1).index_select(0, self.places).unsqueeze(0)
