"""The Triton kernels of SKA. `triton.py` launches them; README.md derives what they compute.

All work on one chunk of one head. Tokens lie in slots `[chunk * S + s, head, dim]`; the sums
G, M and C of a chunk lie end to end in one row of 2 r^2 + P r floats. Tile widths R and PW are the
next powers of two of r and P; what lies beyond is zero.

What a chunk starts from is whitened: with F' F = (G + ridge I)^-1, the place of G, M and C is taken
by F, F M F' and C F'. Tokens follow as k F'. Nothing is then larger than the answer asks for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from echo_lm.ops.products import mm


@triton.jit
def load_slots(
    x, chunk, head, slot_stride, head_stride, width, S: tl.constexpr, W: tl.constexpr,
    AHEAD: tl.constexpr = 0,
):  # fmt: skip
    """The tokens of a chunk as an fp32 tile [S, W]; or those AHEAD of them, zero outside of it."""
    s, columns = tl.arange(0, S), tl.arange(0, W)
    slots = chunk.to(tl.int64) * S + s + AHEAD
    places = slots[:, None] * slot_stride + head * head_stride + columns[None, :]
    known = (s[:, None] < S - AHEAD) & (columns[None, :] < width)
    return tl.load(x + places, mask=known, other=0.0).to(tl.float32)


@triton.jit
def store_slots(
    x, tile, chunk, head, slot_stride, head_stride, width, S: tl.constexpr, W: tl.constexpr
):
    slots = chunk.to(tl.int64) * S + tl.arange(0, S)
    columns = tl.arange(0, W)
    places = slots[:, None] * slot_stride + head * head_stride + columns[None, :]
    tl.store(x + places, tile.to(x.dtype.element_ty), mask=columns[None, :] < width)


@triton.jit
def load_before(
    k, last_key, first_row, phase, left, chunk, head, heads, slot_stride, head_stride, width,
    S: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """The predecessor of each key of a chunk; a row's first token follows the state's last key.

    If sums fade, the first slot's lies in the chunk before and has faded by the root of what is
    `left` of the sums.
    """
    slots = chunk.to(tl.int64) * S + tl.arange(0, S) - 1
    columns = tl.arange(0, W)
    places = slots[:, None] * slot_stride + head * head_stride + columns[None, :]
    known = (slots[:, None] >= 0) & (columns[None, :] < width)
    before = tl.load(k + places, mask=known, other=0.0).to(tl.float32)
    row = tl.load(first_row + chunk).to(tl.int64)
    of_state = (row * heads + head) * width + columns
    last = tl.load(last_key + of_state, mask=columns < tl.where(row >= 0, width, 0), other=0.0)
    starts = tl.arange(0, S) == tl.where(row >= 0, tl.load(phase + chunk), -1)
    before = tl.where(starts[:, None], last[None, :], before)
    if left is not None:
        root = tl.sqrt(tl.load(left + chunk.to(tl.int64) * heads + head))
        before = tl.where((tl.arange(0, S) == 0)[:, None], root * before, before)
    return before


@triton.jit
def start_of(first_row, phase, chunk):
    """The slot of a chunk's first token: a row may begin inside a chunk."""
    return tl.where(tl.load(first_row + chunk) >= 0, tl.load(phase + chunk), 0)


@triton.jit
def load_matrix(x, height, width, H: tl.constexpr, W: tl.constexpr):
    """A row-major [height, width] matrix as a tile [H, W]."""
    i, j = tl.arange(0, H), tl.arange(0, W)
    inside = (i[:, None] < height) & (j[None, :] < width)
    return tl.load(x + i[:, None] * width + j[None, :], mask=inside, other=0.0)


@triton.jit
def store_matrix(x, tile, height, width, H: tl.constexpr, W: tl.constexpr):
    i, j = tl.arange(0, H), tl.arange(0, W)
    inside = (i[:, None] < height) & (j[None, :] < width)
    tl.store(x + i[:, None] * width + j[None, :], tile, mask=inside)


@triton.jit
def sums_kernel(
    k, v, last_key, first_row, phase, left, sums, k_slot, k_head, v_slot, v_head,
    r: tl.constexpr, p: tl.constexpr, S: tl.constexpr, R: tl.constexpr, PW: tl.constexpr,
    PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """G, M and C of each chunk by itself."""
    chunk, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    K = load_slots(k, chunk, head, k_slot, k_head, r, S, R)
    K_before = load_before(
        k, last_key, first_row, phase, left, chunk, head, heads, k_slot, k_head, r, S, R
    )
    V = load_slots(v, chunk, head, v_slot, v_head, p, S, PW)
    base = sums + (chunk.to(tl.int64) * heads + head) * (2 * r * r + p * r)
    store_matrix(base, mm(K, K, PRECISION, EXACT, EXACT, A_T=True), r, r, R, R)
    M = mm(K, K_before, PRECISION, EXACT, EXACT if left is None else False, A_T=True)
    store_matrix(base + r * r, M, r, r, R, R)
    store_matrix(base + 2 * r * r, mm(V, K, PRECISION, EXACT, EXACT, A_T=True), p, r, PW, R)


@triton.jit
def scan_kernel(
    sums, initial, final, first_chunk, chunks, left, before, dleft, floats,
    REVERSE: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Replace each chunk's sums by those before it (behind it if REVERSE) in its row, in place.

    Before each chunk no more is `left` of what precedes it; in REVERSE gradients fade likewise on
    their way back, and meet the sums `before` each chunk in the gradient of that share.
    """
    row, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < floats
    start = tl.load(first_chunk + row).to(tl.int64)
    count = tl.load(chunks + row)
    of_row = (row.to(tl.int64) * heads + head) * floats + columns
    running = tl.load(initial + of_row, mask=inside, other=0.0)
    for begin in range(0, count, AHEAD):
        own = ()
        for i in tl.static_range(AHEAD):
            place = begin + i
            chunk = start + (count - 1 - place if REVERSE else place)
            here = columns < tl.where(place < count, floats, 0)
            places = (chunk * heads + head) * floats + columns
            own = own + (tl.load(sums + places, mask=here, other=0.0),)
        for i in tl.static_range(AHEAD):
            place = begin + i
            chunk = start + (count - 1 - place if REVERSE else place)
            here = columns < tl.where(place < count, floats, 0)
            of_chunk = chunk * heads + head
            share = 1.0
            if left is not None:
                share = tl.load(left + of_chunk, mask=place < count, other=1.0)
            if left is not None and not REVERSE:
                running = share * running
            tl.store(sums + of_chunk * floats + columns, running, mask=here)
            running = running + own[i]
            if before is not None:
                sum_before = tl.load(before + of_chunk * floats + columns, mask=here, other=0.0)
                part = dleft + of_chunk * tl.num_programs(2) + tl.program_id(2)
                tl.store(part, tl.sum(sum_before * running) / share, mask=place < count)
            if left is not None and REVERSE:
                running = share * running
    tl.store(final + of_row, running, mask=inside)


@triton.jit
def guarded(diagonal, floor, PRECISION: tl.constexpr):
    """What to add to a diagonal so that rounding leaves the matrix positive definite.

    Its least eigenvalue is `floor`. While rounding takes less than that, the guard is quadratic in
    it, far below what is lost anyway; beyond, it is about what is lost. Each entry has its own, so
    that a later token cannot change what an earlier one reads.
    """
    noise = 2.0**-14 if PRECISION == "bf16x3" else 2.0**-17
    lost = noise * diagonal / floor
    return floor * lost * tl.where(lost > 1.0, 1.0, lost)


@triton.jit
def inverse_factor(a, floor):
    """F with F' F = a^-1, lower triangular, for a positive definite 16 x 16 tile.

    No pivot of `a` is below `floor` in exact arithmetic; one that rounding brought there is raised.
    """
    i = tl.arange(0, 16)
    inverse = (i[:, None] == i[None, :]).to(tl.float32)
    scale = tl.zeros([16], tl.float32)
    for j in range(16):
        row = tl.sum(tl.where(i[:, None] == j, a, 0.0), 0)
        column = tl.sum(tl.where(i[None, :] == j, a, 0.0), 1)
        inverse_row = tl.sum(tl.where(i[:, None] == j, inverse, 0.0), 0)
        pivot = tl.sum(tl.where(i == j, row, 0.0), 0)
        pivot = tl.where(pivot < floor, floor, pivot)
        factor = tl.where(i > j, column / pivot, 0.0)
        a -= factor[:, None] * row[None, :]
        inverse -= factor[:, None] * inverse_row[None, :]
        scale = tl.where(i == j, 1.0 / tl.sqrt(pivot), scale)
    return inverse * scale[:, None]


@triton.jit
def load_diagonal_block(gram, ridge, start, r, PRECISION: tl.constexpr):
    """A 16 x 16 block on the diagonal of G + ridge I, guarded; beyond r it is ridge I."""
    i = tl.arange(0, 16)
    places = start + i
    known = (places[:, None] < r) & (places[None, :] < r)
    block = tl.load(gram + places[:, None] * r + places[None, :], mask=known, other=0.0)
    raised = block + ridge + guarded(block, ridge, PRECISION)
    return tl.where(i[:, None] == i[None, :], raised, block)


@triton.jit
def load_rows(x, start, width, below, W: tl.constexpr):
    """16 rows of a square matrix, up to column `below`."""
    rows, columns = start + tl.arange(0, 16), tl.arange(0, W)
    known = (rows[:, None] < width) & (columns[None, :] < below)
    return tl.load(x + rows[:, None] * width + columns[None, :], mask=known, other=0.0)


@triton.jit
def inverse_cholesky_kernel(
    sums, ridge, ridge_chunk, ridge_head,
    r: tl.constexpr, p: tl.constexpr, R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """F = L^-1 of the Cholesky factor L of G + ridge I, in the place of each G.

    16 rows at a time: with rows g and diagonal block d of G, l = g F' are the rows of L,
    s = d - l l' is the Schur complement, and s^-1/2 [-l F, I] are the next rows of F. (Growing
    X = F' F itself would be cheaper, but its error enters s multiplied by the condition number,
    that of F by its root.)
    """
    chunk, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    gram = sums + (chunk.to(tl.int64) * heads + head) * (2 * r * r + p * r)
    lam = tl.load(ridge + chunk * ridge_chunk + head * ridge_head)
    i, j = tl.arange(0, 16), tl.arange(0, R)
    F = tl.zeros([R, R], tl.float32)
    for start in range(0, r, 16):
        l = mm(load_rows(gram, start, r, start, R), F, PRECISION, B_T=True)
        s = load_diagonal_block(gram, lam, start, r, PRECISION) - mm(l, l, PRECISION, B_T=True)
        unit = tl.where(j[None, :] == start + i[:, None], 1.0, 0.0)
        rows = mm(inverse_factor(s, lam), unit - mm(l, F, PRECISION), PRECISION)
        F += mm(unit, rows, PRECISION, A_T=True)
    tl.debug_barrier()
    store_matrix(gram, F, r, r, R, R)


@triton.jit
def whiten_kernel(
    sums, r: tl.constexpr, p: tl.constexpr, R: tl.constexpr, PW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """F M F' and C F' in the place of M and C."""
    chunk, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    base = sums + (chunk.to(tl.int64) * heads + head) * (2 * r * r + p * r)
    F = load_matrix(base, r, r, R, R)
    A = mm(F, load_matrix(base + r * r, r, r, R, R), PRECISION)
    A = mm(A, F, PRECISION, B_T=True)
    C = mm(load_matrix(base + 2 * r * r, p, r, PW, R), F, PRECISION, B_T=True)
    tl.debug_barrier()
    store_matrix(base + r * r, A, r, r, R, R)
    store_matrix(base + 2 * r * r, C, p, r, PW, R)


@triton.jit
def factor_kernel(
    k, sums, e, e_rest, k_slot, k_head, e_slot, e_head,
    r: tl.constexpr, p: tl.constexpr, S: tl.constexpr, R: tl.constexpr,
    PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The rows e_s of E, with X_t = I - sum_{s<=t} e_s e_s' in whitened coordinates.

    They lie where tokens do, as bf16 and what that leaves of them, unless fp32 holds them whole.
    Sixteen tokens at a time: E = s K X with s' s = (I + K X K')^-1, then X -= E' E.
    """
    chunk, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    of_chunk = chunk.to(tl.int64) * heads + head
    # Transposed in registers: what one warp multiplies does not pass through shared memory.
    whitener = tl.trans(load_matrix(sums + of_chunk * (2 * r * r + p * r), r, r, R, R))
    i, j = tl.arange(0, 16), tl.arange(0, R)
    X = (tl.arange(0, R)[:, None] == j[None, :]).to(tl.float32)
    for block in range(S // 16):
        slots = chunk.to(tl.int64) * S + block * 16 + i
        places = slots[:, None] * k_slot + head * k_head + j[None, :]
        K = tl.load(k + places, mask=j[None, :] < r, other=0.0).to(tl.float32)
        K = mm(K, whitener, PRECISION, EXACT)
        KX = mm(K, X, PRECISION)
        KXK = mm(KX, tl.trans(K), PRECISION)
        energy = tl.sum(K * K, 1)[:, None]
        raised = KXK + 1.0 + guarded(energy, 1.0, PRECISION)
        own = i[:, None] == i[None, :]
        E = mm(inverse_factor(tl.where(own, raised, KXK), 1.0), KX, PRECISION)
        places = slots[:, None] * e_slot + head * e_head + j[None, :]
        tl.store(e + places, E.to(e.dtype.element_ty), mask=j[None, :] < r)
        if e_rest is not None:
            rest = E - E.to(e.dtype.element_ty).to(tl.float32)
            tl.store(e_rest + places, rest.to(e.dtype.element_ty), mask=j[None, :] < r)
        X -= mm(tl.trans(E), E, PRECISION)


@triton.jit
def load_factor(e, e_rest, chunk, head, e_slot, e_head, r, S: tl.constexpr, R: tl.constexpr):
    E = load_slots(e, chunk, head, e_slot, e_head, r, S, R)
    if e_rest is not None:
        E += load_slots(e_rest, chunk, head, e_slot, e_head, r, S, R)
    return E


@triton.jit
def apply_inverse(p, E, past, PRECISION: tl.constexpr):
    """p_t -> X_t p_t"""
    scores = tl.where(past, mm(p, E, PRECISION, B_T=True), 0.0)
    return p - mm(scores, E, PRECISION)


@triton.jit
def apply_sum(
    p, initial, left, right, past, PRECISION: tl.constexpr,
    P_EXACT: tl.constexpr = False, LEFT_EXACT: tl.constexpr = False,
    RIGHT_EXACT: tl.constexpr = False, INITIAL_T: tl.constexpr = False,
):  # fmt: skip
    """p_t -> (initial + sum_{s<=t} left_s right_s')' p_t, for rows left and right."""
    scores = tl.where(past, mm(p, left, PRECISION, P_EXACT, LEFT_EXACT, B_T=True), 0.0)
    product = mm(p, initial, PRECISION, P_EXACT, B_T=INITIAL_T)
    return product + mm(scores, right, PRECISION, False, RIGHT_EXACT)


@triton.jit
def exact_forward_kernel(
    q, k, v, last_key, first_row, phase, left, sums, e, e_rest, coef, y,
    q_slot, q_head, k_slot, k_head, v_slot, v_head, e_slot, e_head, y_slot, y_head,
    r: tl.constexpr, p: tl.constexpr, S: tl.constexpr, R: tl.constexpr, PW: tl.constexpr,
    ORDER: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """y_t = C_t sum_j c_j u_{j,t},  u_0 = X_t q_t,  u_j = X_t M_t u_{j-1}"""
    chunk, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    of_chunk = chunk.to(tl.int64) * heads + head
    base = sums + of_chunk * (2 * r * r + p * r)
    past = tl.arange(0, S)[:, None] >= tl.arange(0, S)[None, :]
    F = load_matrix(base, r, r, R, R)
    E = load_factor(e, e_rest, chunk, head, e_slot, e_head, r, S, R)
    Q = load_slots(q, chunk, head, q_slot, q_head, r, S, R)
    u = apply_inverse(mm(Q, F, PRECISION, EXACT, B_T=True), E, past, PRECISION)
    K = load_slots(k, chunk, head, k_slot, k_head, r, S, R)
    K = mm(K, F, PRECISION, EXACT, B_T=True)
    mixed = tl.load(coef + head * (ORDER + 1)) * u
    if ORDER > 0:
        M = load_matrix(base + r * r, r, r, R, R)
        K_before = load_before(
            k, last_key, first_row, phase, left, chunk, head, heads, k_slot, k_head, r, S, R
        )
        K_before = mm(K_before, F, PRECISION, EXACT if left is None else False, B_T=True)
        for j in tl.static_range(1, ORDER + 1):
            u = apply_sum(u, M, K_before, K, past, PRECISION, INITIAL_T=True)
            u = apply_inverse(u, E, past, PRECISION)
            mixed += tl.load(coef + head * (ORDER + 1) + j) * u
    C = load_matrix(base + 2 * r * r, p, r, PW, R)
    V = load_slots(v, chunk, head, v_slot, v_head, p, S, PW)
    answer = apply_sum(mixed, C, K, V, past, PRECISION, RIGHT_EXACT=EXACT, INITIAL_T=True)
    store_slots(y, answer, chunk, head, y_slot, y_head, p, S, PW)


@triton.jit
def exact_backward_kernel(
    q, k, v, last_key, first_row, phase, left, sums, e, e_rest, coef, dy, chains,
    dq, dk, dv, seams, dcoef, dridge, q_slot, q_head, k_slot, k_head, v_slot, v_head,
    dy_slot, dy_head, key_slot, key_head, value_slot, value_head, chunks, heads,
    r: tl.constexpr, p: tl.constexpr, S: tl.constexpr, R: tl.constexpr, PW: tl.constexpr,
    ORDER: tl.constexpr, PRECISION: tl.constexpr, LOCAL: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Gradients inside each chunk, and those of its initial sums in the place of these.

    The chains u_j and z_j = X_t dL/du_j first, of which all else is made: dq = z_0,
    dL/dG_t = -sum_j z_j u_j' and dL/dM_t = sum_j z_j u_{j-1}', handed to every token s <= t. A
    program goes from chunk to chunk, and keeps the chains of one of them at a time. dq and dk may
    take the place of E. What is loaded twice would not fit registers in between.
    Scores may cancel and take the better PRECISION; what is summed up of them takes LOCAL.
    """
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    us = chains + program * ((2 * ORDER + 3) * S * r)
    zs = us + (ORDER + 1) * S * r
    past = tl.arange(0, S)[:, None] >= tl.arange(0, S)[None, :]
    for turn in range(0, tl.cdiv(chunks * heads - tl.program_id(0), programs)):
        of_chunk = program + turn * programs
        chunk, head = of_chunk // heads, of_chunk % heads
        base = sums + of_chunk * (2 * r * r + p * r)
        F = load_matrix(base, r, r, R, R)
        K = load_slots(k, chunk, head, k_slot, k_head, r, S, R)
        K = mm(K, F, PRECISION, EXACT, B_T=True)
        K_before = load_before(
            k, last_key, first_row, phase, left, chunk, head, heads, k_slot, k_head, r, S, R
        )
        K_before = mm(K_before, F, PRECISION, EXACT if left is None else False, B_T=True)
        E = load_factor(e, e_rest, chunk, head, key_slot, key_head, r, S, R)

        C = load_matrix(base + 2 * r * r, p, r, PW, R)
        V = load_slots(v, chunk, head, v_slot, v_head, p, S, PW)
        dY = load_slots(dy, chunk, head, dy_slot, dy_head, p, S, PW)
        dmixed = apply_sum(dY, C, V, K, past, PRECISION, P_EXACT=EXACT, LEFT_EXACT=EXACT)
        M = load_matrix(base + r * r, r, r, R, R)
        u = load_slots(q, chunk, head, q_slot, q_head, r, S, R)
        u = mm(u, F, PRECISION, EXACT, B_T=True)
        for j in tl.static_range(ORDER + 1):
            if j > 0:
                u = apply_sum(u, M, K_before, K, past, PRECISION, INITIAL_T=True)
            u = apply_inverse(u, E, past, PRECISION)
            store_matrix(us + j * S * r, u, S, r, S, R)
            tl.store(dcoef + of_chunk * (ORDER + 1) + j, tl.sum(dmixed * u))
        z = tl.zeros([S, R], tl.float32)
        for j in tl.static_range(ORDER, -1, -1):
            g = tl.load(coef + head * (ORDER + 1) + j) * dmixed
            if j < ORDER:
                g += apply_sum(z, M, K, K_before, past, PRECISION)
            z = apply_inverse(g, E, past, PRECISION)
            store_matrix(zs + j * S * r, z, S, r, S, R)
        tl.debug_barrier()
        dQ = mm(z, load_matrix(base, r, r, R, R), PRECISION)
        store_slots(dq, dQ, chunk, head, key_slot, key_head, r, S, R)

        undone = tl.zeros([S, R], tl.float32)
        dK_before = tl.zeros([S, R], tl.float32)
        for j in tl.static_range(ORDER + 1):
            u = load_matrix(us + j * S * r, S, r, S, R)
            z = load_matrix(zs + j * S * r, S, r, S, R)
            met = tl.where(past, mm(z, K, PRECISION, B_T=True), 0.0)
            seen = tl.where(past, mm(u, K, PRECISION, B_T=True), 0.0)
            undone += mm(met, u, LOCAL, A_T=True)
            if j > 0:
                earlier = load_matrix(us + (j - 1) * S * r, S, r, S, R)
                seen -= tl.where(past, mm(earlier, K_before, PRECISION, B_T=True), 0.0)
                dK_before += mm(met, earlier, LOCAL, A_T=True)
            undone += mm(seen, z, LOCAL, A_T=True)

        mixed = tl.load(coef + head * (ORDER + 1)) * load_matrix(us, S, r, S, R)
        for j in tl.static_range(1, ORDER + 1):
            c = tl.load(coef + head * (ORDER + 1) + j)
            mixed += c * load_matrix(us + j * S * r, S, r, S, R)
        V = load_slots(v, chunk, head, v_slot, v_head, p, S, PW)
        dY = load_slots(dy, chunk, head, dy_slot, dy_head, p, S, PW)
        answers = tl.where(past, mm(dY, V, PRECISION, EXACT, EXACT, B_T=True), 0.0)
        dK = mm(answers, mixed, LOCAL, A_T=True) - undone
        recalled = tl.where(past, mm(mixed, K, PRECISION, B_T=True), 0.0)
        dV = mm(recalled, dY, LOCAL, False, EXACT, A_T=True)
        store_slots(dv, dV, chunk, head, value_slot, value_head, p, S, PW)
        F = load_matrix(base, r, r, R, R)
        dC = mm(mm(dY, mixed, LOCAL, EXACT, A_T=True), F, PRECISION)
        store_matrix(base + 2 * r * r, dC, p, r, PW, R)

        # What a predecessor receives is shifted to its own slot, that of the first to the seam.
        shifted = zs + (ORDER + 1) * S * r
        store_matrix(shifted, dK_before, S, r, S, R)
        tl.debug_barrier()
        dK += load_matrix(shifted + r, S - 1, r, S, R)
        store_slots(dk, mm(dK, F, PRECISION), chunk, head, key_slot, key_head, r, S, R)
        seam = load_matrix(shifted + start_of(first_row, phase, chunk) * r, r, 1, R, 1)
        store_matrix(seams + of_chunk * r, tl.sum(seam * F, 0)[None, :], 1, r, 1, R)

        dG = tl.zeros([R, R], tl.float32)
        dM = tl.zeros([R, R], tl.float32)
        for j in tl.static_range(ORDER + 1):
            z = load_matrix(zs + j * S * r, S, r, S, R)
            dG += mm(z, load_matrix(us + j * S * r, S, r, S, R), LOCAL, A_T=True)
            if j > 0:
                dM += mm(z, load_matrix(us + (j - 1) * S * r, S, r, S, R), LOCAL, A_T=True)
        dlam = store_sum_gradients(base, F, -dG, dM, r, R, PRECISION)
        tl.store(dridge + of_chunk, dlam)


@triton.jit
def store_sum_gradients(base, F, dG, dM, r, R: tl.constexpr, PRECISION: tl.constexpr):
    """Of G and M, out of whitened coordinates, in their place; returns the ridge's gradient."""
    dGF = mm(dG, F, PRECISION)
    dMF = mm(dM, F, PRECISION)
    tl.debug_barrier()
    store_matrix(base, mm(F, dGF, PRECISION, A_T=True), r, r, R, R)
    store_matrix(base + r * r, mm(F, dMF, PRECISION, A_T=True), r, r, R, R)
    return tl.sum(F * dGF)


@triton.jit
def mix_terms(
    base, coef, r, p, R: tl.constexpr, PW: tl.constexpr, ORDER: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The terms T_j = C A^j of the whitened read-out, and sum_j c_j T_j."""
    term = load_matrix(base + 2 * r * r, p, r, PW, R)
    terms = (term,)
    mixed = tl.load(coef) * term
    if ORDER > 0:
        A = load_matrix(base + r * r, r, r, R, R)
        for j in tl.static_range(1, ORDER + 1):
            term = mm(term, A, PRECISION)
            terms = terms + (term,)
            mixed += tl.load(coef + j) * term
    return terms, mixed


@triton.jit
def chunk_forward_kernel(
    q, sums, coef, first_row, phase, last_row, readout_begun, readout, y,
    q_slot, q_head, y_slot, y_head,
    r: tl.constexpr, p: tl.constexpr, S: tl.constexpr, R: tl.constexpr, PW: tl.constexpr,
    ORDER: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """y = Q W' with W from the sums before the chunk, or the one a half-read chunk began with."""
    chunk, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row_begun = tl.where(tl.load(phase + chunk) > 0, tl.load(first_row + chunk), -1).to(tl.int64)
    row_ended = tl.load(last_row + chunk).to(tl.int64)
    if row_begun >= 0:
        W = load_matrix(readout_begun + (row_begun * heads + head) * p * r, p, r, PW, R)
    else:
        base = sums + (chunk.to(tl.int64) * heads + head) * (2 * r * r + p * r)
        _, mixed = mix_terms(base, coef + head * (ORDER + 1), r, p, R, PW, ORDER, PRECISION)
        W = mm(mixed, load_matrix(base, r, r, R, R), PRECISION)
    if row_ended >= 0:
        store_matrix(readout + (row_ended * heads + head) * p * r, W, p, r, PW, R)
    Q = load_slots(q, chunk, head, q_slot, q_head, r, S, R)
    answer = mm(Q, W, PRECISION, EXACT, B_T=True)
    store_slots(y, answer, chunk, head, y_slot, y_head, p, S, PW)


@triton.jit
def chunk_backward_kernel(
    q, sums, coef, first_row, phase, last_row, readout_begun, dy, dreadout,
    dq, dbegun, dcoef, dridge, q_slot, q_head, dy_slot, dy_head, key_slot, key_head,
    r: tl.constexpr, p: tl.constexpr, S: tl.constexpr, R: tl.constexpr, PW: tl.constexpr,
    ORDER: tl.constexpr, PRECISION: tl.constexpr, LOCAL: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """dq, and the gradients of a chunk's initial sums in the place of these.

    The terms T_j play the part that u_j plays in exact mode, and their gradients that of z_j.
    """
    chunk, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    of_chunk = chunk.to(tl.int64) * heads + head
    base, coefs = sums + of_chunk * (2 * r * r + p * r), coef + head * (ORDER + 1)
    row_begun = tl.where(tl.load(phase + chunk) > 0, tl.load(first_row + chunk), -1).to(tl.int64)
    row_ended = tl.load(last_row + chunk).to(tl.int64)
    terms, mixed = mix_terms(base, coefs, r, p, R, PW, ORDER, PRECISION)
    if row_begun >= 0:
        W = load_matrix(readout_begun + (row_begun * heads + head) * p * r, p, r, PW, R)
    else:
        W = mm(mixed, load_matrix(base, r, r, R, R), PRECISION)
    dY = load_slots(dy, chunk, head, dy_slot, dy_head, p, S, PW)
    store_slots(dq, mm(dY, W, LOCAL, EXACT), chunk, head, key_slot, key_head, r, S, R)
    Q = load_slots(q, chunk, head, q_slot, q_head, r, S, R)
    dW = mm(dY, Q, PRECISION, EXACT, EXACT, A_T=True)
    if row_ended >= 0:
        dW += load_matrix(dreadout + (row_ended * heads + head) * p * r, p, r, PW, R)
    if row_begun >= 0:
        store_matrix(dbegun + (row_begun * heads + head) * p * r, dW, p, r, PW, R)
    # The sums have no part in a W that an earlier call has made.
    dmixed = mm(dW, load_matrix(base, r, r, R, R), PRECISION, B_T=True)
    dmixed = tl.where(row_begun >= 0, 0.0, dmixed)
    for j in tl.static_range(ORDER + 1):
        tl.store(dcoef + of_chunk * (ORDER + 1) + j, tl.sum(dmixed * terms[j]))
    dG = tl.zeros([R, R], tl.float32)
    dM = tl.zeros([R, R], tl.float32)
    dT = tl.load(coefs + ORDER) * dmixed
    for j in tl.static_range(ORDER, -1, -1):
        dG += mm(terms[j], dT, LOCAL, A_T=True)
        if j > 0:
            dM += mm(terms[j - 1], dT, LOCAL, A_T=True)
            A = load_matrix(base + r * r, r, r, R, R)
            dT = tl.load(coefs + j - 1) * dmixed + mm(dT, A, PRECISION, B_T=True)
    F = load_matrix(base, r, r, R, R)
    dC = mm(dT, F, PRECISION)
    dlam = store_sum_gradients(base, F, -dG, dM, r, R, PRECISION)
    store_matrix(base + 2 * r * r, dC, p, r, PW, R)
    tl.store(dridge + of_chunk, dlam)


@triton.jit
def spread_kernel(
    k, v, last_key, first_row, phase, left, sums, dk, dv, seams,
    k_slot, k_head, v_slot, v_head, key_slot, key_head, value_slot, value_head,
    r: tl.constexpr, p: tl.constexpr, S: tl.constexpr, R: tl.constexpr, PW: tl.constexpr,
    PRECISION: tl.constexpr, EXACT: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Hand the gradients of all later sums to the tokens that entered them.

    dk = (dG + dG') k + dM k_before + dM' k_after + dC' v,  dv = dC k. The key after a chunk's last
    one is in the sums of the next chunk: what it hands to its predecessor goes to the seam.
    """
    chunk, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    of_chunk = chunk.to(tl.int64) * heads + head
    base = sums + of_chunk * (2 * r * r + p * r)
    K = load_slots(k, chunk, head, k_slot, k_head, r, S, R)
    K_before = load_before(
        k, last_key, first_row, phase, left, chunk, head, heads, k_slot, k_head, r, S, R
    )
    K_after = load_slots(k, chunk, head, k_slot, k_head, r, S, R, AHEAD=1)
    V = load_slots(v, chunk, head, v_slot, v_head, p, S, PW)
    dG = load_matrix(base, r, r, R, R)
    dM = load_matrix(base + r * r, r, r, R, R)
    dC = load_matrix(base + 2 * r * r, p, r, PW, R)
    dK = mm(K, dG + tl.trans(dG), PRECISION, EXACT)
    dK += mm(K_before, dM, PRECISION, EXACT if left is None else False, B_T=True)
    dK += mm(K_after, dM, PRECISION, EXACT)
    dK += mm(V, dC, PRECISION, EXACT)
    dV = mm(K, dC, PRECISION, EXACT, B_T=True)
    start = chunk.to(tl.int64) * S + start_of(first_row, phase, chunk)
    first = load_matrix(k + start * k_slot + head * k_head, r, 1, R, 1).to(tl.float32)
    seam = tl.sum(first * dM, 0)[None, :]
    if ADD:
        dK += load_slots(dk, chunk, head, key_slot, key_head, r, S, R)
        dV += load_slots(dv, chunk, head, value_slot, value_head, p, S, PW)
        seam += load_matrix(seams + of_chunk * r, 1, r, 1, R)
    store_slots(dk, dK, chunk, head, key_slot, key_head, r, S, R)
    store_slots(dv, dV, chunk, head, value_slot, value_head, p, S, PW)
    store_matrix(seams + of_chunk * r, seam, 1, r, 1, R)
