"""The Triton kernels of one SKA step, in place; `step.py` launches them.

One program for each row and head. The first kernel does what a chunk begins with and returns at
once in all other rows, the second reads the token and answers it: so rows may stand at different
counts, and no count ever travels to the host, as a CUDA graph demands.
"""

from __future__ import annotations

import triton
import triton.language as tl

from echo_lm.ops.ska.kernels import (
    inverse_factor,
    load_diagonal_block,
    load_matrix,
    load_rows,
    mm,
    store_matrix,
)

SMALLEST_KEY_ENERGY = tl.constexpr(1e-12)
"""That of `problem.py`."""


@triton.jit
def load_vector(x, width, W: tl.constexpr):
    columns = tl.arange(0, W)
    return tl.load(x + columns, mask=columns < width, other=0.0).to(tl.float32)


@triton.jit
def store_vector(x, vector, width, W: tl.constexpr):
    columns = tl.arange(0, W)
    tl.store(x + columns, vector.to(x.dtype.element_ty), mask=columns < width)


@triton.jit
def has_token(lengths, row):
    """Whether this row has a token to read."""
    if lengths is None:
        return tl.full((), True, tl.int1)
    else:
        return tl.load(lengths + row) > 0


@triton.jit
def store_whitener(F, gram, lam, r: tl.constexpr, R: tl.constexpr, PRECISION: tl.constexpr):
    """F = L^-1 of the Cholesky factor L of G + lam I, as `kernels.inverse_cholesky_kernel` has it.

    Its rows are read back 16 at a time, so that the widest fits.
    """
    i, j = tl.arange(0, 16), tl.arange(0, R)
    for start in range(0, r, 16):
        rows = load_rows(gram, start, r, start, R)
        schur = load_diagonal_block(gram, lam, start, r, PRECISION)
        known = tl.where(j[None, :] == start + i[:, None], 1.0, 0.0)
        for before in range(0, start, 16):
            F_before = load_rows(F, before, r, r, R)
            l = mm(rows, tl.trans(F_before), PRECISION)
            schur -= mm(l, tl.trans(l), PRECISION)
            known -= mm(l, F_before, PRECISION)
        F_rows = mm(inverse_factor(schur, lam), known, PRECISION)
        store_rows(F, F_rows, start, r, R)
        tl.debug_barrier()


@triton.jit
def store_rows(x, rows, start, width: tl.constexpr, W: tl.constexpr):
    """16 rows of a square matrix."""
    i, j = start + tl.arange(0, 16), tl.arange(0, W)
    inside = (i[:, None] < width) & (j[None, :] < width)
    tl.store(x + i[:, None] * width + j[None, :], rows, mask=inside)


@triton.jit
def inverse_of(F, r: tl.constexpr, R: tl.constexpr, PRECISION: tl.constexpr):
    """X = F' F"""
    X = tl.zeros([R, R], tl.float32)
    for start in range(0, r, 16):
        rows = load_rows(F, start, r, r, R)
        X += mm(tl.trans(rows), rows, PRECISION)
    return X


@triton.jit
def store_readout(
    W, F, lag, value, coef, r: tl.constexpr, p: tl.constexpr,
    R: tl.constexpr, ORDER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """W = sum_j c_j C X (M X)^j, as C F' (sum_j c_j A^j) F with A = F M F'; 16 rows at a time."""
    for start in range(0, p, 16):
        C = load_matrix(value + start * r, p - start, r, 16, R)
        term = mm(C, tl.trans(load_matrix(F, r, r, R, R)), PRECISION)
        mixed = tl.load(coef) * term
        for j in tl.static_range(1, ORDER + 1):
            term = mm(term, load_matrix(F, r, r, R, R), PRECISION)
            term = mm(term, load_matrix(lag, r, r, R, R), PRECISION)
            term = mm(term, tl.trans(load_matrix(F, r, r, R, R)), PRECISION)
            mixed += tl.load(coef + j) * term
        rows = mm(mixed, load_matrix(F, r, r, R, R), PRECISION)
        store_matrix(W + start * r, rows, p - start, r, 16, R)


@triton.jit
def fade(
    gram, lag, value, last_key, key_energy, share, r: tl.constexpr, p: tl.constexpr,
    R: tl.constexpr, PW: tl.constexpr,
):  # fmt: skip
    """Keep that share of the sums of a head."""
    store_matrix(gram, share * load_matrix(gram, r, r, R, R), r, r, R, R)
    store_matrix(lag, share * load_matrix(lag, r, r, R, R), r, r, R, R)
    store_matrix(value, share * load_matrix(value, p, r, PW, R), p, r, PW, R)
    store_vector(last_key, tl.sqrt(share) * load_vector(last_key, r, R), r, R)
    tl.store(key_energy, share * tl.load(key_energy))


@triton.jit
def begin_kernel(
    k, gram, lag, value, first_key, last_key, key_energy, count, inverse, inverse_ridge, readout,
    whitener, coef, ridge, decay, lengths,
    k_row, k_head, coef_head, ridge_head, decay_head, chunk_size,
    r: tl.constexpr, p: tl.constexpr, R: tl.constexpr, PW: tl.constexpr,
    ORDER: tl.constexpr, RELATIVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Where a row begins a chunk, let its sums fade, and make X (or W) anew from them.

    X is made anew also where it belongs to another ridge. `whitener` is room for F; X needs none.
    """
    row, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    of_head = row * heads + head
    read = tl.load(count + row)
    begins = has_token(lengths, row) & (read % chunk_size == 0)
    lam = tl.load(ridge + head * ridge_head)
    due = begins
    if inverse is not None:
        due = due | (tl.load(inverse_ridge + of_head) != lam)
    if not due:
        return
    fresh = tl.where(begins & (read == 0), r, 0)
    key = load_vector(k + row * k_row + head * k_head, fresh, R)
    store_vector(first_key + of_head * r, key, fresh, R)
    gram += of_head * r * r
    lag += of_head * r * r
    value += of_head * p * r
    if decay is not None:
        share = tl.where(begins, tl.load(decay + head * decay_head), 1.0)
        last = last_key + of_head * r
        fade(gram, lag, value, last, key_energy + of_head, share, r, p, R, PW)
        tl.debug_barrier()
    if RELATIVE == "trace":
        diagonal = tl.load(gram + tl.arange(0, R) * (r + 1), mask=tl.arange(0, R) < r, other=0.0)
        lam *= tl.maximum(tl.sum(diagonal) / r, SMALLEST_KEY_ENERGY)
    elif RELATIVE:
        lam *= tl.maximum(tl.load(key_energy + of_head), SMALLEST_KEY_ENERGY)
    if inverse is not None:
        inverse += of_head * r * r
        store_whitener(inverse, gram, lam, r, R, PRECISION)
        X = inverse_of(inverse, r, R, PRECISION)
        tl.debug_barrier()
        store_matrix(inverse, X, r, r, R, R)
        tl.store(inverse_ridge + of_head, lam)
    else:
        whitener += of_head * r * r
        store_whitener(whitener, gram, lam, r, R, PRECISION)
        W = readout + of_head * p * r
        c = coef + head * coef_head
        store_readout(W, whitener, lag, value, c, r, p, R, ORDER, PRECISION)


@triton.jit
def step_kernel(
    q, k, v, y, gram, lag, value, last_key, key_energy, count, inverse, readout, coef, lengths,
    q_row, q_head, k_row, k_head, v_row, v_head, coef_head,
    r: tl.constexpr, p: tl.constexpr, R: tl.constexpr, PW: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """Add the token to the sums and answer it, in exact mode from them, in chunk mode from W.

    X is symmetric: it is applied along its columns and M along its rows, so that a vector leaves
    one product lying as the next one wants it.
    """
    row, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    of_head = row * heads + head
    active = has_token(lengths, row)
    share = tl.where(active, 1.0, 0.0)
    known = tl.where(active, r, 0)
    key = k + row * k_row + head * k_head
    Q = load_vector(q + row * q_row + head * q_head, r, R)
    K = load_vector(key, known, R)
    V = load_vector(v + row * v_row + head * v_head, p, PW)

    G = load_matrix(gram + of_head * r * r, r, r, R, R)
    store_matrix(gram + of_head * r * r, G + K[:, None] * K[None, :], r, r, R, R)
    before = load_vector(last_key + of_head * r, r, R)
    M = load_matrix(lag + of_head * r * r, r, r, R, R) + K[:, None] * before[None, :]
    store_matrix(lag + of_head * r * r, M, r, r, R, R)
    C = load_matrix(value + of_head * p * r, p, r, PW, R) + V[:, None] * K[None, :]
    store_matrix(value + of_head * p * r, C, p, r, PW, R)

    if inverse is not None:
        X = load_matrix(inverse + of_head * r * r, r, r, R, R)
        XK = tl.sum(X * K[:, None], 0)
        gain = 1.0 / (1.0 + tl.sum(K * XK))
        X -= gain * XK[:, None] * XK[None, :]
        store_matrix(inverse + of_head * r * r, X, r, r, R, R)
        u = tl.sum(X * Q[:, None], 0)
        mixed = tl.load(coef + head * coef_head) * u
        for j in tl.static_range(1, ORDER + 1):
            u = tl.sum(X * tl.sum(M * u[None, :], 1)[:, None], 0)
            mixed += tl.load(coef + head * coef_head + j) * u
        answer = tl.sum(C * mixed[None, :], 1)
    else:
        W = load_matrix(readout + of_head * p * r, p, r, PW, R)
        answer = tl.sum(W * Q[None, :], 1)
    store_vector(y + of_head * p, share * answer, p, PW)

    tl.debug_barrier()
    store_vector(last_key + of_head * r, K, known, R)
    energy = tl.load(key_energy + of_head)
    tl.store(key_energy + of_head, tl.maximum(energy, tl.sum(K * K)))
    if head == 0:
        tl.store(count + row, tl.load(count + row) + tl.where(active, 1, 0))
