"""The operator that the sums of SKA define, in whitened coordinates (Appendix A)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def regularised(
    gram: Float[Tensor, "*b r r"], ridge: Float[Tensor, "*b"] | float
) -> Float[Tensor, "*b r r"]:
    """G + ridge I, symmetric to the last bit."""
    ridge = torch.as_tensor(ridge, dtype=gram.dtype, device=gram.device)
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return (gram + gram.mT) / 2 + ridge[..., None, None] * eye


def whitened_operator(
    gram: Float[Tensor, "*b r r"],
    lag: Float[Tensor, "*b r r"],
    ridge: Float[Tensor, "*b"] | float,
) -> Float[Tensor, "*b r r"]:
    """A_w = L^-1 M L^-T with L L' = G + ridge I; sigma_max(A_w) <= 1 (ops/ska/README.md)."""
    factor = torch.linalg.cholesky(regularised(gram, ridge))
    half = torch.linalg.solve_triangular(factor, lag, upper=False)
    return torch.linalg.solve_triangular(factor, half.mT, upper=False).mT
