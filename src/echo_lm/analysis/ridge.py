"""Ridge regression as retrieval, and what linear attention and the filter make of it (Appendix I).

A read-out is a matrix that answers a query. Linear attention's is C, the value sum itself.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from echo_lm.analysis.operator import Sums, regularised


def objective(
    readout: Float[Tensor, "*b p r"],
    keys: Float[Tensor, "*b t r"],
    values: Float[Tensor, "*b t p"],
    ridge: Float[Tensor, "*b"] | float,
) -> Float[Tensor, "*b"]:
    """sum_t |v_t - B k_t|^2 + ridge |B|_F^2"""
    misses = values - keys @ readout.mT
    return misses.square().sum((-2, -1)) + ridge * readout.square().sum((-2, -1))


def ridge_readout(
    gram: Float[Tensor, "*b r r"],
    value: Float[Tensor, "*b p r"],
    ridge: Float[Tensor, "*b"] | float,
) -> Float[Tensor, "*b p r"]:
    """B* = C (G + ridge I)^-1, which minimises `objective`; two triangular solves (I.2, I.7)."""
    factor = torch.linalg.cholesky(regularised(gram, ridge))
    half = torch.linalg.solve_triangular(factor, value.mT, upper=False)
    return torch.linalg.solve_triangular(factor.mT, half, upper=True).mT


def excess(
    readout: Float[Tensor, "*b p r"], sums: Sums, ridge: Float[Tensor, "*b"] | float
) -> Float[Tensor, "*b"]:
    """How far `readout` is above the minimum: |(B - B*) (G + ridge I)^(1/2)|_F^2 (I.3).

    Computed with the Cholesky factor, which gives the same norm as the square root.
    """
    factor = torch.linalg.cholesky(regularised(sums.gram, ridge))
    away = readout - ridge_readout(sums.gram, sums.value, ridge)
    return (away @ factor).square().sum((-2, -1))


def readout_terms(
    sums: Sums, ridge: Float[Tensor, "*b"] | float, order: int
) -> Float[Tensor, "*b orders p r"]:
    """C X (M X)^j for j = 0 ... order, with X = (G + ridge I)^-1 (I.8 for eta = 1)."""
    full = regularised(sums.gram, ridge)
    terms = [torch.linalg.solve(full, sums.value, left=False)]
    for _ in range(order):
        terms.append(torch.linalg.solve(full, terms[-1] @ sums.lag, left=False))
    return torch.stack(terms, dim=-3)


def readout(
    sums: Sums, coef: Float[Tensor, "*b orders"], ridge: Float[Tensor, "*b"] | float
) -> Float[Tensor, "*b p r"]:
    """W = sum_j c_j C X (M X)^j: a head's answers, and its Jacobian in the query (J.4)."""
    terms = readout_terms(sums, ridge, coef.shape[-1] - 1)
    return (coef[..., None, None] * terms).sum(-3)


def filter_bias(
    sums: Sums, ridge: Float[Tensor, "*b"] | float, order: int
) -> Float[Tensor, "*b p r"]:
    """B* (Phi_K - I): what the power filter adds to the ridge answer (I.10)."""
    terms = readout_terms(sums, ridge, order)
    return terms[..., order, :, :] - terms[..., 0, :, :]


def best_scale(
    gram: Float[Tensor, "*b r r"], ridge: Float[Tensor, "*b"] | float
) -> Float[Tensor, "*b"]:
    """a* = 2 / (1/lambda_max + 1/lambda_min), which minimises |I - a (G + ridge I)^-1| (I.6)."""
    eigenvalues = torch.linalg.eigvalsh(regularised(gram, ridge))
    return 2 / (1 / eigenvalues[..., 0] + 1 / eigenvalues[..., -1])


def isotropy_bound(
    gram: Float[Tensor, "*b r r"],
    value: Float[Tensor, "*b p r"],
    ridge: Float[Tensor, "*b"] | float,
) -> Float[Tensor, "*b"]:
    """|C| (kappa - 1) / (kappa + 1): `distance_to_ridge` for queries of length 1 stays below (I.6).

    From above only: for orthogonal keys of one length it is 0, whatever kappa is. Attained for
    C = I by a query in equal parts, once whitened, of the largest and the smallest direction.
    """
    eigenvalues = torch.linalg.eigvalsh(regularised(gram, ridge))
    smallest, largest = eigenvalues[..., 0], eigenvalues[..., -1]
    size = torch.linalg.matrix_norm(value, ord=2)
    return size * (largest - smallest) / (largest + smallest)


def distance_to_ridge(
    queries: Float[Tensor, "*b n r"], sums: Sums, ridge: Float[Tensor, "*b"] | float
) -> Float[Tensor, "*b n"]:
    """min over a >= 0 of |C q - a C (G + ridge I)^-1 q|: linear attention's error after scaling.

    The paper takes a > 0, for which there is no smallest one where the two answers are opposed.
    """
    linear = queries @ sums.value.mT
    ridged = queries @ ridge_readout(sums.gram, sums.value, ridge).mT
    energy = ridged.square().sum(-1).clamp_min(torch.finfo(ridged.dtype).tiny)
    scale = ((linear * ridged).sum(-1) / energy).clamp_min(0)
    return (linear - scale[..., None] * ridged).norm(dim=-1)


def filter_error_bound(
    delta: float, rho: float, order: int, persistent: float, transient: float
) -> float:
    """Theorem I.11 over |C L^-T|: ((1 + delta)^K - 1) |q_pers| + rho^K |q_trans|, A_w normal."""
    return ((1 + delta) ** order - 1) * persistent + rho**order * transient


def contraction_error_bound(
    delta: float, rho: float, order: int, persistent: float, transient: float
) -> float:
    """The same for |A_w| <= 1, which always holds: |l^K - 1| <= K |l - 1| if |l| <= 1.

    A_w need not be normal if delta is |(A_w - I) q_pers| / |q_pers| and rho^K stands for
    |A_w^K q_trans| / |q_trans|: A^K - I is the sum of A^j (A - I) for j < K.
    """
    return order * delta * persistent + rho**order * transient


def filter_crossover(delta: float, rho: float, order: int) -> float:
    """Corollary I.12: |q_trans| / |q_pers| above which the filter's bound is the smaller one.

    Bounds are compared, not errors. `order` of at least 1; the bound without filter is |q_trans|.
    """
    return ((1 + delta) ** order - 1) / (1 - rho**order)


def contraction_crossover(delta: float, rho: float, order: int) -> float:
    """`filter_crossover` with `contraction_error_bound`, so never above it."""
    return order * delta / (1 - rho**order)


def error_crossover(delta: float, rho: float, order: int, slack: float) -> float:
    """`filter_crossover` for errors, not bounds: above it order K has the smaller error.

    `slack` is |C L^-T| |q_trans| / |C L^-T q_trans|, by which the error without filter is below its
    bound; at most the condition number of C L^-T. Infinite where rho^K leaves nothing to gain.
    """
    room = 1 / slack - rho**order
    return ((1 + delta) ** order - 1) / room if room > 0 else float("inf")
