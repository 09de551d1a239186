"""The scan as its recurrence is written. Slow, and the truth for the other forms."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from echo_lm.ops.ssd.problem import Problem, outer, to_heads


def ssd_naive(problem: Problem) -> tuple[Float[Tensor, "b t h r p"], Float[Tensor, "b h p n"]]:
    """h_t = a_t (h_{t-1} + beta_t u_{t-1}) + gamma_t u_t,  y_t^r = h_t C_t^r"""
    h, trapezoid = problem.h, problem.trapezoid
    if trapezoid is not None:
        last_u = outer(trapezoid.x, trapezoid.B)
    outputs = []
    for t in range(problem.x.shape[1]):
        a = problem.log_decay[:, t, :, None, None].exp()
        gamma = problem.gamma[:, t, :, None, None]
        u = outer(problem.x[:, t], problem.B[:, t])
        if trapezoid is not None:
            h = h + trapezoid.beta[:, t, :, None, None] * last_u
            last_u = u
        h = a * h + gamma * u
        outputs.append(to_heads(problem.C[:, t], h.shape[1]) @ h.mT)
    return torch.stack(outputs, dim=1), h
