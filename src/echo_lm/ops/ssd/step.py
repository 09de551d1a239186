"""The scan one token on, as a Triton kernel that writes over the state: for decoding on a GPU."""

from __future__ import annotations

import torch
import triton
from jaxtyping import Float, Int
from torch import Tensor

from echo_lm.ops.ssd import step_kernels
from echo_lm.ops.ssd.state import SSDState


@torch.compiler.disable
def ssd_step(
    x: Float[Tensor, "b 1 h r p"],
    B: Float[Tensor, "b 1 g r n"],
    C: Float[Tensor, "b 1 g r n"],
    *,
    log_decay: Float[Tensor, "b 1 h"],
    gamma: Float[Tensor, "b 1 h"],
    beta: Float[Tensor, "b 1 h"] | None,
    angle: Float[Tensor, "b 1 h s"] | None,
    lengths: Int[Tensor, " b"] | None,
    state: SSDState,
    in_place: bool,
) -> tuple[Float[Tensor, "b 1 h r p"], SSDState]:
    """Read and answer one token of each row. Nothing waits for the device."""
    state = state.map(Tensor.contiguous if in_place else copied)
    x, B, C = (dense(v[:, 0]) for v in (x, B, C))
    turn = None if angle is None else dense(angle[:, 0])
    scalars = [None if v is None else v[:, 0] for v in (log_decay, gamma, beta)]
    lengths = None if lengths is None else lengths.contiguous()
    batch, heads, rank, width = x.shape
    y = torch.empty(batch, 1, heads, rank, width, device=x.device, dtype=x.dtype)
    state_dim = B.shape[-1]
    step_kernels.step_kernel[batch, heads](
        x, B, C, *scalars, turn, y, state.h, state.x, state.B, state.angle, lengths,
        *x.stride()[:3], *B.stride()[:3], *C.stride()[:3],
        *(stride for v in (*scalars, turn) for stride in ((0, 0) if v is None else v.stride()[:2])),
        p=width, n=state_dim, pairs=0 if turn is None else turn.shape[-1], RANK=rank,
        HEADS_OF_GROUP=heads // B.shape[1], P=triton.next_power_of_2(width),
        N=triton.next_power_of_2(state_dim), num_warps=4 if width * state_dim <= 64 * 128 else 8,
    )  # fmt: skip
    return y, state


def copied(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def dense(x: Tensor) -> Tensor:
    """Neighbours in the last dimension side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()
