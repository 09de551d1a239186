"""The front door of the delta rule: checks its arguments, prepares them, chooses a form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, overload

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from echo_lm.ops.checks import require_finite
from echo_lm.ops.delta.chunk import delta_chunk
from echo_lm.ops.delta.naive import delta_naive
from echo_lm.ops.delta.problem import Problem
from echo_lm.ops.delta.recurrent import delta_recurrent
from echo_lm.ops.delta.state import DeltaState
from echo_lm.ops.ssd.checks import check_lengths, check_starts
from echo_lm.ops.ssd.interface import without_padding

Backend = Literal["auto", "naive", "chunk", "recurrent"]
Form = Callable[[Problem], tuple[Tensor, Tensor]]

FORMS: dict[str, Form] = {
    "naive": delta_naive,
    "chunk": delta_chunk,
    "recurrent": delta_recurrent,
}


def choose_form(backend: str, tokens: int) -> Form:
    """The one place that decides who computes."""
    if backend == "auto":
        backend = "recurrent" if tokens == 1 else "chunk"
    if backend not in FORMS:
        raise ValueError(f"backend is {backend!r}, but it must be one of auto, {', '.join(FORMS)}.")
    return FORMS[backend]


@overload
def delta_rule(
    q: Float[Tensor, "b t h r"],
    k: Float[Tensor, "b t h r"],
    v: Float[Tensor, "b t h p"],
    beta: Float[Tensor, "b t h"],
    *,
    state: DeltaState | None = None,
    return_state: Literal[False] = False,
    lengths: Int[Tensor, " b"] | None = None,
    starts: Bool[Tensor, "b t"] | None = None,
    chunk_size: int = 64,
    backend: Backend = "auto",
) -> Float[Tensor, "b t h p"]: ...


@overload
def delta_rule(
    q: Float[Tensor, "b t h r"],
    k: Float[Tensor, "b t h r"],
    v: Float[Tensor, "b t h p"],
    beta: Float[Tensor, "b t h"],
    *,
    state: DeltaState | None = None,
    return_state: Literal[True],
    lengths: Int[Tensor, " b"] | None = None,
    starts: Bool[Tensor, "b t"] | None = None,
    chunk_size: int = 64,
    backend: Backend = "auto",
) -> tuple[Float[Tensor, "b t h p"], DeltaState]: ...


def delta_rule(
    q: Float[Tensor, "b t h r"],
    k: Float[Tensor, "b t h r"],
    v: Float[Tensor, "b t h p"],
    beta: Float[Tensor, "b t h"],
    *,
    state: DeltaState | None = None,
    return_state: bool = False,
    lengths: Int[Tensor, " b"] | None = None,
    starts: Bool[Tensor, "b t"] | None = None,
    chunk_size: int = 64,
    backend: Backend = "auto",
) -> Float[Tensor, "b t h p"] | tuple[Float[Tensor, "b t h p"], DeltaState]:
    """The delta rule of DeltaNet:

        S_t = S_{t-1} (I - beta_t k_t k_t') + beta_t v_t k_t'        y_t = S_t q_t

    It forgets nothing by itself, and stays bounded as long as beta_t |k_t|^2 is at most 2: give
    keys of length 1 and beta between 0 and 1. `state` is that of an earlier call, which this one
    continues; with `return_state` the answer is `(y, state)`. `lengths` says how many tokens of
    each right-padded row are real; y is zero behind them. `starts` marks tokens before which all is
    forgotten, as if a row of its own began. Sums and state are fp32 (fp64 for fp64 v).
    """
    check_inputs(q, k, v, beta)
    check_lengths(lengths, v)
    check_starts(starts, v)
    starts = None if starts is None else without_padding(starts, lengths)
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}, but a chunk has at least one token.")
    form = choose_form(backend, v.shape[1])
    batch, _, heads, value_dim = v.shape
    shape = (batch, heads, value_dim, k.shape[-1])
    if state is None:
        state = DeltaState.zeros(*shape, device=v.device)
    check_state(state, shape)
    dtype = torch.promote_types(v.dtype, torch.float32)
    with torch.autocast(v.device.type, enabled=False):
        wide = {
            name: without_padding(x.to(dtype), lengths)
            for name, x in {"q": q, "k": k, "v": v, "beta": beta}.items()
        }
        require_finite(**wide)
        y, S = form(Problem(**wide, S=state.S.to(dtype), chunk_size=chunk_size, starts=starts))
        return (y.to(v.dtype), DeltaState(S)) if return_state else y.to(v.dtype)


def check_inputs(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> None:
    if v.dim() != 4 or 0 in v.shape:
        raise ValueError(
            f"v has shape {tuple(v.shape)}, but it must be [batch, time, heads, width], no axis "
            "empty."
        )
    if not v.is_floating_point():
        raise ValueError(f"v has dtype {v.dtype}, but it must be a floating point one.")
    if k.dim() != 4 or k.shape[:3] != v.shape[:3] or k.shape[3] == 0:
        raise ValueError(
            f"k has shape {tuple(k.shape)}, but for v of shape {tuple(v.shape)} it must be "
            f"{[*v.shape[:3], 'width']}."
        )
    if q.shape != k.shape:
        raise ValueError(
            f"q has shape {tuple(q.shape)} and k has {tuple(k.shape)}, but they must be equal."
        )
    if beta.shape != v.shape[:3]:
        raise ValueError(
            f"beta has shape {tuple(beta.shape)}, but v asks for {list(v.shape[:3])}: one number "
            "for each token and head."
        )


def check_state(state: DeltaState, shape: tuple[int, ...]) -> None:
    if not isinstance(state, DeltaState):
        raise ValueError(
            f"state is a {type(state).__name__}, but delta_rule continues a DeltaState."
        )
    if state.S.shape != shape:
        raise ValueError(
            f"state has S of shape {tuple(state.S.shape)}, but this call continues one of {shape}: "
            "pass a state that came from the same rule, or None to begin anew."
        )
