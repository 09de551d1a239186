"""Jacobians of the branches, and what bounds them (Appendix J). Statistics, keys, values fixed."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from echo_lm.analysis.operator import Sums
from echo_lm.analysis.perturbation import norm
from echo_lm.analysis.ridge import ridge_readout

SILU_SLOPE = 1.099839320128867
"""max |SiLU'|, at x = 2.3994 (Proposition J.8)"""


def effective_rank(a: Float[Tensor, "*b m n"]) -> Float[Tensor, "*b"]:
    """exp of the entropy of the singular values as shares: n for n equal ones, 0 for a zero matrix.

    The measure of Roy and Vetterli (2007); between 1 and the rank.
    """
    singular = torch.linalg.svdvals(a)
    total = singular.sum(-1, keepdim=True)
    shares = singular / total.clamp_min(torch.finfo(a.dtype).tiny)
    return torch.special.entr(shares).sum(-1).exp() * (total[..., 0] > 0)


def head_rank_bound(weight: Float[Tensor, "v d"]) -> int:
    """rank(W - 1 w') with the mean row w of the LM head W, for the gradient G_L W of hidden states.

    Sharper than rank(W) (Proposition J.1): each row of G_L, the gradient of a cross-entropy in the
    logits, sums to zero. Below the width d only if the vocabulary is at most d or W is singular.
    """
    return int(torch.linalg.matrix_rank(weight - weight.mean(0)))


def softmax_covariance(weights: Float[Tensor, "*b t"]) -> Float[Tensor, "*b t t"]:
    """S = Diag(alpha) - alpha alpha', the Jacobian of softmax (Proposition J.2)."""
    return torch.diag_embed(weights) - weights[..., :, None] * weights[..., None, :]


def attention_jacobian(
    query: Float[Tensor, "*b r"],
    keys: Float[Tensor, "*b t r"],
    values: Float[Tensor, "*b t p"],
    scale: float,
) -> Float[Tensor, "*b p r"]:
    """scale V' S K, the slope of V' softmax(scale K q) in q (Proposition J.2)."""
    weights = (scale * (keys @ query[..., None])[..., 0]).softmax(-1)
    return scale * values.mT @ softmax_covariance(weights) @ keys


def softmax_bound(peak: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """2 m (1 - m) for the largest weight m: |S| is at most this.

    Below both 1/2 (Proposition J.2) and 2 (1 - m) (Corollary J.3), and attained by two tokens: the
    row of weight a in |S| sums to 2 a (1 - a), and a weight that is not m is at most m and 1 - m.
    At most twice |S|, which has m (1 - m) on its diagonal: so |S| is as small for a diffuse softmax
    (m near 0) as for a saturated one.
    """
    return 2 * peak * (1 - peak)


def paper_jacobian_bound(
    sums: Sums,
    ridge: Float[Tensor, "*b"] | float,
    order: int,
    eta: float = 1.0,
    gamma: float = 1.0,
) -> Float[Tensor, "*b"]:
    """Proposition J.4: eta |B_v| gamma^K sqrt((|G| + ridge) / ridge) is above the SKA Jacobian."""
    size = norm(ridge_readout(sums.gram, sums.value, ridge))
    return eta * size * gamma**order * ((norm(sums.gram) + ridge) / ridge) ** 0.5


def smallest_singular_bound(
    sums: Sums,
    operator: Float[Tensor, "*b r r"],
    ridge: Float[Tensor, "*b"] | float,
    order: int,
    eta: float = 1.0,
) -> Float[Tensor, "*b"]:
    """Proposition J.6: eta s_min(B_v) s_min(A)^K sqrt(ridge / (|G| + ridge)), for P >= r."""
    smallest = torch.linalg.svdvals(ridge_readout(sums.gram, sums.value, ridge))[..., -1]
    nu = torch.linalg.svdvals(operator)[..., -1]
    return eta * smallest * nu**order * (ridge / (norm(sums.gram) + ridge)) ** 0.5


def koopman_rotation(
    gamma: Float[Tensor, " pairs"], omega: Float[Tensor, " pairs"]
) -> Float[Tensor, "k k"]:
    """R, block-diagonal with [[gamma, omega], [-omega, gamma]]; |R| = max |lambda| (J.7)."""
    blocks = torch.stack([gamma, omega, -omega, gamma], -1).unflatten(-1, (2, 2))
    return torch.block_diag(*blocks)


def koopman_mlp_jacobian(
    x: Float[Tensor, " d"],
    lift: Float[Tensor, "k d"],
    rotation: Float[Tensor, "k k"],
    readout: Float[Tensor, "d k"],
) -> Float[Tensor, "d d"]:
    """W_read R Diag(SiLU'(a)) W_lift with a = W_lift x (Proposition J.8)."""
    a = lift @ x
    slope = torch.sigmoid(a) * (1 + a * (1 - torch.sigmoid(a)))
    return readout @ rotation @ (slope[:, None] * lift)


def paper_depth_bound(branches: Float[Tensor, "*b layers"]) -> Float[Tensor, "*b"]:
    """Theorem J.9: the product of |J_j|, for |g| below over |g| above, were there no residual."""
    return branches.prod(-1)


def depth_bound(branches: Float[Tensor, "*b layers"]) -> Float[Tensor, "*b"]:
    """The same for blocks x + branch(x), whose Jacobian is I + J: the product of 1 + |J_j|."""
    return (1 + branches).prod(-1)


def depth_floor(branches: Float[Tensor, "*b layers"]) -> Float[Tensor, "*b"]:
    """What |g| below over |g| above cannot fall under: the product of 1 - |J_j|, or 0."""
    return (1 - branches).clamp_min(0).prod(-1)
