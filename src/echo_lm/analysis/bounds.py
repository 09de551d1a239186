"""What follows for answers and gradients from sigma_max(A_w) <= 1 (proofs: ops/ska/README.md)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from echo_lm.analysis.filtering import filter_gain


def reach(gram: Float[Tensor, "*b r r"], ridge: Float[Tensor, "*b"] | float) -> Float[Tensor, "*b"]:
    """max sqrt(g) / (g + ridge) over the eigenvalues g of G, at most 1 / (2 sqrt(ridge)).

    |C X (M X)^j| <= |V| times this, for every order j, V being the matrix of values.
    """
    g = torch.linalg.eigvalsh((gram + gram.mT) / 2).clamp_min(0)
    ridge = torch.as_tensor(ridge, dtype=gram.dtype, device=gram.device)
    return (g.sqrt() / (g + ridge[..., None])).amax(-1)


def jacobian_bound(
    coef: Float[Tensor, "*b orders"],
    values: Float[Tensor, "*b t p"],
    ridge: Float[Tensor, "*b"] | float,
    gram: Float[Tensor, "*b r r"] | None = None,
) -> Float[Tensor, "*b"]:
    """sum_j |c_j| |V| / (2 sqrt(ridge)), or `reach` of `gram` in its place: |y| <= this |q|."""
    size = torch.linalg.matrix_norm(values, ord=2)
    ridge = torch.as_tensor(ridge, dtype=values.dtype, device=values.device)
    widest = 0.5 * ridge.rsqrt() if gram is None else reach(gram, ridge)
    return filter_gain(coef) * size * widest
