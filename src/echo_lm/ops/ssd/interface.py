"""The front door of the scan: checks its arguments, prepares them, chooses a form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, overload

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from echo_lm.ops.backends import ScanBackend, ScanForm, choose_scan
from echo_lm.ops.checks import refuse_in_place, require_finite, wants_gradient
from echo_lm.ops.ssd.checks import check_inputs, check_lengths, check_starts, check_state
from echo_lm.ops.ssd.chunk import ssd_chunk
from echo_lm.ops.ssd.naive import ssd_naive
from echo_lm.ops.ssd.problem import FORGET, Problem, Trapezoid, to_heads
from echo_lm.ops.ssd.recurrent import ssd_recurrent
from echo_lm.ops.ssd.rotation import accumulate, rotate
from echo_lm.ops.ssd.state import SSDState

Form = Callable[[Problem], tuple[Tensor, Tensor]]

FORMS: dict[str, Form] = {"naive": ssd_naive, "chunk": ssd_chunk, "recurrent": ssd_recurrent}


@overload
def ssd(
    x: Float[Tensor, "b t h *r p"],
    B: Float[Tensor, "b t g *r n"],
    C: Float[Tensor, "b t g *r n"],
    *,
    log_decay: Float[Tensor, "b t h"],
    gamma: Float[Tensor, "b t h"],
    beta: Float[Tensor, "b t h"] | None = None,
    angle: Float[Tensor, "b t h s"] | None = None,
    state: SSDState | None = None,
    return_state: Literal[False] = False,
    lengths: Int[Tensor, " b"] | None = None,
    starts: Bool[Tensor, "b t"] | None = None,
    in_place: bool = False,
    chunk_size: int = 64,
    backend: ScanBackend = "auto",
) -> Float[Tensor, "b t h *r p"]: ...


@overload
def ssd(
    x: Float[Tensor, "b t h *r p"],
    B: Float[Tensor, "b t g *r n"],
    C: Float[Tensor, "b t g *r n"],
    *,
    log_decay: Float[Tensor, "b t h"],
    gamma: Float[Tensor, "b t h"],
    beta: Float[Tensor, "b t h"] | None = None,
    angle: Float[Tensor, "b t h s"] | None = None,
    state: SSDState | None = None,
    return_state: Literal[True],
    lengths: Int[Tensor, " b"] | None = None,
    starts: Bool[Tensor, "b t"] | None = None,
    in_place: bool = False,
    chunk_size: int = 64,
    backend: ScanBackend = "auto",
) -> tuple[Float[Tensor, "b t h *r p"], SSDState]: ...


def ssd(
    x: Float[Tensor, "b t h *r p"],
    B: Float[Tensor, "b t g *r n"],
    C: Float[Tensor, "b t g *r n"],
    *,
    log_decay: Float[Tensor, "b t h"],
    gamma: Float[Tensor, "b t h"],
    beta: Float[Tensor, "b t h"] | None = None,
    angle: Float[Tensor, "b t h s"] | None = None,
    state: SSDState | None = None,
    return_state: bool = False,
    lengths: Int[Tensor, " b"] | None = None,
    starts: Bool[Tensor, "b t"] | None = None,
    in_place: bool = False,
    chunk_size: int = 64,
    backend: ScanBackend = "auto",
) -> Float[Tensor, "b t h *r p"] | tuple[Float[Tensor, "b t h *r p"], SSDState]:
    """The state-space scan of Mamba-2 and Mamba-3, with a_t = exp(log_decay_t):

        h_t = a_t (h_{t-1} + beta_t u_{t-1}) + gamma_t u_t
        u_t = sum_r x_t^r (B_t^r)'        y_t^r = h_t C_t^r

    Mamba-2 is gamma = dt, log_decay = dt A and no beta. Mamba-3 shares dt between gamma and beta
    and turns the first 2S coordinates of B and C, in pairs, by the running sum of `angle`.

    x, B and C all have a rank axis before the last one or none has. Groups of heads share B and C.
    log_decay must not be positive. `state` is that of an earlier call, which this one continues;
    with `return_state` the answer is `(y, state)`. With `in_place` the state given may be written
    over and is worth nothing afterwards; this takes no gradients. `lengths` says how many tokens of
    each right-padded row are real; y is zero behind them. `starts` marks tokens before which all is
    forgotten (a_t = beta_t = 0, and the angle counts from there), as if a row of its own began.
    Sums and state are fp32 (fp64 for fp64 x).
    """
    scalars = {"log_decay": log_decay, "gamma": gamma} | ({} if beta is None else {"beta": beta})
    check_inputs(x, B, C, angle, **scalars)
    check_lengths(lengths, x)
    check_starts(starts, x)
    starts = None if starts is None else without_padding(starts, lengths)
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}, but a chunk has at least one token.")
    learning = wants_gradient(x, B, C, angle, *scalars.values(), state=state)
    refuse_in_place(in_place, learning)
    ranked = x.dim() == 5
    if not ranked:
        x, B, C = x.unsqueeze(3), B.unsqueeze(3), C.unsqueeze(3)
    chosen = choose_scan(
        backend,
        x,
        B,
        shares_last=beta is not None and angle is None and B.shape[2] < x.shape[2],
        restarts=starts is not None,
        learning=learning,
    )
    old = begin(x, B, beta, angle, state)
    with torch.autocast(x.device.type, enabled=False):
        if chosen == "step":
            from echo_lm.ops.ssd.step import ssd_step  # only here: importing triton takes a while

            given = {"log_decay": log_decay, "gamma": gamma, "beta": beta, "angle": angle}
            all_given = {"x": x, "B": B, "C": C} | given
            require_finite(
                **{k: v if v is None else without_padding(v, lengths) for k, v in all_given.items()}
            )
            y, new = ssd_step(x, B, C, **given, lengths=lengths, state=old, in_place=in_place)
            y = y if ranked else y.squeeze(3)
            return (y, new) if return_state else y
        angle = turn(angle, lengths, starts, old)
        problem = prepare(
            x, B, C, log_decay, gamma, beta, angle, lengths, starts, old, chunk_size, in_place
        )
        y, h = scan(problem, chosen)
        y = (y if ranked else y.squeeze(3)).to(x.dtype)
        return (y, remember(problem, h, angle, lengths)) if return_state else y


def scan(problem: Problem, form: ScanForm) -> tuple[Tensor, Tensor]:
    """Answer all tokens in the form chosen."""
    if form == "triton":
        from echo_lm.ops.ssd.triton import ssd_triton  # only here: importing triton takes a while

        return ssd_triton(problem)
    return FORMS[form](problem.widened())


def begin(
    x: Tensor, B: Tensor, beta: Tensor | None, angle: Tensor | None, state: SSDState | None
) -> SSDState:
    """The state to continue, checked; or that of someone who has read nothing."""
    batch, _, heads, rank, head_dim = x.shape
    shapes = SSDState.shapes(
        batch,
        heads,
        head_dim,
        state_dim=B.shape[-1],
        groups=B.shape[2],
        rank=rank,
        trapezoid=beta is not None,
        angles=0 if angle is None else angle.shape[-1],
    )
    if state is None:
        return SSDState.zeros(shapes, device=x.device)
    check_state(state, shapes)
    return state


def turn(
    increments: Float[Tensor, "b t h s"] | None,
    lengths: Int[Tensor, " b"] | None,
    starts: Bool[Tensor, "b t"] | None,
    state: SSDState,
) -> Float[Tensor, "b t h s"] | None:
    """The angle reached at every token."""
    if increments is None:
        return None
    assert state.angle is not None
    increments = without_padding(increments, lengths)
    require_finite(angle=increments)
    return accumulate(increments, state.angle, starts)


def prepare(
    x: Float[Tensor, "b t h r p"],
    B: Float[Tensor, "b t g r n"],
    C: Float[Tensor, "b t g r n"],
    log_decay: Float[Tensor, "b t h"],
    gamma: Float[Tensor, "b t h"],
    beta: Float[Tensor, "b t h"] | None,
    angle: Float[Tensor, "b t h s"] | None,
    lengths: Int[Tensor, " b"] | None,
    starts: Bool[Tensor, "b t"] | None,
    state: SSDState,
    chunk_size: int,
    in_place: bool,
) -> Problem:
    """Blank the padding, let nothing pass a start, rotate, widen all but what is large."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    x, B, C = (without_padding(v, lengths) for v in (x, B, C))
    log_decay, gamma = (without_padding(v.to(dtype), lengths) for v in (log_decay, gamma))
    require_finite(x=x, B=B, C=C, log_decay=log_decay, gamma=gamma)
    if starts is not None:
        log_decay = log_decay.masked_fill(starts.unsqueeze(-1), FORGET)
    if angle is not None:
        B, C = (rotate(to_heads(v.to(dtype), x.shape[2], dim=2), angle) for v in (B, C))
    trapezoid = None
    if beta is not None:
        assert state.x is not None
        assert state.B is not None
        beta = without_padding(beta.to(dtype), lengths)
        require_finite(beta=beta)
        if starts is not None:
            beta = beta.masked_fill(starts.unsqueeze(-1), 0)
        trapezoid = Trapezoid(beta, state.x.to(dtype), state.B.to(dtype))
    h = state.h.to(dtype)
    return Problem(x, B, C, log_decay, gamma, trapezoid, h, chunk_size, starts, in_place)


def remember(
    problem: Problem,
    h: Float[Tensor, "b h p n"],
    angle: Float[Tensor, "b t h s"] | None,
    lengths: Int[Tensor, " b"] | None,
) -> SSDState:
    """The state after the last real token of every row, no view of anything longer."""
    state = SSDState(h, angle=None if angle is None else angle[:, -1].clone())
    if problem.trapezoid is not None:
        state.x = last_real(problem.x, problem.trapezoid.x, lengths)
        state.B = last_real(problem.B, problem.trapezoid.B, lengths)
    return state


def without_padding(
    v: Shaped[Tensor, "b t ..."], lengths: Int[Tensor, " b"] | None
) -> Shaped[Tensor, "b t ..."]:
    """Zeros behind every row's last real token, whatever was there."""
    if lengths is None:
        return v
    padding = torch.arange(v.shape[1], device=v.device) >= lengths.unsqueeze(1)
    return v.masked_fill(padding.view(*padding.shape, *[1] * (v.dim() - 2)), 0)


def last_real(
    v: Float[Tensor, "b t ..."], before: Float[Tensor, "b ..."], lengths: Int[Tensor, " b"] | None
) -> Float[Tensor, "b ..."]:
    """Each row's last real token; what was there before in a row without tokens."""
    if lengths is None:
        return v[:, -1].to(before.dtype, copy=True)
    last = v[torch.arange(len(v), device=v.device), (lengths - 1).clamp_min(0)]
    empty = (lengths == 0).view(-1, *[1] * (last.dim() - 1))
    return torch.where(empty, before, last)
