"""The delta rule in parallel inside chunks: for training and prefill. Memory is linear in T.

README.md has the algebra: one triangular solve turns all steps of a chunk into one.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from echo_lm.ops.delta.problem import Problem
from echo_lm.ops.ssd.restart import to_chunks


def delta_chunk(problem: Problem) -> tuple[Float[Tensor, "b t h p"], Float[Tensor, "b h p r"]]:
    """All chunks at once but for S, which goes from each to the next."""
    tokens = problem.q.shape[1]
    size = min(tokens, problem.chunk_size)
    q, k, v = (to_chunks(x, size).movedim(3, 2) for x in (problem.q, problem.k, problem.v))
    beta = to_chunks(problem.beta, size).movedim(3, 2).unsqueeze(-1)

    between, seen = (beta * k @ k.mT).tril(-1), (q @ k.mT).tril()
    old, kept = beta * k, None
    if problem.starts is not None:
        number = to_chunks(problem.starts, size).cumsum(2)[:, :, None, :, None]
        same, first, last = number == number.mT, number == 0, number == number[..., -1:, :]
        between, seen = between * same, seen * same
        q, old, k = q * first, old * first, k * last
        kept = first[..., -1:, :]
    wanted = torch.cat([beta * v, old], dim=-1)
    # The diagonal is taken to be ones.
    solved = torch.linalg.solve_triangular(between, wanted, upper=False, unitriangular=True)
    fresh, stale = solved.split([v.shape[-1], k.shape[-1]], dim=-1)

    S, outputs = problem.S, []
    for c in range(q.shape[1]):
        added = fresh[:, c] - stale[:, c] @ S.mT
        outputs.append(q[:, c] @ S.mT + seen[:, c] @ added)
        S = S if kept is None else S * kept[:, c]
        S = S + added.mT @ k[:, c]
    return torch.cat(outputs, dim=2).movedim(2, 1)[:, :tokens], S
