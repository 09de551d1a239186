"""The Triton kernels of the scan. `triton.py` launches them; README.md derives what they compute.

A chunk is CHUNK = TOKENS * RANK rows of x, B and C: the ranks of a token are neighbours, between
which nothing decays. Tensors are read where they lie, at strides (batch, token, head, rank). What a
chunk of one head has of its own lies end to end: its gates [4, TOKENS] and its state [p, n]. Tile
widths PW and NW are the next powers of two of p and n; what lies beyond is zero.

Products have a tile of fewer than 64 rows on the left, and none transposes another's result: larger
ones become asynchronous on Hopper, where Triton 3.4 to 3.7 compiled some of those in other people's
gated backward kernels wrongly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from echo_lm.ops.products import mm

LOG2_E = tl.constexpr(1.4426950408889634)
NOTHING_LEFT = tl.constexpr(-1e4)
"""exp of it is 0, and so is that of anything less."""


@triton.jit
def load_rows(
    x, at, batch, head, start, count, first_column, width,
    ROWS: tl.constexpr, RANK: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Rows of one head from row `start`, as a tile [ROWS, W]; `count` tokens exist."""
    rows, columns = start + tl.arange(0, ROWS), first_column + tl.arange(0, W)
    base = x + batch.to(tl.int64) * at[0] + head.to(tl.int64) * at[2]
    places = (rows // RANK).to(tl.int64) * at[1] + (rows % RANK) * at[3]
    inside = (rows < count * RANK)[:, None] & (columns < width)[None, :]
    return tl.load(base + places[:, None] + columns[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(
    x, at, tile, batch, head, start, count, first_column, width,
    ROWS: tl.constexpr, RANK: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    rows, columns = start + tl.arange(0, ROWS), first_column + tl.arange(0, W)
    base = x + batch.to(tl.int64) * at[0] + head.to(tl.int64) * at[2]
    places = (rows // RANK).to(tl.int64) * at[1] + (rows % RANK) * at[3]
    inside = (rows < count * RANK)[:, None] & (columns < width)[None, :]
    tl.store(base + places[:, None] + columns[None, :], tile.to(x.dtype.element_ty), mask=inside)


@triton.jit
def load_state(states, of_chunk, first, p, n, PB: tl.constexpr, NW: tl.constexpr):
    i, j = first + tl.arange(0, PB), tl.arange(0, NW)
    inside = (i < p)[:, None] & (j < n)[None, :]
    return tl.load(states + of_chunk * p * n + i[:, None] * n + j[None, :], mask=inside, other=0.0)


@triton.jit
def load_scalars(x, at, batch, head, tokens, count):
    places = batch.to(tl.int64) * at[0] + tokens.to(tl.int64) * at[1] + head.to(tl.int64) * at[2]
    return tl.load(x + places, mask=tokens < count, other=0.0).to(tl.float32)


@triton.jit
def store_scalars(x, at, values, batch, head, tokens, count):
    places = batch.to(tl.int64) * at[0] + tokens.to(tl.int64) * at[1] + head.to(tl.int64) * at[2]
    tl.store(x + places, values, mask=tokens < count)


@triton.jit
def gates_kernel(
    log_decay, own, past, gates, log_decay_at, own_at, past_at, count, chunks,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """The gates of a chunk: sums of log2 decays from its start, in two parts, and both weights.

    One fp32 could not tell the small decays behind a huge one.
    """
    chunk, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    batch = chunk // chunks
    i = tl.arange(0, TOKENS)
    tokens = chunk % chunks * TOKENS + i
    logs = load_scalars(log_decay, log_decay_at, batch, head, tokens, count)
    logs = tl.where(logs < NOTHING_LEFT, NOTHING_LEFT, logs)
    sums = tl.cumsum(logs.to(tl.float64) * LOG2_E, 0)
    high = sums.to(tl.float32)
    base = gates + (chunk.to(tl.int64) * heads + head) * 4 * TOKENS + i
    tl.store(base, high)
    tl.store(base + TOKENS, (sums - high.to(tl.float64)).to(tl.float32))
    tl.store(base + 2 * TOKENS, load_scalars(own, own_at, batch, head, tokens, count))
    tl.store(base + 3 * TOKENS, load_scalars(past, past_at, batch, head, tokens, count))


@triton.jit
def decay_between(reader, reader_high, reader_low, writer, writer_high, writer_low):
    """What is left of a token for a later one; 0 for those that are not later."""
    later = reader > writer
    between = (reader_high - writer_high) + (reader_low - writer_low)
    return tl.where(later, tl.exp2(tl.where(later, between, 0.0)), 0.0)


@triton.jit
def decay_to_end(gates, high, low, TOKENS: tl.constexpr):
    last = gates + TOKENS - 1
    return tl.exp2((tl.load(last) - high) + (tl.load(last + TOKENS) - low))


@triton.jit
def per_token(rows, ROWS: tl.constexpr, RANK: tl.constexpr):
    """Add up the ranks of each token."""
    return rows if RANK == 1 else tl.sum(tl.reshape(rows, (ROWS // RANK, RANK)), 1)


@triton.jit
def added_kernel(
    v, k, gates, added, v_at, k_at, count, chunks, heads_per_group, p, n,
    CHUNK: tl.constexpr, RANK: tl.constexpr, PB: tl.constexpr, NW: tl.constexpr,
    TO_END: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """sum_j w_j v_j k_j' over a chunk by itself: with x and B what it adds to the state.

    With dy and C, and w the decay from the chunk's start, it is the gradient of that start.
    """
    TOKENS: tl.constexpr = CHUNK // RANK
    chunk, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    batch, start = chunk // chunks, chunk % chunks * CHUNK
    of_chunk = chunk.to(tl.int64) * heads + head
    base = gates + of_chunk * 4 * TOKENS
    row_gates = base + tl.arange(0, CHUNK) // RANK
    high, low = tl.load(row_gates), tl.load(row_gates + TOKENS)
    if TO_END:
        weight = decay_to_end(base, high, low, TOKENS) * tl.load(row_gates + 3 * TOKENS)
    else:
        weight = tl.exp2(high)
    first = tl.program_id(2) * PB
    V = load_rows(v, v_at, batch, head, start, count, first, p, CHUNK, RANK, PB)
    K = load_rows(k, k_at, batch, head // heads_per_group, start, count, 0, n, CHUNK, RANK, NW)
    sums = mm(tl.trans(V * weight[:, None]), K, PRECISION, B_EXACT=EXACT)
    i, j = first + tl.arange(0, PB), tl.arange(0, NW)
    inside = (i < p)[:, None] & (j < n)[None, :]
    tl.store(added + of_chunk * p * n + i[:, None] * n + j[None, :], sums, mask=inside)


@triton.jit
def scan_kernel(
    added, initial, states, final, gates, before, met, chunks, floats,
    TOKENS: tl.constexpr, REVERSE: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """From what each chunk has added to the state at its start, which may take the same place.

    In REVERSE from what readers ask of each chunk's start to the gradient of its end, which meets
    the state `before` the chunk in the gradient of the chunk's decay.
    """
    batch, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    of_row = (batch.to(tl.int64) * heads + head) * floats + columns
    running = tl.load(initial + of_row, mask=columns < floats, other=0.0)
    for begin in range(0, chunks, AHEAD):
        coming = ()
        for i in tl.static_range(AHEAD):
            place = chunks - 1 - begin - i if REVERSE else begin + i
            of_chunk = (batch.to(tl.int64) * chunks + place) * heads + head
            here = columns < tl.where(begin + i < chunks, floats, 0)
            coming = coming + (tl.load(added + of_chunk * floats + columns, mask=here, other=0.0),)
        for i in tl.static_range(AHEAD):
            place = chunks - 1 - begin - i if REVERSE else begin + i
            of_chunk = (batch.to(tl.int64) * chunks + place) * heads + head
            exists = begin + i < chunks
            here = columns < tl.where(exists, floats, 0)
            state = running.to(states.dtype.element_ty)
            tl.store(states + of_chunk * floats + columns, state, mask=here)
            if REVERSE:
                start = tl.load(before + of_chunk * floats + columns, mask=here, other=0.0)
                part = met + of_chunk * tl.num_programs(2) + tl.program_id(2)
                tl.store(part, tl.sum(start * running), mask=exists)
            total = tl.load(gates + of_chunk * 4 * TOKENS + TOKENS - 1, mask=exists, other=0.0)
            running = tl.exp2(total) * running + coming[i]
    tl.store(final + of_row, running, mask=columns < floats)


@triton.jit
def outputs_kernel(
    x, B, C, gates, states, y, x_at, B_at, C_at, y_at, count, chunks, heads_per_group, p, n,
    CHUNK: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr,
    PW: tl.constexpr, PB: tl.constexpr, NW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some rows of a chunk read the rows before them, themselves, and the state at its start."""
    TOKENS: tl.constexpr = CHUNK // RANK
    chunk, block = tl.program_id(0) // (CHUNK // ROWS), tl.program_id(0) % (CHUNK // ROWS)
    head, heads = tl.program_id(1), tl.num_programs(1)
    group = head // heads_per_group
    batch, start = chunk // chunks, chunk % chunks * CHUNK
    of_chunk = chunk.to(tl.int64) * heads + head
    reader = (block * ROWS + tl.arange(0, ROWS)) // RANK
    writer = tl.arange(0, CHUNK) // RANK
    base = gates + of_chunk * 4 * TOKENS
    read_high, read_low = tl.load(base + reader), tl.load(base + TOKENS + reader)
    own, past = tl.load(base + 2 * TOKENS + writer), tl.load(base + 3 * TOKENS + writer)
    decay = decay_between(
        reader[:, None], read_high[:, None], read_low[:, None],
        writer[None, :], tl.load(base + writer)[None, :], tl.load(base + TOKENS + writer)[None, :],
    )  # fmt: skip
    itself = tl.where(reader[:, None] == writer[None, :], own[None, :], 0.0)
    asked = load_rows(C, C_at, batch, group, start + block * ROWS, count, 0, n, ROWS, RANK, NW)
    keys = load_rows(B, B_at, batch, group, start, count, 0, n, CHUNK, RANK, NW)
    scores = mm(asked, tl.trans(keys), PRECISION) * (decay * past[None, :] + itself)
    from_start = tl.exp2(read_high)[:, None]
    first = start + block * ROWS
    for column in tl.static_range(0, PW, PB):
        X = load_rows(x, x_at, batch, head, start, count, column, p, CHUNK, RANK, PB)
        state = load_state(states, of_chunk, column, p, n, PB, NW)
        answer = mm(scores, X, PRECISION) + from_start * mm(asked, tl.trans(state), PRECISION)
        store_rows(y, y_at, answer, batch, head, first, count, column, p, ROWS, RANK, PB)


@triton.jit
def reader_gradient_kernel(
    x, B, C, dy, gates, states, dC, dgates, x_at, B_at, C_at, dy_at, dC_at, dC_part,
    count, chunks, heads, heads_per_group, heads_per_part, p, n,
    CHUNK: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr,
    PW: tl.constexpr, PB: tl.constexpr, NW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of some rows of C over a part of the heads that share them, and what their
    answers ask of the decays in front of them."""
    TOKENS: tl.constexpr = CHUNK // RANK
    chunk, block = tl.program_id(0) // (CHUNK // ROWS), tl.program_id(0) % (CHUNK // ROWS)
    group, part = tl.program_id(1), tl.program_id(2)
    batch, start = chunk // chunks, chunk % chunks * CHUNK
    first = start + block * ROWS
    reader = (block * ROWS + tl.arange(0, ROWS)) // RANK
    writer = tl.arange(0, CHUNK) // RANK
    token = block * (ROWS // RANK) + tl.arange(0, ROWS // RANK)
    asked = load_rows(C, C_at, batch, group, first, count, 0, n, ROWS, RANK, NW)
    keys = load_rows(B, B_at, batch, group, start, count, 0, n, CHUNK, RANK, NW)
    scores = mm(asked, tl.trans(keys), PRECISION)
    dscores = tl.zeros([ROWS, CHUNK], tl.float32)
    dasked = tl.zeros([ROWS, NW], tl.float32)
    begin = part * heads_per_part
    for of_group in range(begin, min(begin + heads_per_part, heads_per_group)):
        head = group * heads_per_group + of_group
        of_chunk = chunk.to(tl.int64) * heads + head
        base = gates + of_chunk * 4 * TOKENS
        read_high, read_low = tl.load(base + reader), tl.load(base + TOKENS + reader)
        own, past = tl.load(base + 2 * TOKENS + writer), tl.load(base + 3 * TOKENS + writer)
        write_high, write_low = tl.load(base + writer), tl.load(base + TOKENS + writer)
        decay = past[None, :] * decay_between(
            reader[:, None], read_high[:, None], read_low[:, None],
            writer[None, :], write_high[None, :], write_low[None, :],
        )  # fmt: skip
        itself = tl.where(reader[:, None] == writer[None, :], own[None, :], 0.0)
        met = tl.zeros([ROWS, CHUNK], tl.float32)
        carried = tl.zeros([ROWS, NW], tl.float32)
        for column in tl.static_range(0, PW, PB):
            dY = load_rows(dy, dy_at, batch, head, first, count, column, p, ROWS, RANK, PB)
            X = load_rows(x, x_at, batch, head, start, count, column, p, CHUNK, RANK, PB)
            met += mm(dY, tl.trans(X), PRECISION)
            state = load_state(states, of_chunk, column, p, n, PB, NW)
            carried += mm(dY, state, PRECISION)
        dscores += met * (decay + itself)
        carried *= tl.exp2(read_high)[:, None]
        dasked += carried
        asks = tl.sum(scores * met * decay, 1) + tl.sum(carried * asked, 1)
        tl.store(dgates + of_chunk * 4 * TOKENS + token, per_token(asks, ROWS, RANK))
    dasked += mm(dscores, keys, PRECISION)
    dC += part.to(tl.int64) * dC_part
    store_rows(dC, dC_at, dasked, batch, group, first, count, 0, n, ROWS, RANK, NW)


@triton.jit
def writer_gradient_kernel(
    x, B, C, dy, gates, dstates, dx, dB, dgates, x_at, B_at, C_at, dy_at, dx_at, dB_at, dB_part,
    count, chunks, heads, heads_per_group, heads_per_part, p, n,
    CHUNK: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr,
    PW: tl.constexpr, PB: tl.constexpr, NW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of some rows of x and B and of their weights, over a part of the heads that
    share B. `past` counts inside the chunk and, apart from that, in the state behind it."""
    TOKENS: tl.constexpr = CHUNK // RANK
    chunk, block = tl.program_id(0) // (CHUNK // ROWS), tl.program_id(0) % (CHUNK // ROWS)
    group, part = tl.program_id(1), tl.program_id(2)
    batch, start = chunk // chunks, chunk % chunks * CHUNK
    first = start + block * ROWS
    writer = (block * ROWS + tl.arange(0, ROWS)) // RANK
    reader = tl.arange(0, CHUNK) // RANK
    itself = writer[:, None] == reader[None, :]
    token = block * (ROWS // RANK) + tl.arange(0, ROWS // RANK)
    keys = load_rows(B, B_at, batch, group, first, count, 0, n, ROWS, RANK, NW)
    asked = load_rows(C, C_at, batch, group, start, count, 0, n, CHUNK, RANK, NW)
    scores = mm(keys, tl.trans(asked), PRECISION)
    dscores = tl.zeros([ROWS, CHUNK], tl.float32)
    dkeys = tl.zeros([ROWS, NW], tl.float32)
    begin = part * heads_per_part
    for of_group in range(begin, min(begin + heads_per_part, heads_per_group)):
        head = group * heads_per_group + of_group
        of_chunk = chunk.to(tl.int64) * heads + head
        base = gates + of_chunk * 4 * TOKENS
        high, low = tl.load(base + writer), tl.load(base + TOKENS + writer)
        own, past = tl.load(base + 2 * TOKENS + writer), tl.load(base + 3 * TOKENS + writer)
        read_high, read_low = tl.load(base + reader), tl.load(base + TOKENS + reader)
        decay = decay_between(
            reader[None, :], read_high[None, :], read_low[None, :],
            writer[:, None], high[:, None], low[:, None],
        )  # fmt: skip
        weight = decay * past[:, None] + tl.where(itself, own[:, None], 0.0)
        to_end = decay_to_end(base, high, low, TOKENS)
        behind = to_end * past
        met = tl.zeros([ROWS, CHUNK], tl.float32)
        kept = tl.zeros([ROWS, NW], tl.float32)
        for column in tl.static_range(0, PW, PB):
            X = load_rows(x, x_at, batch, head, first, count, column, p, ROWS, RANK, PB)
            dY = load_rows(dy, dy_at, batch, head, start, count, column, p, CHUNK, RANK, PB)
            dstate = load_state(dstates, of_chunk, column, p, n, PB, NW)
            met += mm(X, tl.trans(dY), PRECISION)
            kept += mm(X, dstate, PRECISION)
            dX = mm(scores * weight, dY, PRECISION)
            dX += behind[:, None] * mm(keys, tl.trans(dstate), PRECISION)
            store_rows(dx, dx_at, dX, batch, head, first, count, column, p, ROWS, RANK, PB)
        dscores += met * weight
        dkeys += behind[:, None] * kept
        down = tl.sum(tl.where(itself, scores * met, 0.0), 1)
        inside = tl.sum(scores * met * decay, 1)
        through = to_end * tl.sum(kept * keys, 1)
        of_tokens = dgates + of_chunk * 4 * TOKENS + token
        tl.store(of_tokens + TOKENS, per_token(down, ROWS, RANK))
        tl.store(of_tokens + 2 * TOKENS, per_token(inside, ROWS, RANK))
        tl.store(of_tokens + 3 * TOKENS, per_token(through, ROWS, RANK))
    dkeys += mm(dscores, asked, PRECISION)
    dB += part.to(tl.int64) * dB_part
    store_rows(dB, dB_at, dkeys, batch, group, first, count, 0, n, ROWS, RANK, NW)


@triton.jit
def gates_gradient_kernel(
    gates, dgates, met, dlog_decay, down, dpast, at, count, chunks, parts,
    TOKENS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The gradients of log_decay, own and past.

    A decay stands between every pair of a later reader and an earlier writer: of tokens, of a token
    and the state at the chunk's start or end, and of these two.
    """
    chunk, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    batch = chunk // chunks
    i = tl.arange(0, TOKENS)
    tokens = chunk % chunks * TOKENS + i
    of_chunk = chunk.to(tl.int64) * heads + head
    of_gates, of_gradients = gates + of_chunk * 4 * TOKENS, dgates + of_chunk * 4 * TOKENS
    past = tl.load(of_gates + 3 * TOKENS + i)
    inside, behind = tl.load(of_gradients + 2 * TOKENS + i), tl.load(of_gradients + 3 * TOKENS + i)
    read_later = (tl.load(of_gradients + i) - past * inside).to(tl.float64)
    written = (past * behind).to(tl.float64)
    blocks = tl.arange(0, PARTS)
    through = tl.sum(tl.load(met + of_chunk * parts + blocks, mask=blocks < parts, other=0.0))
    through = (tl.exp2(tl.load(of_gates + TOKENS - 1)) * through).to(tl.float64)
    dlogs = tl.cumsum(read_later, 0, reverse=True) + tl.cumsum(written, 0) - written + through
    store_scalars(dlog_decay, at, dlogs.to(tl.float32), batch, head, tokens, count)
    store_scalars(down, at, tl.load(of_gradients + TOKENS + i), batch, head, tokens, count)
    store_scalars(dpast, at, inside + behind, batch, head, tokens, count)
