"""The delta rule one token at a time, O(P r) each: for decoding."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from echo_lm.ops.delta.problem import Problem


def delta_recurrent(problem: Problem) -> tuple[Float[Tensor, "b t h p"], Float[Tensor, "b h p r"]]:
    """Recall what the key is answered with, and add a share of what is wrong with it."""
    S, outputs = problem.S, []
    for t in range(problem.q.shape[1]):
        q, k, v = (x[:, t].unsqueeze(-1) for x in (problem.q, problem.k, problem.v))
        S = problem.before(t, S)
        S = S + problem.beta[:, t, :, None, None] * (v - S @ k) @ k.mT
        outputs.append((S @ q).squeeze(-1))
    return torch.stack(outputs, dim=1), S
