"""SKA one token on, as Triton kernels that write over the state: for decoding on a GPU."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from echo_lm.ops.backends import kernels_interpreted
from echo_lm.ops.ska import step_kernels
from echo_lm.ops.ska.problem import Problem
from echo_lm.ops.ska.recurrent import with_readout
from echo_lm.ops.ska.state import SKAState
from echo_lm.ops.ska.triton import tile_width


@torch.compiler.disable
def ska_step(problem: Problem) -> tuple[Float[Tensor, "b 1 h p"], SKAState]:
    """Read and answer one token of each row. Nothing waits for the device."""
    state = to_write_over(problem)
    q, k, v = (rows(x) for x in (problem.q, problem.k, problem.v))
    coef, ridge, decay, lengths = problem.coef, problem.ridge, problem.decay, problem.lengths
    lengths = None if lengths is None else lengths.contiguous()
    batch, heads, rank = k.shape
    width = v.shape[-1]
    tiles = {"r": rank, "p": width, "R": tile_width(rank), "PW": tile_width(width)}
    wide = max(tiles["R"], tiles["PW"]) > 64
    coef = coef if coef.stride(1) == 1 else coef.contiguous()
    sums, order = (state.gram, state.lag, state.value), coef.shape[1] - 1
    step_kernels.begin_kernel[batch, heads](
        k, *sums, state.first_key, state.last_key, state.key_energy, state.count,
        state.inverse, state.inverse_ridge, state.readout,
        torch.empty_like(state.gram) if state.inverse is None else None,
        coef, ridge, decay, lengths, *k.stride()[:2], coef.stride(0), ridge.stride(0),
        0 if decay is None else decay.stride(0), problem.chunk_size, **tiles,
        ORDER=order, RELATIVE=problem.relative_ridge,
        PRECISION="ieee" if kernels_interpreted() else "tf32x3", num_warps=8 if wide else 4,
    )  # fmt: skip
    y = torch.empty(batch, 1, heads, width, device=v.device, dtype=v.dtype)
    step_kernels.step_kernel[batch, heads](
        q, k, v, y, *sums, state.last_key, state.key_energy, state.count,
        state.inverse, state.readout, coef, lengths,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], coef.stride(0), **tiles,
        ORDER=order, num_warps=8 if wide else 4,
    )  # fmt: skip
    return y, state


def to_write_over(problem: Problem) -> SKAState:
    """The state of the call if it may be written over, else a copy; with all that a step needs."""
    keep = Tensor.contiguous if problem.in_place else copied
    if problem.causal == "chunk":
        return with_readout(problem, problem.state).map(keep)
    state = replace(problem.state, readout=None).map(keep)
    state.chunk_size = problem.chunk_size if problem.chunked else None
    if state.inverse is None or state.inverse_ridge is None:
        # No ridge is 0: the kernel finds that X is of another one, and makes it.
        state.inverse = torch.empty_like(state.gram)
        state.inverse_ridge = torch.zeros_like(state.key_energy)
    return state


def copied(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def rows(tokens: Float[Tensor, "b 1 h d"]) -> Float[Tensor, "b h d"]:
    """The one token of each row, the entries of a head side by side."""
    only = tokens[:, 0]
    return only if only.stride(-1) == 1 else only.contiguous()
