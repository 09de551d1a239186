"""SKA in parallel over chunks: for training and prefill. Memory grows linearly with T.

Every chunk reads the sums of the tokens before it (one prefix sum), so that all chunks are worked
on at once. What happens inside a chunk is what the three causalities differ in; README.md derives
the exact one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from echo_lm.ops.ska.layout import ChunkLayout, running_max, running_sum
from echo_lm.ops.ska.linalg import inverse_cholesky, spd_inverse
from echo_lm.ops.ska.problem import Problem, add_ridge
from echo_lm.ops.ska.recurrent import combine, readout_matrix
from echo_lm.ops.ska.state import SKAState


@dataclass(frozen=True)
class Chunks:
    """All chunks of all rows, heads before slots, and the sums each of them starts from."""

    q: Float[Tensor, "n h s r"]
    k: Float[Tensor, "n h s r"]
    k_before: Float[Tensor, "n h s r"]
    """The key of the token before each one."""
    v: Float[Tensor, "n h s p"]
    gram: Float[Tensor, "n h r r"]
    lag: Float[Tensor, "n h r r"]
    value: Float[Tensor, "n h p r"]
    key_energy: Float[Tensor, "n h"]


def ska_chunk(
    problem: Problem, return_state: bool
) -> tuple[Float[Tensor, "b t h p"], SKAState | None]:
    """Answer all tokens of all rows."""
    layout = lay_out(problem)
    chunks, state = read(problem, layout)
    readout = None
    if problem.causal == "exact":
        y = answer_exact(problem, chunks)
    elif problem.causal == "chunk":
        W = chunk_readouts(problem, layout, chunks)
        y = chunks.q @ W.mT
        readout = layout.last(W, begun_readout(problem)) if return_state else None
    else:
        y = chunks.q @ layout.spread(state_readout(problem, state)).mT
    y = layout.to_tokens(y.transpose(1, 2))
    return y, with_derived(problem, state, readout) if return_state else None


def lay_out(problem: Problem, chunk_size: int | None = None) -> ChunkLayout:
    """Where answers depend on chunks, these follow the tokens read so far; else they are free.

    `chunk_size` may be a divisor of the problem's.
    """
    batch, width = problem.k.shape[:2]
    lengths = [width] * batch if problem.lengths is None else problem.lengths.tolist()
    read = [0] * batch
    if problem.chunked and not problem.fresh:
        read = (problem.state.count % problem.chunk_size).tolist()
    size, period = chunk_size or problem.chunk_size, problem.chunk_size
    return ChunkLayout.of(lengths, read, size, width, problem.k, period)


def read(problem: Problem, layout: ChunkLayout) -> tuple[Chunks, SKAState]:
    """Cut into chunks, sum each, and run the sums along every row."""
    old = problem.state
    k_before = torch.cat([old.last_key.unsqueeze(1), problem.k[:, :-1]], dim=1)
    q, k, k_before, v = (
        layout.to_slots(x).transpose(1, 2) for x in (problem.q, problem.k, k_before, problem.v)
    )
    energies = k.square().sum(-1).amax(-1)
    left = None if problem.decay is None else problem.left_of_sums(layout.begins)
    k_before = fade_seams(k_before, left)
    gram, gram_end = layout.scan(old.gram, k.mT @ k, running_sum, left)
    lag, lag_end = layout.scan(old.lag, k.mT @ k_before, running_sum, left)
    value, value_end = layout.scan(old.value, v.mT @ k, running_sum, left)
    energy, energy_end = layout.scan(old.key_energy, energies, running_max, left)
    first_key, last_key, count = ends(problem)
    state = SKAState(gram_end, lag_end, value_end, first_key, last_key, energy_end, count)
    return Chunks(q, k, k_before, v, gram, lag, value, energy), state


def fade_seams(
    k_before: Float[Tensor, "n h s r"], left: Float[Tensor, "n h"] | None
) -> Float[Tensor, "n h s r"]:
    """The key before a chunk's first one belongs to the chunk before, and has faded with it."""
    if left is None:
        return k_before
    first = left.sqrt()[..., None, None] * k_before[:, :, :1]
    return torch.cat([first, k_before[:, :, 1:]], dim=2)


def ends(
    problem: Problem,
) -> tuple[Float[Tensor, "b h r"], Float[Tensor, "b h r"], Int[Tensor, " b"]]:
    """First key, last key and count of each row after this call."""
    k, old, lengths = problem.k, problem.state, problem.lengths
    if lengths is None:
        new, last, count = old.count == 0, k[:, -1], old.count + k.shape[1]
    else:
        rows = torch.arange(len(lengths), device=k.device)
        some = lengths > 0
        new, count = some & (old.count == 0), old.count + lengths
        last = torch.where(some.view(-1, 1, 1), k[rows, lengths - 1], old.last_key)
    return torch.where(new.view(-1, 1, 1), k[:, 0], old.first_key), last, count


def answer_exact(problem: Problem, chunks: Chunks) -> Float[Tensor, "n h s p"]:
    """y_t = C_t sum_j c_j (X_t M_t)^j X_t q_t, with X_t, M_t and C_t as of token t itself.

    In the coordinates that whiten the Gram matrix a chunk starts from, X0 is the identity. The
    Cholesky factor R of I + K K' holds those of all its leading blocks, hence one factor serves
    every t: X_t = I - sum_{s<=t} e_s e_s' with the rows e_s of E = R^-1 K.
    """
    H = inverse_cholesky(add_ridge(chunks.gram, problem.ridge_at(chunks.gram, chunks.key_energy)))
    q, K, K_before = (x @ H.mT for x in (chunks.q, chunks.k, chunks.k_before))
    lag, value = H @ chunks.lag @ H.mT, chunks.value @ H.mT
    E = inverse_cholesky(K @ K.mT + torch.diag_embed(1 + rounding_of(K))) @ K

    def apply_inverse(p: Tensor) -> Tensor:
        return p - (p @ E.mT).tril() @ E

    def apply_lag(p: Tensor) -> Tensor:
        return p @ lag.mT + (p @ K_before.mT).tril() @ K

    coef = problem.coef[:, :, None, None]
    u = apply_inverse(q)
    mixed = coef[:, 0] * u
    for j in range(1, problem.coef.shape[1]):
        u = apply_inverse(apply_lag(u))
        mixed = mixed + coef[:, j] * u
    return mixed @ value.mT + (mixed @ K.mT).tril() @ chunks.v


def rounding_of(K: Float[Tensor, "n h s r"]) -> Float[Tensor, "n h s"]:
    """What keeps I + K K' positive definite when keys are so large that rounding takes the I.

    Quadratic until then, and so far below the rounding that is there anyway. Each token's depends
    on that token alone: added only where a factorisation fails, it would let the future move the
    past.
    """
    lost = 0.5 * K.shape[-2] * torch.finfo(K.dtype).eps * K.detach().square().sum(-1)
    return lost * lost.clamp_max(1)


def chunk_readouts(
    problem: Problem, layout: ChunkLayout, chunks: Chunks
) -> Float[Tensor, "n h p r"]:
    """W of each chunk from the chunks before it; one half read keeps the W it began with."""
    H = inverse_cholesky(add_ridge(chunks.gram, problem.ridge_at(chunks.gram, chunks.key_energy)))
    W = combine(chunks.value, chunks.lag, H, problem.coef)
    begun = problem.state.readout
    return W if begun is None else layout.replace_first(W, begun)


def state_readout(problem: Problem, state: SKAState) -> Float[Tensor, "b h p r"]:
    """W from all that a state holds."""
    return readout_matrix(state, problem.coef, problem.ridge_at(state.gram, state.key_energy))


def begun_readout(problem: Problem) -> Float[Tensor, "b h p r"]:
    """The W of each row's half-read chunk; a state without one answers from all it holds."""
    begun = problem.state.readout
    return state_readout(problem, problem.state) if begun is None else begun


def with_derived(
    problem: Problem, state: SKAState, readout: Float[Tensor, "b h p r"] | None
) -> SKAState:
    """Complete a state whose sums are up to date with what its next call will want."""
    if problem.causal == "exact":
        ridge = problem.ridge_at(state.gram, state.key_energy)
        inverse = spd_inverse(add_ridge(state.gram, ridge))
        state = replace(state, inverse=inverse, inverse_ridge=ridge)
    elif readout is not None:
        state = replace(state, readout=readout)
    if problem.chunked:
        state = replace(state, chunk_size=problem.chunk_size)
    # A copy: as views, the ends of the running sums would keep those of every chunk in memory.
    return state.clone()
