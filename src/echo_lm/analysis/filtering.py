"""What the filter sum_j c_j A_w^j does to a mode (Appendix D)."""

from __future__ import annotations

import math

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
    """max |sum_j c_j z^j| over |z| <= 1, above which |sum_j c_j A_w^j| cannot rise (D.2, D.3).

    Von Neumann's inequality, because |A_w| <= 1. No smaller number serves every A_w: keys that turn
    by a constant angle have eigenvalues as near to any z of the unit circle as one likes. For a
    power it is |c_K|, and it is never above sum_j |c_j|. Computed to 4e-5 of itself, from above.
    """
    order = coef.shape[-1] - 1
    samples = 256 * (order + 1)
    # |sum_j c_j z^j|^2 is a trigonometric polynomial of degree `order`: half a sample away from its
    # maximum it is still at least the cosine of order * pi / samples of that (M. Riesz).
    lost = math.cos(math.pi * order / samples) ** 0.5
    on_the_circle = torch.fft.rfft(coef, n=samples).abs().amax(-1) / lost
    return on_the_circle.minimum(coef.abs().sum(-1))


def order_shares(coef: Float[Tensor, "*b orders"]) -> Float[Tensor, "*b orders"]:
    """Which orders a head uses: |c_j| as shares of one."""
    sizes = coef.abs()
    return sizes / sizes.sum(-1, keepdim=True).clamp_min(torch.finfo(coef.dtype).tiny)
