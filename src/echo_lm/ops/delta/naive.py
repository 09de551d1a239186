"""The delta rule as its recurrence is written. Slow, and the truth for the other forms."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from echo_lm.ops.delta.problem import Problem


def delta_naive(problem: Problem) -> tuple[Float[Tensor, "b t h p"], Float[Tensor, "b h p r"]]:
    """S_t = S_{t-1} (I - beta_t k_t k_t') + beta_t v_t k_t',  y_t = S_t q_t"""
    S, outputs = problem.S, []
    eye = torch.eye(S.shape[-1], dtype=S.dtype, device=S.device)
    for t in range(problem.q.shape[1]):
        q, k, v = (x[:, t].unsqueeze(-1) for x in (problem.q, problem.k, problem.v))
        beta = problem.beta[:, t, :, None, None]
        S = problem.before(t, S) @ (eye - beta * k @ k.mT) + beta * v @ k.mT
        outputs.append((S @ q).squeeze(-1))
    return torch.stack(outputs, dim=1), S
