"""The front door: checks and prepares the arguments, then hands them to one of the forms."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, overload

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from echo_lm.ops.backends import SKABackend, SKAForm, choose_ska
from echo_lm.ops.checks import refuse_in_place, require_finite, wants_gradient
from echo_lm.ops.ska.chunk import ska_chunk
from echo_lm.ops.ska.naive import ska_naive
from echo_lm.ops.ska.packing import Packing
from echo_lm.ops.ska.problem import Causal, Problem, Relative
from echo_lm.ops.ska.recurrent import ska_recurrent
from echo_lm.ops.ska.state import SKAState


@overload
def ska(
    q: Float[Tensor, "b t h r"],
    k: Float[Tensor, "b t h r"],
    v: Float[Tensor, "b t h p"],
    *,
    coef: Float[Tensor, "h order"],
    ridge: Float[Tensor, " h"] | float,
    relative_ridge: Relative = ...,
    decay: Float[Tensor, " h"] | float | None = ...,
    causal: Causal = ...,
    chunk_size: int = ...,
    mask: Bool[Tensor, "b t"] | None = ...,
    lengths: Int[Tensor, " b"] | None = ...,
    cu_seqlens: Int[Tensor, " n"] | None = ...,
    state: SKAState | None = ...,
    return_state: Literal[False] = ...,
    in_place: bool = ...,
    backend: SKABackend = ...,
) -> Float[Tensor, "b t h p"]: ...
@overload
def ska(
    q: Float[Tensor, "b t h r"],
    k: Float[Tensor, "b t h r"],
    v: Float[Tensor, "b t h p"],
    *,
    coef: Float[Tensor, "h order"],
    ridge: Float[Tensor, " h"] | float,
    relative_ridge: Relative = ...,
    decay: Float[Tensor, " h"] | float | None = ...,
    causal: Causal = ...,
    chunk_size: int = ...,
    mask: Bool[Tensor, "b t"] | None = ...,
    lengths: Int[Tensor, " b"] | None = ...,
    cu_seqlens: Int[Tensor, " n"] | None = ...,
    state: SKAState | None = ...,
    return_state: Literal[True],
    in_place: bool = ...,
    backend: SKABackend = ...,
) -> tuple[Float[Tensor, "b t h p"], SKAState]: ...
def ska(
    q: Float[Tensor, "b t h r"],
    k: Float[Tensor, "b t h r"],
    v: Float[Tensor, "b t h p"],
    *,
    coef: Float[Tensor, "h order"],
    ridge: Float[Tensor, " h"] | float,
    relative_ridge: Relative = False,
    decay: Float[Tensor, " h"] | float | None = None,
    causal: Causal = "exact",
    chunk_size: int = 64,
    mask: Bool[Tensor, "b t"] | None = None,
    lengths: Int[Tensor, " b"] | None = None,
    cu_seqlens: Int[Tensor, " n"] | None = None,
    state: SKAState | None = None,
    return_state: bool = False,
    in_place: bool = False,
    backend: SKABackend = "auto",
) -> Float[Tensor, "b t h p"] | tuple[Float[Tensor, "b t h p"], SKAState]:
    """Spectral Koopman Attention: recall by ridge regression from sums of fixed size.

    With the sums G, M and C of the tokens a query may see (README.md beside this file),

        y_t = sum_j coef_j C X (M X)^j q_t,    X = (G + ridge I)^-1.

    Args:
        q, k: Queries and keys of rank r.
        v: Values.
        coef: Filter coefficients of each head; column j weighs order j.
        ridge: Positive, one for all heads or one each. Added to the Gram matrix as it is, unless
            relative.
        relative_ridge: What the ridge is multiplied by first: nothing (False), the largest key
            energy seen so far (True, the paper's), or tr(G) / r, the mean eigenvalue of the Gram
            matrix ("trace").
        decay: In (0, 1], one for all heads or one each: what is left of the sums, of the largest
            key energy too, when a new chunk begins. None: nothing fades.
        causal: "exact": token t sees all tokens up to and including itself. "chunk": it sees the
            chunks before its own. False: all tokens see all tokens of this call and the state.
        chunk_size: The chunk of "chunk" and of `decay`; without these a matter of speed alone.
        mask: False leaves a token out of the statistics; it still asks, and still takes its place.
        lengths: Real tokens of each row, the rest being padding on the right. Padding reads
            nothing, answers zero, and takes no place.
        cu_seqlens: Boundaries `[0, ..., t]` of sequences packed into one row (b = 1); the state
            then has a row for each sequence.
        state: Continue from here. Left as it is unless `in_place`.
        return_state: Also return the state after the last token.
        in_place: `state` may be written over and is worth nothing afterwards: go on with the one
            that is returned. Saves copying it with every single token; takes no gradients.
        backend: "naive" (a loop, for checking), "chunk" (parallel), "recurrent" (token by token),
            "triton" (on a CUDA device; parallel, and for a single token a step in one kernel), or
            "auto": on a CUDA device triton where it can serve; elsewhere recurrent for a single
            token and chunk for more.

    Returns:
        The answers in the dtype of `v`, and the state (fp32, or fp64 for fp64 inputs) if asked.
    """
    _check_tensors(q, k, v, coef)
    _check_settings(causal, relative_ridge, decay, chunk_size)
    given = {"ridge": ridge, "decay": decay}
    numbers = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    require_finite(q=q, k=k, v=v, coef=coef, **numbers)
    learning = wants_gradient(q, k, v, coef, *numbers.values(), state=state)
    refuse_in_place(in_place, learning)
    chosen = choose_ska(
        backend,
        q,
        v,
        causal=causal,
        chunk_size=chunk_size,
        fading=decay is not None,
        learning=learning,
    )
    with torch.autocast(q.device.type, enabled=False):
        dtype = torch.promote_types(q.dtype, torch.float32)
        # The kernels widen what they load; all other forms work on tensors that are wide already.
        narrow = chosen in ("triton", "step")
        q_, k_, v_ = (x if narrow else x.to(dtype) for x in (q, k, v))
        if mask is not None:
            _check_mask(mask, q)
            k_, v_ = _zero_where_not(mask, k_), _zero_where_not(mask, v_)
        packing = None
        if cu_seqlens is not None:
            lengths = _packed_lengths(cu_seqlens, lengths, q)
            packing = Packing.of(lengths)
            q_, k_, v_ = (packing.unpack(x) for x in (q_, k_, v_))
        elif lengths is not None:
            _check_lengths(lengths, q)
            real = torch.arange(q.shape[1], device=q.device) < lengths[:, None]
            q_, k_, v_ = (_zero_where_not(real, x) for x in (q_, k_, v_))
        problem = Problem(
            q=q_,
            k=k_,
            v=v_,
            coef=coef.to(dtype),
            ridge=_per_head("ridge", ridge, q, dtype),
            relative_ridge=relative_ridge,
            decay=None if decay is None else _per_head("decay", decay, q, dtype),
            causal=causal,
            chunk_size=chunk_size,
            lengths=lengths,
            state=_checked_state(state, q_, v_, dtype),
            fresh=state is None,
            in_place=in_place,
        )
        problem = replace(problem, state=_without_foreign_chunks(problem))
        y, new_state = _run(chosen, problem, return_state)
        if packing is not None:
            y = packing.pack(y)
    y = y.to(v.dtype)
    if not return_state:
        return y
    assert new_state is not None
    return y, new_state


def _run(
    form: SKAForm, problem: Problem, return_state: bool
) -> tuple[Float[Tensor, "b t h p"], SKAState | None]:
    if form == "naive":
        return ska_naive(problem)
    if form == "recurrent":
        return ska_recurrent(problem)
    if form == "step":
        from echo_lm.ops.ska.step import ska_step  # only here: importing triton takes a while

        return ska_step(problem)
    if form == "triton":
        from echo_lm.ops.ska.triton import ska_triton

        return ska_triton(problem, return_state)
    return ska_chunk(problem, return_state)


def _zero_where_not(keep: Bool[Tensor, "b t"], x: Float[Tensor, "b t h d"]) -> Tensor:
    return torch.where(keep[:, :, None, None], x, torch.zeros_like(x))


@dataclass(frozen=True)
class _Range:
    """What a number for each head must be."""

    most: float
    wanted: str
    hint: str


_RANGES = {
    "ridge": _Range(math.inf, "positive", "0.03 * rank is a good start"),
    "decay": _Range(1.0, "above 0 and at most 1", "it is the share of the sums that is kept"),
}


def _per_head(
    name: str, given: Float[Tensor, " h"] | float, q: Tensor, dtype: torch.dtype
) -> Float[Tensor, " h"]:
    """One positive number for each head."""
    heads, allowed = q.shape[2], _RANGES[name]
    if not isinstance(given, Tensor):
        if not 0 < given <= allowed.most:
            raise ValueError(f"{name} must be {allowed.wanted}, got {given}; {allowed.hint}.")
        return torch.full((heads,), given, device=q.device, dtype=dtype)
    if given.shape not in ((), (heads,)):
        raise ValueError(
            f"{name} must be a number or one for each of {heads} heads, got shape "
            f"{tuple(given.shape)}."
        )
    on_host = given.device.type == "cpu" and not torch.compiler.is_compiling()
    if on_host and bool(((given <= 0) | (given > allowed.most)).any()):
        raise ValueError(f"{name} must be {allowed.wanted} for every head, got {given.tolist()}.")
    return given.to(dtype).expand(heads)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, coef: Tensor) -> None:
    if q.dim() != 4 or q.shape != k.shape or v.dim() != 4 or v.shape[:3] != q.shape[:3]:
        raise ValueError(
            f"q and k must be [B, T, H, r] and v [B, T, H, P]; got q {tuple(q.shape)}, "
            f"k {tuple(k.shape)}, v {tuple(v.shape)}."
        )
    if 0 in q.shape or 0 in v.shape:
        raise ValueError(
            f"ska needs at least one row, token, head and dimension; got q {tuple(q.shape)}, "
            f"v {tuple(v.shape)}."
        )
    if not (q.dtype == k.dtype == v.dtype) or not q.is_floating_point():
        raise ValueError(
            f"q, k and v must share one floating dtype; got {q.dtype}, {k.dtype}, {v.dtype}."
        )
    if coef.dim() != 2 or coef.shape[0] != q.shape[2] or coef.shape[1] == 0:
        raise ValueError(
            f"coef must be [H, K + 1], one row for each of {q.shape[2]} heads and a column for "
            f"each order from 0 to K; got {tuple(coef.shape)}."
        )


def _check_settings(
    causal: Causal, relative_ridge: Relative, decay: Tensor | float | None, chunk_size: int
) -> None:
    if causal not in ("exact", "chunk", False):
        raise ValueError(f'causal must be "exact", "chunk" or False, got {causal!r}.')
    if relative_ridge not in (False, True, "trace"):
        raise ValueError(f'relative_ridge must be False, True or "trace", got {relative_ridge!r}.')
    if causal == "exact" and relative_ridge:
        raise ValueError(
            'causal="exact" takes an absolute ridge, since a relative one would change within a '
            'chunk; drop relative_ridge or use causal="chunk".'
        )
    if causal is False and decay is not None:
        raise ValueError(
            "causal=False lets all tokens see all, so that none is older than another; drop decay, "
            'or use causal="exact" or "chunk".'
        )
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}.")


def _check_mask(mask: Tensor, q: Tensor) -> None:
    if mask.shape != q.shape[:2] or mask.dtype != torch.bool:
        raise ValueError(
            f"mask must be a bool tensor [B, T] = {list(q.shape[:2])}, got {mask.dtype} "
            f"{list(mask.shape)}."
        )


def _check_lengths(lengths: Tensor, q: Tensor) -> None:
    batch, width = q.shape[:2]
    if lengths.shape != (batch,) or lengths.is_floating_point():
        raise ValueError(
            f"lengths must hold one integer for each of {batch} rows, got {lengths.dtype} "
            f"{list(lengths.shape)}."
        )
    if int(lengths.min()) < 0 or int(lengths.max()) > width:
        raise ValueError(f"lengths must lie between 0 and T = {width}, got {lengths.tolist()}.")


def _packed_lengths(
    cu_seqlens: Int[Tensor, " n"], lengths: Tensor | None, q: Tensor
) -> Int[Tensor, " n"]:
    if lengths is not None:
        raise ValueError("Give lengths (padded rows) or cu_seqlens (one packed row), not both.")
    bounds = cu_seqlens.tolist()
    rising = all(a <= b for a, b in pairwise(bounds))
    if (
        q.shape[0] != 1
        or len(bounds) < 2
        or not rising
        or [bounds[0], bounds[-1]] != [0, q.shape[1]]
    ):
        raise ValueError(
            f"cu_seqlens must rise from 0 to T = {q.shape[1]} over a single row, got {bounds} over "
            f"{q.shape[0]} row(s)."
        )
    return cu_seqlens.diff().to(q.device)


def _checked_state(
    state: SKAState | None,
    q: Tensor,
    v: Tensor,
    dtype: torch.dtype,
) -> SKAState:
    batch, _, heads, rank = q.shape
    width = v.shape[-1]
    if state is None:
        return SKAState.init(batch, heads, rank, width, device=q.device, dtype=dtype)
    wanted, got = (batch, heads, width, rank), tuple(state.value.shape)
    if got != wanted:
        raise ValueError(
            f"The state is of another model or batch: it holds [rows, heads, value width, rank] = "
            f"{list(got)}, this call has {list(wanted)}."
        )
    if state.gram.dtype != dtype or state.gram.device != q.device:
        raise ValueError(
            f"The state is {state.gram.dtype} on {state.gram.device}, this call computes in "
            f"{dtype} on {q.device}; move it with state.to(...) or start anew."
        )
    return state


def _without_foreign_chunks(problem: Problem) -> SKAState:
    """The state, with the chunk that it has begun if this call goes on with it."""
    state, size = problem.state, problem.chunk_size
    if problem.chunked and state.chunk_size not in (None, size):
        raise ValueError(
            f"The state was made with chunk_size={state.chunk_size}; continue with that instead of "
            f"{size}."
        )
    readout = state.readout if problem.causal == "chunk" else None
    return replace(state, readout=readout, chunk_size=state.chunk_size if problem.chunked else None)
