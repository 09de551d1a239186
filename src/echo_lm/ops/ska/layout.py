"""Where each token lies once every row is cut into chunks of equal size.

The parallel form works on a flat list of chunks, row after row. Rows may be of different lengths
(padded or packed) and may begin inside a chunk (`phase`), when an earlier call left one half read.
Slots without a token hold zeros, which add nothing to any sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
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
    read: list[int]
    """Tokens that an earlier call has read of the `period` each row is in."""
    period: int
    """The chunk of the problem: a multiple of `chunk_size`, which may be smaller for speed."""

    @classmethod
    def of(
        cls,
        lengths: list[int],
        read: list[int],
        chunk_size: int,
        padded_to: int,
        like: Tensor,
        period: int | None = None,
    ) -> ChunkLayout:
        phases = [n % chunk_size for n in read]
        chunks = [
            -(-(phase + length) // chunk_size) if length else 0
            for phase, length in zip(phases, lengths, strict=True)
        ]
        period = period or chunk_size
        return cls(chunk_size, chunks, phases, lengths, padded_to, like.device, read, period)

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
            if per_row.shape[1] == self.padded_to:  # the gradient of a slice would be a copy
                return per_row
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

    @property
    def begins(self) -> Bool[Tensor, " n"]:
        """Chunks with which this call begins a period."""
        begins = periods_begin(self.chunks, self.read, self.chunk_size, self.period)
        return torch.tensor(begins, dtype=torch.bool, device=self.device)

    def scan(
        self,
        initial: Float[Tensor, b * d],
        per_chunk: Float[Tensor, n * d],
        running: Running,
        left: Float[Tensor, "n h"] | None = None,
    ) -> tuple[Float[Tensor, n * d], Float[Tensor, b * d]]:
        """Accumulate along each row: what precedes each chunk, and what a row ends with.

        `left` is the share that is kept of it where a chunk begins.
        """
        rows = len(self.chunks)
        if len(set(self.chunks)) == 1:
            own, kept = (
                None if x is None else x.unflatten(0, (rows, -1)).transpose(0, 1)
                for x in (per_chunk, left)
            )
            assert own is not None
            before, last = running(initial, own, kept)
            return before.transpose(0, 1).flatten(0, 1), last
        kept_of = [None] * rows if left is None else left.split(self.chunks)
        each = zip(initial, per_chunk.split(self.chunks), kept_of, strict=True)
        befores, lasts = zip(*(running(*row) for row in each), strict=True)
        return torch.cat(befores), torch.stack(lasts)


def periods_begin(
    chunks: Sequence[int], read: Sequence[int], chunk_size: int, period: int
) -> list[bool]:
    """For every chunk, row after row; one that an earlier call has left half read begins none."""
    first_slots = (
        (before - before % chunk_size + place * chunk_size, before)
        for n, before in zip(chunks, read, strict=True)
        for place in range(n)
    )
    return [slot >= before and slot % period == 0 for slot, before in first_slots]


Running = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""From an initial value, entries along dimension 0, and the share kept before each of them: what
precedes each entry, and the total. No difference is taken, so that nothing of a later chunk can
reach an earlier one even by rounding."""


def running_sum(initial: Tensor, own: Tensor, left: Tensor | None) -> tuple[Tensor, Tensor]:
    if left is not None:
        return fading(torch.add, initial, own, left)
    sums = torch.cat([initial.unsqueeze(0), own]).cumsum(0)
    return sums[:-1], sums[-1]


def running_max(initial: Tensor, own: Tensor, left: Tensor | None) -> tuple[Tensor, Tensor]:
    if left is not None:
        return fading(torch.maximum, initial, own, left)
    largest = torch.cat([initial.unsqueeze(0), own]).cummax(0).values
    return largest[:-1], largest[-1]


def fading(
    join: Callable[[Tensor, Tensor], Tensor], initial: Tensor, own: Tensor, left: Tensor
) -> tuple[Tensor, Tensor]:
    """One chunk after the other: to divide by powers of what is left would overflow."""
    left = left.reshape(*left.shape, *[1] * (own.dim() - left.dim()))
    before, last = [], initial
    for entry, kept in zip(own, left, strict=True):
        before.append(kept * last)
        last = join(before[-1], entry)
    return torch.stack(before) if before else own, last
