"""The scan one token at a time, O(P N) each: for decoding."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from echo_lm.ops.ssd.problem import Problem, outer, to_heads


def ssd_recurrent(problem: Problem) -> tuple[Float[Tensor, "b t h r p"], Float[Tensor, "b h p n"]]:
    """Step through the tokens; a trapezoidal step is a plain one of twice the rank."""
    decay = problem.log_decay.exp()
    x, B = problem.x * problem.gamma[..., None, None], problem.B
    trapezoid = problem.trapezoid
    if trapezoid is not None:
        share = decay * trapezoid.beta
        x = torch.cat([delay(problem.x, trapezoid.x) * share[..., None, None], x], dim=3)
        B = torch.cat([delay(B, trapezoid.B), B], dim=3)
    h, outputs = problem.h, []
    for t in range(x.shape[1]):
        kept = torch.mul(h, decay[:, t, :, None, None], out=h if problem.in_place else None)
        h = kept.add_(outer(x[:, t], B[:, t]))
        outputs.append(to_heads(problem.C[:, t], h.shape[1]) @ h.mT)
    return torch.stack(outputs, dim=1), h


def delay(v: Float[Tensor, "b t ..."], last: Float[Tensor, "b ..."]) -> Float[Tensor, "b t ..."]:
    """Each token's predecessor; the first has the one that the state remembers."""
    return torch.cat([last.unsqueeze(1), v[:, :-1]], dim=1)
