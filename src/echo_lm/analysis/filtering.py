"""What the filter sum_j c_j A_w^j does to a mode (Appendix D)."""

from __future__ import annotations

import torch
from jaxtyping import Complex, Float
from torch import Tensor


def power_coefficients(order: int, gamma: float = 1.0) -> Float[Tensor, " orders"]:
    """The paper's filter (gamma A_w)^order as coefficients c_0 ... c_order (Proposition D.3)."""
    coef = torch.zeros(order + 1, dtype=torch.float64)
    coef[order] = gamma**order
    return coef


def filter_response(
    coef: Float[Tensor, "*b orders"], eigenvalues: Float[Tensor, "*b n"] | Complex[Tensor, "*b n"]
) -> Float[Tensor, "*b n"] | Complex[Tensor, "*b n"]:
    """sum_j c_j lambda^j: what the filter makes of an eigenvector (Proposition D.1).

    A factor on the amplitude. Where A_w is not normal, eigenvectors are not all there is to say.
    """
    response = torch.zeros_like(eigenvalues)
    for c in coef.to(eigenvalues.dtype).unbind(-1)[::-1]:
        response = response * eigenvalues + c[..., None]
    return response


def filter_gain(coef: Float[Tensor, "*b orders"]) -> Float[Tensor, "*b"]:
    """sum_j |c_j|, above which |sum_j c_j A_w^j| cannot rise (Propositions D.2 and D.3).

    Because |A_w| <= 1. No smaller number serves every A_w: a mode may have lambda = 1 or -1.
    """
    return coef.abs().sum(-1)


def order_shares(coef: Float[Tensor, "*b orders"]) -> Float[Tensor, "*b orders"]:
    """Which orders a head uses: |c_j| as shares of one."""
    return coef.abs() / filter_gain(coef)[..., None].clamp_min(torch.finfo(coef.dtype).tiny)
