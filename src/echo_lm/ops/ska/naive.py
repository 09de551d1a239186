"""SKA as a loop over tokens, to hold beside the mathematics. Slow, and the truth for all others."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from echo_lm.ops.ska.problem import Problem, add_ridge
from echo_lm.ops.ska.state import SKAState


def ska_naive(problem: Problem) -> tuple[Float[Tensor, "b t h p"], SKAState]:
    """Read token by token, solving for the operator anew wherever it may change."""
    state, outputs = problem.state, []
    W = readout_or(state.readout, problem, state)
    for t in range(problem.q.shape[1]):
        active = problem.active(t)
        begins = problem.begins_chunk(state, active)
        state = state.fade(problem.left_of_sums(begins))
        if problem.causal == "chunk":
            W = torch.where(begins.view(-1, 1, 1, 1), solve_readout(problem, state), W)
        state = state.read(problem.k[:, t], problem.v[:, t], active)
        if problem.causal == "exact":
            W = solve_readout(problem, state)
        outputs.append(W)
    if problem.causal is False:
        outputs = [solve_readout(problem, state)] * len(outputs)
    y = torch.stack([answer(problem, W, t) for t, W in enumerate(outputs)], dim=1)
    return y, keep_derived(problem, state, W)


def solve_readout(problem: Problem, state: SKAState) -> Float[Tensor, "b h p r"]:
    """W = sum_j c_j C X (M X)^j  with  X = (G + lam I)^-1."""
    X = torch.linalg.inv(add_ridge(state.gram, problem.ridge_at(state.gram, state.key_energy)))
    term = state.value @ X
    W = torch.zeros_like(term)
    for c in problem.coef.unbind(-1):
        W = W + c.view(-1, 1, 1) * term
        term = term @ (state.lag @ X)
    return W


def answer(problem: Problem, W: Float[Tensor, "b h p r"], t: int) -> Float[Tensor, "b h p"]:
    """y_t = W q_t, and zero where there is no token."""
    y = (W @ problem.q[:, t].unsqueeze(-1)).squeeze(-1)
    return y * problem.active(t).view(-1, 1, 1)


def readout_or(
    readout: Float[Tensor, "b h p r"] | None, problem: Problem, state: SKAState
) -> Float[Tensor, "b h p r"]:
    """The read-out of a chunk that has begun; a state without one answers from all it holds."""
    return solve_readout(problem, state) if readout is None else readout


def keep_derived(problem: Problem, state: SKAState, W: Float[Tensor, "b h p r"]) -> SKAState:
    """Complete a state whose sums are up to date with what its next call will want."""
    chunk_size = problem.chunk_size if problem.chunked else None
    state = replace(state, inverse=None, inverse_ridge=None, readout=None, chunk_size=chunk_size)
    if problem.causal == "exact":
        ridge = problem.ridge_at(state.gram, state.key_energy)
        inverse = torch.linalg.inv(add_ridge(state.gram, ridge))
        return replace(state, inverse=inverse, inverse_ridge=ridge.clone())
    if problem.causal == "chunk":
        return replace(state, readout=W)
    return state


def whitened_readout(
    q: Float[Tensor, "n r"],
    k: Float[Tensor, "t r"],
    v: Float[Tensor, "t p"],
    *,
    ridge: float,
    order: int,
    gamma: float = 1.0,
    scale: Float[Tensor, ""] | None = None,
    power_iterations: int = 6,
) -> tuple[Float[Tensor, "n p"], Float[Tensor, ""]]:
    """The paper's pipeline (its appendix, steps 2 to 10, eta = 1) for one head, written out.

    Statistics come from all of `k` and `v`. `scale` is the largest key norm (of `k` if not given).
    Returns the answers and sigma_max(A_w) as the power iteration found it, which is never above 1.
    """
    scale = k.norm(dim=-1).max().clamp_min(1e-6) if scale is None else scale
    z, z_q = k / scale, q / scale
    G = z.T @ z + ridge * torch.eye(z.shape[1], dtype=z.dtype)
    M = z[1:].T @ z[:-1]
    C = v.T @ z

    L = torch.linalg.cholesky(G)
    Y = torch.linalg.solve_triangular(L, M, upper=False)
    A_w = torch.linalg.solve_triangular(L, Y.T, upper=False).T
    sigma = spectral_norm(A_w.detach(), power_iterations)
    A_w = gamma * A_w / sigma.clamp_min(1.0)

    B_v = torch.cholesky_solve(C.T, L).T
    w = torch.linalg.solve_triangular(L, z_q.T, upper=False)
    for _ in range(order):
        w = A_w @ w
    return (B_v @ L @ w).T, sigma


def spectral_norm(a: Float[Tensor, "r r"], iterations: int) -> Float[Tensor, ""]:
    """sigma_max by power iteration on a' a, as the paper does; a lower estimate."""
    u = torch.ones(a.shape[1], dtype=a.dtype)
    for _ in range(iterations):
        u = a.T @ (a @ u)
        u = u / u.norm().clamp_min(torch.finfo(a.dtype).tiny)
    return (a @ u).norm()
