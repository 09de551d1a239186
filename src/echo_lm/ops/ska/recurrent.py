"""SKA one token at a time, O(r^2 + r P) each: for decoding. `step.py` is its like on a GPU.

Exact mode keeps X and follows it by rank-one (Sherman-Morrison) updates; every `chunk_size` tokens
it is built anew from the Gram matrix so that rounding cannot drift. Chunk mode keeps W and builds
it anew where a chunk begins.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from echo_lm.ops.ska.linalg import inverse_cholesky, spd_inverse
from echo_lm.ops.ska.problem import Problem, add_ridge
from echo_lm.ops.ska.state import SKAState, add_outer


def ska_recurrent(problem: Problem) -> tuple[Float[Tensor, "b t h p"], SKAState]:
    """Step through the tokens of a causal problem."""
    step = exact_step if problem.causal == "exact" else chunk_step
    prepare = with_inverse if problem.causal == "exact" else with_readout
    state = prepare(problem, problem.state)
    outputs = []
    for t in range(problem.q.shape[1]):
        active = problem.active(t)
        state = state.fade(problem.left_of_sums(problem.begins_chunk(state, active)))
        y, state = step(problem, state, t, active)
        outputs.append(y * active.view(-1, 1, 1))
    return torch.stack(outputs, dim=1), state


def exact_step(
    problem: Problem, state: SKAState, t: int, active: Bool[Tensor, " b"]
) -> tuple[Float[Tensor, "b h p"], SKAState]:
    """Read token t, then answer it: y = C sum_j c_j (X M)^j X q."""
    X = rebuild_inverse(problem, state, active)
    k = problem.k[:, t] * active.view(-1, 1, 1)
    Xk = apply(X, k)
    gain = 1 / (1 + (k * Xk).sum(-1))
    X = add_outer(X, -gain[..., None] * Xk, Xk, in_place=problem.in_place)
    state = read(problem, replace(state, inverse=X), t, active)

    u = apply(X, problem.q[:, t])
    mixed = problem.coef[:, 0, None] * u
    for c in problem.coef.unbind(-1)[1:]:
        u = apply(X, apply(state.lag, u))
        mixed = mixed + c[:, None] * u
    return apply(state.value, mixed), state


def chunk_step(
    problem: Problem, state: SKAState, t: int, active: Bool[Tensor, " b"]
) -> tuple[Float[Tensor, "b h p"], SKAState]:
    """Answer token t from the chunks before its own, then read it."""
    state = rebuild_readout(problem, state, active)
    assert state.readout is not None
    y = apply(state.readout, problem.q[:, t])
    return y, read(problem, state, t, active)


def read(problem: Problem, state: SKAState, t: int, active: Bool[Tensor, " b"]) -> SKAState:
    return state.read(problem.k[:, t], problem.v[:, t], active, in_place=problem.in_place)


def with_inverse(problem: Problem, state: SKAState) -> SKAState:
    """A state whose inverse belongs to this ridge and, where gradients flow, to these sums."""
    ridge = problem.ridge_at(state.gram, state.key_energy)
    cached = state.inverse_ridge
    learning = torch.is_grad_enabled() and (ridge.requires_grad or state.gram.requires_grad)
    if learning or state.inverse is None or cached is None or not torch.equal(cached, ridge):
        inverse = spd_inverse(add_ridge(state.gram, ridge))
        state = replace(state, inverse=inverse, inverse_ridge=ridge.clone())
    chunk_size = problem.chunk_size if problem.chunked else None
    return replace(state, readout=None, chunk_size=chunk_size)


def with_readout(problem: Problem, state: SKAState) -> SKAState:
    """A state that can answer; one without a read-out answers from all it holds."""
    if state.readout is None:
        ridge = problem.ridge_at(state.gram, state.key_energy)
        state = replace(state, readout=readout_matrix(state, problem.coef, ridge))
    return replace(state, inverse=None, inverse_ridge=None, chunk_size=problem.chunk_size)


def rebuild_inverse(
    problem: Problem, state: SKAState, active: Bool[Tensor, " b"]
) -> Float[Tensor, "b h r r"]:
    assert state.inverse is not None
    rows = rows_at_boundary(problem, state, active)
    if len(rows) == 0:
        return state.inverse
    gram = state.gram[rows]
    ridge = problem.ridge_at(gram, state.key_energy[rows])
    return state.inverse.index_copy(0, rows, spd_inverse(add_ridge(gram, ridge)))


def rebuild_readout(problem: Problem, state: SKAState, active: Bool[Tensor, " b"]) -> SKAState:
    assert state.readout is not None
    rows = rows_at_boundary(problem, state, active)
    if len(rows) == 0:
        return state
    due = replace(state, inverse=None, readout=None).reorder(rows)
    fresh = readout_matrix(due, problem.coef, problem.ridge_at(due.gram, due.key_energy))
    return replace(state, readout=state.readout.index_copy(0, rows, fresh))


def rows_at_boundary(
    problem: Problem, state: SKAState, active: Bool[Tensor, " b"]
) -> Int[Tensor, " n"]:
    return problem.begins_chunk(state, active).nonzero().squeeze(-1)


def readout_matrix(
    state: SKAState, coef: Float[Tensor, "h order"], ridge: Float[Tensor, "b h"]
) -> Float[Tensor, "b h p r"]:
    """W = sum_j c_j C X (M X)^j from the sums of a state."""
    return combine(state.value, state.lag, inverse_cholesky(add_ridge(state.gram, ridge)), coef)


def combine(
    value: Float[Tensor, "b h p r"],
    lag: Float[Tensor, "b h r r"],
    whitener: Float[Tensor, "b h r r"],
    coef: Float[Tensor, "h order"],
) -> Float[Tensor, "b h p r"]:
    """W = sum_j c_j C X (M X)^j, as C H' (sum_j c_j A_w^j) H with X = H' H and A_w = H M H'."""
    A_w = whitener @ lag @ whitener.mT
    term = value @ whitener.mT
    mixed = coef[:, 0, None, None] * term
    for c in coef.unbind(-1)[1:]:
        term = term @ A_w
        mixed = mixed + c[:, None, None] * term
    return mixed @ whitener


def apply(matrix: Float[Tensor, "b h m n"], x: Float[Tensor, "b h n"]) -> Float[Tensor, "b h m"]:
    """matrix x, with x as a row: on a CPU, batched products with a column are ten times slower."""
    return (x.unsqueeze(-2) @ matrix.mT).squeeze(-2)
