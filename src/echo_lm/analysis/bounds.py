"""What follows from the keys of M being those of G, whatever the keys are.

K and V hold keys and values as rows, S moves rows down by one, Q = K X K'. Then M = K'SK, hence
K X (M X)^j = (Q S)^j K X, and neither Q nor S makes anything longer. Proofs: ops/ska/README.md.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from echo_lm.analysis.filtering import filter_gain


def reach(gram: Float[Tensor, "*b r r"], ridge: Float[Tensor, "*b"] | float) -> Float[Tensor, "*b"]:
    """|K X|: the maximum of sqrt(g) / (g + ridge) over the eigenvalues g of G.

    At most 1 / (2 sqrt(ridge)). |C X (M X)^j| <= |V| times this, for every order j.
    """
    g = _eigenvalues(gram)
    ridge = torch.as_tensor(ridge, dtype=gram.dtype, device=gram.device)
    return (g.sqrt() / (g + ridge[..., None])).amax(-1)


def jacobian_bound(
    coef: Float[Tensor, "*b orders"],
    values: Float[Tensor, "*b t p"],
    ridge: Float[Tensor, "*b"] | float,
    gram: Float[Tensor, "*b r r"] | None = None,
) -> Float[Tensor, "*b"]:
    """`filter_gain` |V| / (2 sqrt(ridge)), or `reach` of `gram` in its place: |y| <= this |q|."""
    size = torch.linalg.matrix_norm(values, ord=2)
    ridge = torch.as_tensor(ridge, dtype=values.dtype, device=values.device)
    widest = 0.5 * ridge.rsqrt() if gram is None else reach(gram, ridge)
    return filter_gain(coef) * size * widest


def transition_bound(
    gram: Float[Tensor, "*b r r"], ridge: Float[Tensor, "*b"] | float
) -> Float[Tensor, "*b"]:
    """sqrt(g_max) `reach`, above |M X|, which unlike |A_w| may exceed 1.

    At most the root of the condition number of G + ridge I.
    """
    return _eigenvalues(gram)[..., -1].sqrt() * reach(gram, ridge)


def contraction(
    gram: Float[Tensor, "*b r r"], ridge: Float[Tensor, "*b"] | float
) -> Float[Tensor, "*b"]:
    """g_max / (g_max + ridge) < 1: the largest that sigma_max(A_w) can be."""
    largest = _eigenvalues(gram)[..., -1]
    return largest / (largest + ridge)


def eigenvalue_limit(tokens: int) -> float:
    """cos(pi / (tokens + 1)): after so many tokens, no eigenvalue of A_w is larger.

    The numerical radius of S. Keys sin(pi t / (tokens + 1)) attain it as the ridge vanishes.
    """
    return max(0.0, math.cos(math.pi / (tokens + 1)))


def _eigenvalues(gram: Float[Tensor, "*b r r"]) -> Float[Tensor, "*b r"]:
    return torch.linalg.eigvalsh((gram + gram.mT) / 2).clamp_min(0)
