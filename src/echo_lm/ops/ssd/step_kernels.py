"""The Triton kernel of one step of the scan, in place; `step.py` launches it."""

from __future__ import annotations

import triton
import triton.language as tl

FULL_TURN = tl.constexpr(6.283185307179586)


@triton.jit
def load_turned(x, angle, n: tl.constexpr, pairs: tl.constexpr, N: tl.constexpr):
    """A vector whose first pairs of coordinates (2i, 2i+1) are turned by their angles."""
    j = tl.arange(0, N)
    vector = tl.load(x + j, mask=j < n, other=0.0).to(tl.float32)
    if pairs == 0:
        return vector
    else:
        turned = j < 2 * pairs
        partner = tl.load(x + (j ^ 1), mask=turned, other=0.0).to(tl.float32)
        across = tl.where(j % 2 == 0, -partner, partner) * tl.sin(angle)
        return tl.where(turned, vector * tl.cos(angle) + across, vector)


@triton.jit
def step_kernel(
    x, B, C, log_decay, gamma, beta, turn, y, h, last_x, last_B, angle, lengths,
    x_row, x_head, x_rank, B_row, B_group, B_rank, C_row, C_group, C_rank,
    decay_row, decay_head, gamma_row, gamma_head, beta_row, beta_head, turn_row, turn_head,
    p: tl.constexpr, n: tl.constexpr, pairs: tl.constexpr, RANK: tl.constexpr,
    HEADS_OF_GROUP: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """h <- a (h + beta u_before) + gamma u with u = sum_r x^r (B^r)', then y^r = h C^r."""
    row, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    of_head = row * heads + head
    group = head // HEADS_OF_GROUP
    i, j = tl.arange(0, P), tl.arange(0, N)
    active = tl.full((), True, tl.int1)
    if lengths is not None:
        active = tl.load(lengths + row) > 0
    known_p, known_n = tl.where(active, p, 0), tl.where(active, n, 0)
    decay = tl.exp(tl.load(log_decay + row * decay_row + head * decay_head).to(tl.float32))
    weight = tl.load(gamma + row * gamma_row + head * gamma_head).to(tl.float32)

    theta = tl.zeros([N], tl.float32)
    if pairs > 0:
        reached = tl.load(angle + of_head * pairs + j // 2, mask=j < 2 * pairs, other=0.0)
        more = turn + row * turn_row + head * turn_head + j // 2
        reached += tl.load(more, mask=j < tl.where(active, 2 * pairs, 0), other=0.0).to(tl.float64)
        reached -= tl.floor(reached / FULL_TURN) * FULL_TURN
        theta = reached.to(tl.float32)
        tl.debug_barrier()
        tl.store(angle + of_head * pairs + j // 2, reached, mask=(j < 2 * pairs) & (j % 2 == 0))

    places = h + of_head * p * n + i[:, None] * n + j[None, :]
    inside = (i[:, None] < p) & (j[None, :] < n)
    old = tl.load(places, mask=inside, other=0.0)
    new = old
    if beta is not None:
        share = tl.load(beta + row * beta_row + head * beta_head).to(tl.float32)
        for k in tl.static_range(RANK):
            x_before = tl.load(last_x + (of_head * RANK + k) * p + i, mask=i < p, other=0.0)
            B_before = tl.load(last_B + (of_head * RANK + k) * n + j, mask=j < n, other=0.0)
            new += share * x_before[:, None] * B_before[None, :]
        tl.debug_barrier()
    new = decay * new
    for k in tl.static_range(RANK):
        x_k = x + row * x_row + head * x_head + k * x_rank
        X = tl.load(x_k + i, mask=i < p, other=0.0).to(tl.float32)
        B_k = load_turned(B + row * B_row + group * B_group + k * B_rank, theta, n, pairs, N)
        new += (weight * X)[:, None] * B_k[None, :]
        if beta is not None:
            tl.store(last_x + (of_head * RANK + k) * p + i, X, mask=i < known_p)
            tl.store(last_B + (of_head * RANK + k) * n + j, B_k, mask=j < known_n)
    new = tl.where(active, new, old)
    tl.store(places, new, mask=inside)
    for k in tl.static_range(RANK):
        C_k = load_turned(C + row * C_row + group * C_group + k * C_rank, theta, n, pairs, N)
        answer = tl.where(active, tl.sum(new * C_k[None, :], 1), 0.0)
        tl.store(y + (of_head * RANK + k) * p + i, answer.to(y.dtype.element_ty), mask=i < p)
