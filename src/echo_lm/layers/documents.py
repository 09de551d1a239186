"""Rows that hold several documents, none of which knows of another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from echo_lm.ops.ska.packing import Packing
from echo_lm.ops.state import TensorState

State = TypeVar("State", bound=TensorState)


@dataclass(frozen=True)
class Documents:
    """Where documents begin. What stands before a start is as if it had never been read.

    Made once for a call of the model and shared by its layers.
    """

    starts: Bool[Tensor, "b t"]
    """The first token of each; tokens before a row's first one go on with the row's state."""
    number: Int[Tensor, "b t"]
    """Of each token's document in its row; 0 is the one that the state has begun."""
    place: Int[Tensor, "b t"]
    """How many tokens of its document this call has read before each one."""
    lengths: Int[Tensor, " b"] | None = None
    """Real tokens of each right-padded row; None when all are."""

    @classmethod
    def of(cls, starts: Bool[Tensor, "b t"], lengths: Int[Tensor, " b"] | None = None) -> Documents:
        """Padding begins no document."""
        here = torch.arange(starts.shape[1], device=starts.device)
        if lengths is not None:
            starts = starts & (here < lengths[:, None])
        first = torch.where(starts, here, 0).cummax(1).values
        return cls(starts, starts.cumsum(1), here - first, lengths)

    def positions(self, count: Int[Tensor, " b"]) -> Int[Tensor, "b t"]:
        """Each token's place in its document, after a state that has read `count` tokens."""
        return self.place + torch.where(self.number == 0, count[:, None], 0)

    def reach(self, back: int) -> Bool[Tensor, "b t"]:
        """Tokens whose own document is what they find so many places before, state included."""
        return (self.number == 0) | (self.place >= back)

    def at_end(self, x: Shaped[Tensor, "b t *d"]) -> Shaped[Tensor, b * d]:
        """What belongs to each row's last real token."""
        if self.lengths is None:
            return x[:, -1]
        rows = torch.arange(len(x), device=x.device)
        return x[rows, (self.lengths - 1).clamp_min(0)]

    def reach_of_end(self, width: int) -> Bool[Tensor, "b w"]:
        """Of the last `width` tokens of each row, state included, those of its last document."""
        back = torch.arange(width - 1, -1, -1, device=self.starts.device)
        return self.goes_on[:, None] | (self.at_end(self.place)[:, None] >= back)

    @property
    def goes_on(self) -> Bool[Tensor, " b"]:
        """Rows that end in the document they began with."""
        return self.at_end(self.number) == 0

    def count(self, before: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
        """Tokens read of each row's last document, after a state that had read so many."""
        new = self.starts.shape[1] if self.lengths is None else self.lengths
        return torch.where(self.goes_on, before + new, self.at_end(self.place) + 1)

    @cached_property
    def apart(self) -> Apart:
        """Every document in a row of its own; asks the device how many there are."""
        begins = self.starts.clone()
        begins[:, 0] = True
        real = torch.ones_like(begins)
        if self.lengths is not None:
            real = torch.arange(begins.shape[1], device=begins.device) < self.lengths[:, None]
        tokens = real.flatten().nonzero().squeeze(1)
        own = begins.flatten().cumsum(0) - 1
        first = begins.flatten().nonzero().squeeze(1)
        return Apart(
            packing=Packing.of(torch.bincount(own[tokens], minlength=len(first))),
            tokens=tokens,
            row=first // begins.shape[1],
            new=self.starts.flatten()[first],
            last=own.view_as(begins)[:, -1],
            shape=begins.shape,
        )


@dataclass(frozen=True)
class Apart:
    """Documents in padded rows of their own, for what knows rows alone, and the way back."""

    packing: Packing
    tokens: Int[Tensor, " tokens"]
    """The real ones among those of the rows they share."""
    row: Int[Tensor, " n"]
    """That each document is in."""
    new: Bool[Tensor, " n"]
    """Documents that begin in this call."""
    last: Int[Tensor, " b"]
    """Each row's last document."""
    shape: torch.Size

    @property
    def lengths(self) -> Int[Tensor, " n"]:
        return self.packing.lengths

    def take(self, x: Shaped[Tensor, "b t *d"]) -> Shaped[Tensor, "n longest *d"]:
        return self.packing.unpack(x.flatten(0, 1).index_select(0, self.tokens).unsqueeze(0))

    def put_back(self, x: Shaped[Tensor, "n longest *d"]) -> Shaped[Tensor, "b t *d"]:
        """With zeros for padding."""
        shared = x.new_zeros(self.shape.numel(), *x.shape[2:])
        return shared.index_copy(0, self.tokens, self.packing.pack(x)[0]).unflatten(0, self.shape)

    def enter(self, state: State) -> State:
        """Each document's own: that of its row, or nothing yet."""
        return state.reorder(self.row).reset(self.new)

    def leave(self, state: State) -> State:
        """What each row's last document leaves."""
        return state.reorder(self.last)
