"""Causal softmax attention with rotary positions: the baseline whose memory grows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from echo_lm.layers.documents import Documents
from echo_lm.layers.rotary import rotary_tables, rotate
from echo_lm.ops.checks import require_finite
from echo_lm.ops.state import TensorState

# A continued cache attends in slices of queries whose mask has at most this many entries.
MASK_ENTRIES = 2**26


@dataclass
class AttentionState(TensorState):
    """The cache of keys (already rotated) and values: one slot for each token ever given.

    Rows share the slots, in order of time; `valid` marks those that hold a real token of the row,
    and is None as long as all of them do. `count` is the row's number of tokens, its next position.
    """

    keys: Float[Tensor, "b l h p"]
    values: Float[Tensor, "b l h p"]
    count: Int[Tensor, " b"]
    valid: Bool[Tensor, "b l"] | None = None

    def append(
        self,
        k: Float[Tensor, "b t h p"],
        v: Float[Tensor, "b t h p"],
        lengths: Int[Tensor, " b"] | None,
    ) -> AttentionState:
        """The cache with more tokens, of which the first `lengths[b]` of row b are real."""
        batch, new = k.shape[:2]
        real = None
        if lengths is not None:
            real = torch.arange(new, device=k.device) < lengths.unsqueeze(-1)
            # Zeros, not only a mark: a weight of 0 times a NaN in the padding would still be NaN.
            k, v = (t.masked_fill(~real[..., None, None], 0) for t in (k, v))
        valid = None
        if real is not None or self.valid is not None:
            valid = torch.cat(
                (self._marks(), _all(batch, new, k.device) if real is None else real), 1
            )
        return AttentionState(
            keys=_extend(self.keys, k),
            values=_extend(self.values, v),
            count=self.count + (new if lengths is None else lengths),
            valid=valid,
        )

    def without_others(self, documents: Documents) -> AttentionState:
        """With marks for each row's last document alone; nobody asks for the rest any more."""
        before = self.keys.shape[1] - documents.number.shape[1]
        number = F.pad(documents.number, (before, 0))
        of_last = number == documents.at_end(documents.number).unsqueeze(-1)
        return replace(self, valid=self._marks() & of_last)

    def reset(self, rows: Bool[Tensor, " b"] | None = None) -> Self:
        """Forget everything and free the slots, or forget only the rows that are marked."""
        if rows is not None:
            return TensorState.reset(replace(self, valid=self._marks()), rows)
        batch, _, heads, width = self.keys.shape
        return replace(
            self,
            keys=self.keys.new_empty(batch, 0, heads, width),
            values=self.values.new_empty(batch, 0, heads, width),
            count=torch.zeros_like(self.count),
            valid=None,
        )

    def _marks(self) -> Bool[Tensor, "b l"]:
        batch, slots = self.keys.shape[:2]
        return _all(batch, slots, self.keys.device) if self.valid is None else self.valid


class Attention(nn.Module):
    """Multi-head attention of every token to itself and the tokens before it."""

    def __init__(self, dim: int, *, heads: int, rope_theta: float = 10_000.0) -> None:
        super().__init__()
        if heads < 1 or dim < 1 or dim % (2 * heads):
            raise ValueError(
                f"dim is {dim} and heads is {heads}, but dim must be a multiple of 2 * heads: "
                "rotary positions turn pairs inside a head."
            )
        self.dim = dim
        self.heads = heads
        self.rope_theta = rope_theta
        # Apart, so that cached values do not keep a fused projection alive.
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.out_proj = nn.Linear(dim, dim, bias=False)

    def init_state(self, batch: int) -> AttentionState:
        """The empty cache."""
        weight = self.k_proj.weight
        empty = weight.new_empty(batch, 0, self.heads, self.dim // self.heads)
        count = torch.zeros(batch, dtype=torch.int64, device=weight.device)
        return AttentionState(keys=empty, values=empty, count=count)

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        state: AttentionState | None = None,
        *,
        lengths: Int[Tensor, " b"] | None = None,
        documents: Documents | None = None,
        return_state: bool = True,
    ) -> tuple[Float[Tensor, "b t d"], AttentionState | None]:
        self._check(x, state, lengths)
        past = self.init_state(x.shape[0]) if state is None else state
        positions = past.count.unsqueeze(-1) + torch.arange(x.shape[1], device=x.device)
        if documents is not None:
            positions = documents.positions(past.count)
        q, k, v = self._project(x, positions)
        now = past.append(k, v, lengths)
        mixed = _attend(q, now.keys, now.values, past.valid, documents)
        y: Tensor = self.out_proj(mixed.flatten(-2))
        if documents is not None:
            now = replace(now.without_others(documents), count=documents.count(past.count))
        return y, now if return_state else None

    def _project(
        self, x: Float[Tensor, "b t d"], positions: Int[Tensor, "b t"]
    ) -> tuple[Float[Tensor, "b t h p"], Float[Tensor, "b t h p"], Float[Tensor, "b t h p"]]:
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        dtype = torch.promote_types(q.dtype, torch.float32)
        cos, sin = rotary_tables(positions, q.shape[-1], theta=self.rope_theta, dtype=dtype)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def _check(
        self, x: Tensor, state: AttentionState | None, lengths: Int[Tensor, " b"] | None
    ) -> None:
        if x.dim() != 3 or x.shape[-1] != self.dim or x.shape[1] == 0:
            raise ValueError(
                f"x has shape {tuple(x.shape)}, but attention takes [batch, time, {self.dim}] "
                "with at least one token."
            )
        if lengths is not None and lengths.shape != x.shape[:1]:
            raise ValueError(
                f"lengths has shape {tuple(lengths.shape)}, but it must be [{x.shape[0]}]: "
                "one length for each row of x."
            )
        if state is not None:
            self._check_state(x.shape[0], state)
        require_finite(x=x)

    def _check_state(self, batch: int, state: AttentionState) -> None:
        if not isinstance(state, AttentionState):
            raise ValueError(
                f"state is a {type(state).__name__}, but attention continues an AttentionState; "
                "start from init_state."
            )
        expected = (batch, self.heads, self.dim // self.heads)
        rows, _, heads, width = state.keys.shape
        if (rows, heads, width) != expected:
            raise ValueError(
                f"state holds {rows} rows of {heads} heads of width {width}, but this call needs "
                f"{expected[0]} rows of {expected[1]} heads of width {expected[2]}."
            )


def _attend(
    q: Float[Tensor, "b t h p"],
    keys: Float[Tensor, "b l h p"],
    values: Float[Tensor, "b l h p"],
    valid_past: Bool[Tensor, "b past"] | None,
    documents: Documents | None,
) -> Float[Tensor, "b t h p"]:
    """Let the last t slots attend to all slots of their document up to their own."""
    new, slots = q.shape[1], keys.shape[1]
    number = None if documents is None else F.pad(documents.number, (slots - new, 0))
    q, keys, values = (t.transpose(1, 2) for t in (q, keys, values))
    if number is None and new == slots:
        mixed = F.scaled_dot_product_attention(q, keys, values, is_causal=True)
    elif number is None and new == 1 and valid_past is None:
        mixed = F.scaled_dot_product_attention(q, keys, values)
    else:
        # Not is_causal: with a past it lets query i see the first i slots, not those before it.
        size = max(1, MASK_ENTRIES // (slots * q.shape[0]))
        own = torch.arange(slots - new, slots, device=q.device)
        parts = zip(torch.split(q, size, 2), torch.split(own, size), strict=True)
        mixed = torch.cat(
            [
                F.scaled_dot_product_attention(
                    part, keys, values, attn_mask=_visible(part_own, slots, valid_past, number)
                )
                for part, part_own in parts
            ],
            2,
        )
    return mixed.transpose(1, 2)


def _visible(
    own: Int[Tensor, " t"],
    slots: int,
    valid_past: Bool[Tensor, "b past"] | None,
    number: Int[Tensor, "b l"] | None,
) -> Bool[Tensor, "#b 1 t l"]:
    """Which slots the queries of the slots `own` may see.

    Padding of this call needs no mark: it is on the right, where no real token looks. A padded
    query still sees itself, so that no softmax is over nothing.
    """
    seen = (torch.arange(slots, device=own.device) <= own.unsqueeze(-1))[None, None]
    if number is not None:
        seen = seen & (number[:, None, own, None] == number[:, None, None])
    if valid_past is None:
        return seen
    known = F.pad(valid_past, (0, slots - valid_past.shape[1]), value=True)
    return seen & known[:, None, None]


def _extend(past: Float[Tensor, "b l h p"], new: Float[Tensor, "b t h p"]) -> Tensor:
    # In the new dtype: an fp32 cache continued under bf16 autocast must not mix dtypes.
    return torch.cat((past.to(new.dtype), new), 1) if past.shape[1] else new


def _all(batch: int, slots: int, device: torch.device) -> Bool[Tensor, "b l"]:
    return torch.ones(batch, slots, dtype=torch.bool, device=device)
