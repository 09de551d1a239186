"""Spectral Koopman Attention as a layer: projections around `echo_lm.ops.ska`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from echo_lm.layers.conv import ConvState, ShortConv, remember
from echo_lm.layers.documents import Documents
from echo_lm.layers.lift import ClebschGordanLift
from echo_lm.layers.mamba2 import check_call
from echo_lm.layers.parameters import no_weight_decay
from echo_lm.layers.rotary import rotary_tables, rotate
from echo_lm.ops import SKAState, ska
from echo_lm.ops.ska.problem import Causal, Relative
from echo_lm.ops.state import TensorState

Filter = Literal["bank", "power"]

GAMMA_START = 1.05
"""Inside the paper's [1, 1.5]; at either end the gradient of a bounded parameter vanishes."""
LEAST_KEPT = 1e-6
"""Rounding must not take a decay to 0, which `ska` refuses."""
NORM_EPS = 1e-5


@dataclass
class WindowedSKAState(TensorState):
    """What a layer remembers that also needs its last inputs; a window not needed is empty."""

    conv: ConvState
    """Of the convolution."""
    pending: ConvState
    """The last key and value, where these enter the sums with the token after them."""
    ska: SKAState


LayerState = SKAState | WindowedSKAState


def memory_of(state: LayerState) -> SKAState:
    """The sums of a layer, whatever stands before them."""
    return state.ska if isinstance(state, WindowedSKAState) else state


class SpectralKoopmanAttention(nn.Module):
    """Recall from a memory of fixed size, in the place of attention.

    Args:
        dim: Width of the residual stream.
        heads: Number of heads; values are `dim / heads` wide.
        rank: Width r of keys and queries, and so the size of the memory.
        filter: "bank" trains the weight of every order up to `order` (head h starts at order
            h mod (order + 1)); "power" is the paper's, the one order `order` scaled by gamma.
        order: The highest power K of the whitened operator.
        causal: "exact", "chunk" or False; see `ska`.
        chunk_size: Chunk of "chunk", and of forgetting.
        ridge: The ridge at the start. 0.03 * rank if None; if relative, 1e-3 (0.01 of the trace).
        relative_ridge: Fix the ridge as a share of the largest key energy, as the paper does
            (True), or of tr(G) / r ("trace"), instead of learning it for each head.
        eta: The output's scale at the start.
        lift: Width N of rotary keys that pass through the Clebsch-Gordan lift; 0 for none.
        half_life: Tokens after which half of the sums is left at the start, one number or several
            that heads take in turn; what is kept from one chunk to the next is learned for each
            head. None: nothing fades.
        conv_kernel: Taps of a causal depth-wise convolution over queries, keys and values; 0 for
            none. What a mask leaves out of the memory still passes through it.
        conv_silu: Whether the convolution ends in SiLU.
        key_norm: Scale every key and query to length sqrt(rank): none is louder than another.
        sees_itself: Whether a token's own key and value are in the memory that it asks. If not,
            they enter it with the next token, as with chunks of one.
        tied_start: Start queries from the weights of the keys, so that a token finds its like
            before anything is learned.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        rank: int,
        filter: Filter = "bank",
        order: int = 2,
        causal: Causal = "exact",
        chunk_size: int = 64,
        ridge: float | None = None,
        relative_ridge: Relative = False,
        eta: float = 1.5,
        lift: int = 0,
        half_life: float | Sequence[float] | None = None,
        conv_kernel: int = 0,
        conv_silu: bool = True,
        key_norm: bool = False,
        sees_itself: bool = True,
        tied_start: bool = False,
    ) -> None:
        super().__init__()
        _check(dim, heads, rank, filter, order, ridge, lift)
        _check_order_of_reading(causal, half_life, sees_itself)
        self.dim = dim
        self.heads, self.rank, self.value_dim = heads, rank, dim // heads
        self.causal, self.chunk_size = causal, chunk_size
        self.filter, self.order, self.relative_ridge = filter, order, relative_ridge

        key_dim = lift or rank
        self.q_proj = nn.Linear(dim, heads * key_dim, bias=False)
        self.k_proj = nn.Linear(dim, heads * key_dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.out_proj = nn.Linear(dim, dim, bias=False)
        width = 2 * heads * key_dim + dim
        self.conv = ShortConv(width, conv_kernel, silu=conv_silu) if conv_kernel else None
        self.lift = ClebschGordanLift(lift, rank=rank, heads=heads) if lift else None
        self.key_norm, self.sees_itself = key_norm, sees_itself
        self.tied_start = tied_start
        self.eta = _spectral(torch.tensor([float(eta)]))
        if filter == "bank":
            self.coef = _spectral(_one_hot_orders(heads, order))
        else:
            self.raw_gamma = _spectral(torch.tensor([_logit((GAMMA_START - 1) / 0.5)]))
        if ridge is None:
            ridge = {False: 0.03 * rank, True: 1e-3, "trace": 1e-2}[relative_ridge]
        self.fixed_ridge = ridge if relative_ridge else None
        if not relative_ridge:
            self.raw_ridge = _spectral(torch.full((heads,), _inverse_softplus(ridge)))
        self.raw_decay: nn.Parameter | None = None
        if half_life is not None:
            lives = half_life if isinstance(half_life, Sequence) else [half_life]
            rates = [min(math.log(2) * chunk_size / life, -math.log(LEAST_KEPT)) for life in lives]
            raw = [_logit_of_exp(-rates[head % len(rates)]) for head in range(heads)]
            self.raw_decay = _spectral(torch.tensor(raw))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Orthonormal keys and queries for each head, Xavier values, a silent output."""
        for proj in (self.q_proj, self.k_proj):
            for head in proj.weight.data.chunk(self.heads):
                nn.init.orthogonal_(head)
        if self.tied_start:
            self.q_proj.weight.data.copy_(self.k_proj.weight.data)
        if self.tied_start and self.conv is not None:
            for taps in self.conv.parameters():
                queries, keys, _ = taps.data.split([len(self.q_proj.weight)] * 2 + [self.dim])
                queries.copy_(keys)
        nn.init.xavier_uniform_(self.v_proj.weight)
        nn.init.zeros_(self.out_proj.weight)

    @property
    def ridge(self) -> Float[Tensor, " h"] | float:
        """lam of each head, or the share of the key energy if relative."""
        if self.fixed_ridge is not None:
            return self.fixed_ridge
        return F.softplus(self.raw_ridge.to(self._state_dtype))

    @property
    def decay(self) -> Float[Tensor, " h"] | None:
        """What each head keeps of its sums where a chunk begins; None if nothing fades."""
        if self.raw_decay is None:
            return None
        return torch.sigmoid(self.raw_decay.to(self._state_dtype)).clamp_min(LEAST_KEPT)

    @property
    def coefficients(self) -> Float[Tensor, "h order"]:
        """c_j of each head."""
        if self.filter == "bank":
            return self.coef
        gamma = 1 + 0.5 * torch.sigmoid(self.raw_gamma)
        powers = torch.zeros(self.order + 1, device=gamma.device, dtype=gamma.dtype)
        powers[self.order] = 1
        return (gamma**self.order * powers).expand(self.heads, -1)

    def init_state(self, batch: int) -> LayerState:
        device, dtype = self.k_proj.weight.device, self._state_dtype
        sums = SKAState.init(
            batch, self.heads, self.rank, self.value_dim, device=device, dtype=dtype
        )
        if not self._windowed:
            return sums

        def window(tokens: int, channels: int) -> ConvState:
            return ConvState.init(batch, channels, tokens + 1, device=device, dtype=dtype)

        conv = window(0, 0) if self.conv is None else self.conv.init_state(batch)
        pending = window(0 if self.sees_itself else 1, self.heads * self.rank + self.dim)
        return WindowedSKAState(conv, pending, sums)

    @property
    def _windowed(self) -> bool:
        return self.conv is not None or not self.sees_itself

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state once it has begun."""
        sums = SKAState.bytes_per_row(self.heads, self.rank, self.value_dim, self.causal)
        empty = self.init_state(1)
        return sums + empty.nbytes - memory_of(empty).nbytes

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        state: LayerState | None = None,
        *,
        lengths: Int[Tensor, " b"] | None = None,
        documents: Documents | None = None,
        mask: Bool[Tensor, "b t"] | None = None,
        return_state: bool = True,
        in_place: bool = False,
    ) -> tuple[Float[Tensor, "b t d"], LayerState | None]:
        """Answer every position; `mask` leaves positions out of the memory."""
        check_call(x, self.dim, state, WindowedSKAState if self._windowed else SKAState)
        if state is None and self._windowed:
            state = self.init_state(x.shape[0])
        past = None if state is None else memory_of(state)
        q, k, v, conv = self.project(x, state, lengths=lengths, documents=documents)
        pending = None
        if not self.sees_itself:
            assert isinstance(state, WindowedSKAState)
            k, v, pending = late(k, v, mask, state.pending, lengths, documents)
            mask = None
        apart = None if documents is None else documents.apart
        if apart is not None:
            q, k, v = (apart.take(z) for z in (q, k, v))
            mask, lengths = None if mask is None else apart.take(mask), apart.lengths
            past = None if past is None else apart.enter(past)
        recall = partial(
            ska,
            q,
            k,
            v,
            coef=self.coefficients,
            ridge=self.ridge,
            relative_ridge=self.relative_ridge,
            decay=self.decay,
            causal=self.causal,
            chunk_size=self.chunk_size,
            mask=mask,
            lengths=lengths,
            state=past,
            in_place=in_place,
        )
        y, sums = recall(return_state=True) if return_state else (recall(), None)
        if apart is not None:
            y, sums = apart.put_back(y), None if sums is None else apart.leave(sums)
        y = self.out_proj(self.eta.to(y.dtype) * y.flatten(-2))
        if sums is None or not isinstance(state, WindowedSKAState):
            return y, sums
        return y, WindowedSKAState(conv or state.conv, pending or state.pending, sums)

    def project(
        self,
        x: Float[Tensor, "b t d"],
        state: LayerState | None = None,
        *,
        lengths: Int[Tensor, " b"] | None = None,
        documents: Documents | None = None,
    ) -> tuple[
        Float[Tensor, "b t h r"],
        Float[Tensor, "b t h r"],
        Float[Tensor, "b t h p"],
        ConvState | None,
    ]:
        """Queries, keys and values as `ska` takes them, and what the convolution remembers."""
        parts = [proj(x) for proj in (self.q_proj, self.k_proj, self.v_proj)]
        window = None
        if self.conv is not None:
            past = state.conv if isinstance(state, WindowedSKAState) else None
            widths = [part.shape[-1] for part in parts]
            mixed, window = self.conv(
                torch.cat(parts, dim=-1), past, lengths=lengths, documents=documents
            )
            parts = list(mixed.split(widths, dim=-1))
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in parts)
        if self.lift is not None:
            positions = self._positions(q, None if state is None else memory_of(state), documents)
            q, k = self._lifted(q, k, positions)
        if self.key_norm:
            q, k = (F.rms_norm(z, z.shape[-1:], eps=NORM_EPS) for z in (q, k))
        return q, k, v, window

    def _positions(
        self, q: Tensor, state: SKAState | None, documents: Documents | None
    ) -> Int[Tensor, "b t"]:
        count = q.new_zeros(len(q), dtype=torch.int64) if state is None else state.count
        if documents is not None:
            return documents.positions(count)
        return count[:, None] + torch.arange(q.shape[1], device=q.device)

    def _lifted(self, q: Tensor, k: Tensor, positions: Int[Tensor, "b t"]) -> tuple[Tensor, Tensor]:
        """Turn keys and queries by their positions, then lift them to rank r."""
        assert self.lift is not None
        dtype = torch.promote_types(q.dtype, torch.float32)
        cos, sin = rotary_tables(positions, q.shape[-1], dtype=dtype)
        return self.lift(rotate(q, cos, sin)), self.lift(rotate(k, cos, sin))

    @property
    def _state_dtype(self) -> torch.dtype:
        return torch.promote_types(self.k_proj.weight.dtype, torch.float32)

    def extra_repr(self) -> str:
        return (
            f"heads={self.heads}, rank={self.rank}, filter={self.filter!r}, order={self.order}, "
            f"causal={self.causal!r}"
        )


def _check(
    dim: int, heads: int, rank: int, filter: str, order: int, ridge: float | None, lift: int
) -> None:
    if heads < 1 or dim % heads:
        raise ValueError(f"dim must be a multiple of heads, got dim={dim} and heads={heads}.")
    if not 1 <= (lift or rank) <= dim:
        raise ValueError(
            f"rank (or lift) must lie between 1 and dim={dim} for orthonormal projections, got "
            f"rank={rank}, lift={lift}."
        )
    if filter not in ("bank", "power"):
        raise ValueError(f'filter must be "bank" or "power", got {filter!r}.')
    if order < 0:
        raise ValueError(f"order must be 0 or more, got {order}.")
    if ridge is not None and not ridge > 0:
        raise ValueError(f"ridge must be positive, got {ridge}; 0.03 * rank is a good start.")


def _check_order_of_reading(
    causal: Causal, half_life: float | Sequence[float] | None, sees_itself: bool
) -> None:
    if half_life is not None:
        lives = half_life if isinstance(half_life, Sequence) else [half_life]
        if not lives or not all(0 < life < math.inf for life in lives):
            raise ValueError(f"half_life must be positive numbers of tokens, got {half_life}.")
    if half_life is not None and causal is False:
        raise ValueError(
            "causal=False lets all tokens see all, so that none is older than another; drop "
            'half_life, or use causal="exact" or "chunk".'
        )
    if not sees_itself and causal != "exact":
        raise ValueError(
            f'sees_itself=False needs causal="exact", got {causal!r}, in which a token sees all of '
            "a chunk or nothing."
        )


def late(
    k: Float[Tensor, "b t h r"],
    v: Float[Tensor, "b t h p"],
    mask: Bool[Tensor, "b t"] | None,
    pending: ConvState,
    lengths: Int[Tensor, " b"] | None,
    documents: Documents | None = None,
) -> tuple[Float[Tensor, "b t h r"], Float[Tensor, "b t h p"], ConvState]:
    """Key and value of the token before each one, zero where there is none in its document and
    where the mask leaves it out."""
    written = torch.cat([k.flatten(2), v.flatten(2)], dim=-1)
    if mask is not None:
        written = torch.where(mask[..., None], written, torch.zeros_like(written))
    history, pending = remember(pending, written, lengths, documents)
    keys = k.shape[2] * k.shape[3]
    before = history[:, :-1].to(k.dtype)
    if documents is not None:
        before = before.masked_fill(documents.starts[..., None], 0)
    return before[..., :keys].view_as(k), before[..., keys:].view_as(v), pending


def _spectral(value: Tensor) -> nn.Parameter:
    """A parameter of the operator itself, which weight decay must not pull to zero.

    One number is a vector of one: FSDP takes no scalars.
    """
    parameter = nn.Parameter(value)
    no_weight_decay(parameter)
    return parameter


def _one_hot_orders(heads: int, order: int) -> Float[Tensor, "h order"]:
    return F.one_hot(torch.arange(heads) % (order + 1), order + 1).float()


def _inverse_softplus(y: float) -> float:
    return y + math.log(-math.expm1(-y))


def _logit(p: float) -> float:
    return math.log(p / (1 - p))


def _logit_of_exp(x: float) -> float:
    """Of a share that may be as near to 1 as can be."""
    return x - math.log(-math.expm1(x))
