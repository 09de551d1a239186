"""Where each token lies once every row is cut into chunks of equal size.

The parallel form works on a flat list of chunks, row after row. Rows may be of different lengths
(padded or packed) and may begin inside a chunk (`phase`), when an earlier call left one half read.
Slots without a token hold zeros, which add nothing to any sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class ChunkLayout:
    """The chunks of `rows` rows; rows without tokens have none."""

    chunk_size: int
    chunks: list[int]
    """Chunks of each row."""
    phases: list[int]
    """Slots of each row's first chunk that an earlier call has filled."""
    lengths: list[int]
    """Tokens of each row."""
    padded_to: int
    """T: the width at which rows lie in the padded tensors of the caller."""
    device: torch.device

    @classmethod
    def of(
        cls, lengths: list[int], phases: list[int], chunk_size: int, padded_to: int, like: Tensor
    ) -> ChunkLayout:
        chunks = [
            -(-(phase + length) // chunk_size) if length else 0
            for phase, length in zip(phases, lengths, strict=True)
        ]
        return cls(chunk_size, chunks, phases, lengths, padded_to, like.device)

    @property
    def regular(self) -> bool:
        """All rows are full and in step, so that chunking is a pad and a view."""
        return len(set(self.phases)) == 1 and all(n == self.padded_to for n in self.lengths)

    def to_slots(self, tokens: Float[Tensor, "b t h d"]) -> Float[Tensor, "n s h d"]:
        """Lay tokens out in chunks."""
        shape = (-1, self.chunk_size, *tokens.shape[2:])
        if self.regular:
            before, filled = self.phases[0], self.phases[0] + self.padded_to
            after = self.chunks[0] * self.chunk_size - filled
            if before or after:
                tokens = F.pad(tokens, (0, 0, 0, 0, before, after))
            return tokens.reshape(shape)
        slots = tokens.new_zeros(sum(self.chunks) * self.chunk_size, *tokens.shape[2:])
        of_token, slot_of_token = self._places()
        return slots.index_copy(0, slot_of_token, tokens.flatten(0, 1)[of_token]).reshape(shape)

    def to_tokens(self, slots: Float[Tensor, "n s h d"]) -> Float[Tensor, "b t h d"]:
        """Take tokens back out; places without a token become zero."""
        rows, tail = len(self.lengths), slots.shape[2:]
        if self.regular:
            per_row = slots.reshape(rows, -1, *tail)
            return per_row.narrow(1, self.phases[0], self.padded_to)
        of_token, slot_of_token = self._places()
        tokens = slots.new_zeros(rows * self.padded_to, *tail)
        tokens = tokens.index_copy(0, of_token, slots.flatten(0, 1)[slot_of_token])
        return tokens.reshape(rows, self.padded_to, *tail)

    def _places(self) -> tuple[Int[Tensor, " tokens"], Int[Tensor, " tokens"]]:
        """Index of every real token among the padded tokens, and its slot."""
        lengths, phases = torch.tensor(self.lengths), torch.tensor(self.phases)
        row = torch.repeat_interleave(torch.arange(len(self.lengths)), lengths)
        within = torch.arange(len(row)) - (lengths.cumsum(0) - lengths)[row]
        first_slot = torch.tensor(self.first_chunks) * self.chunk_size + phases
        places = row * self.padded_to + within, first_slot[row] + within
        return places[0].to(self.device), places[1].to(self.device)

    @property
    def first_chunks(self) -> list[int]:
        """Where each row's chunks begin in the flat list."""
        return [end - n for end, n in zip(accumulate(self.chunks), self.chunks, strict=True)]

    def spread(self, per_row: Float[Tensor, b * d]) -> Float[Tensor, n * d]:
        """Repeat what belongs to a row for each of its chunks."""
        if self.regular:
            return per_row.repeat_interleave(self.chunks[0], dim=0)
        return per_row.repeat_interleave(torch.tensor(self.chunks, device=self.device), dim=0)

    def last(
        self, per_chunk: Float[Tensor, n * d], otherwise: Float[Tensor, b * d]
    ) -> Float[Tensor, b * d]:
        """What belongs to each row's last chunk; rows without tokens take `otherwise`."""
        if self.regular:
            return per_chunk.unflatten(0, (len(self.chunks), -1))[:, -1]
        rows = [row for row, n in enumerate(self.chunks) if n]
        chunks = [self.first_chunks[row] + self.chunks[row] - 1 for row in rows]
        return otherwise.index_copy(0, self._index(rows), per_chunk[self._index(chunks)])

    def replace_first(
        self, per_chunk: Float[Tensor, n * d], per_row: Float[Tensor, b * d]
    ) -> Float[Tensor, n * d]:
        """Give the first chunk of each row that begins half read what belongs to the row."""
        rows = [row for row, n in enumerate(self.chunks) if n and self.phases[row]]
        if not rows:
            return per_chunk
        chunks = [self.first_chunks[row] for row in rows]
        return per_chunk.index_copy(0, self._index(chunks), per_row[self._index(rows)])

    def _index(self, places: list[int]) -> Int[Tensor, " n"]:
        return torch.tensor(places, dtype=torch.int64, device=self.device)

    def scan(
        self,
        initial: Float[Tensor, b * d],
        per_chunk: Float[Tensor, n * d],
        cumulate: Callable[[Tensor], Tensor],
    ) -> tuple[Float[Tensor, n * d], Float[Tensor, b * d]]:
        """Accumulate along each row: what precedes each chunk, and what a row ends with.

        `cumulate` runs along dimension 0. No difference is taken, so that nothing of a later chunk
        can reach an earlier one even by rounding.
        """
        if len(set(self.chunks)) == 1:
            rows = per_chunk.unflatten(0, (len(self.chunks), -1)).transpose(0, 1)
            running = cumulate(torch.cat([initial.unsqueeze(0), rows]))
            return running[:-1].transpose(0, 1).flatten(0, 1), running[-1]
        before, last = [], []
        for start, row in zip(initial, per_chunk.split(self.chunks), strict=True):
            running = cumulate(torch.cat([start.unsqueeze(0), row]))
            before.append(running[:-1])
            last.append(running[-1])
        return torch.cat(before), torch.stack(last)


def running_sum(x: Tensor) -> Tensor:
    return x.cumsum(0)


def running_max(x: Tensor) -> Tensor:
    return x.cummax(0).values
