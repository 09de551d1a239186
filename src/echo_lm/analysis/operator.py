"""The sums of SKA and the operator they define (Appendix A; conditioning, Appendix C)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class Sums(NamedTuple):
    """What a head knows of the tokens it has read, with their keys k_t and values v_t."""

    gram: Float[Tensor, "*b r r"]
    """G = sum k_t k_t'"""
    lag: Float[Tensor, "*b r r"]
    """M = sum k_t k_{t-1}'"""
    value: Float[Tensor, "*b p r"]
    """C = sum v_t k_t'"""


def sums(keys: Float[Tensor, "*b t r"], values: Float[Tensor, "*b t p"]) -> Sums:
    """G, M and C of one stretch of tokens. A masked token is a zero key."""
    earlier, later = keys[..., :-1, :], keys[..., 1:, :]
    return Sums(keys.mT @ keys, later.mT @ earlier, values.mT @ keys)


def regularised(
    gram: Float[Tensor, "*b r r"], ridge: Float[Tensor, "*b"] | float
) -> Float[Tensor, "*b r r"]:
    """G + ridge I, symmetric to the last bit."""
    ridge = torch.as_tensor(ridge, dtype=gram.dtype, device=gram.device)
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return (gram + gram.mT) / 2 + ridge[..., None, None] * eye


def transition(
    gram: Float[Tensor, "*b r r"],
    lag: Float[Tensor, "*b r r"],
    ridge: Float[Tensor, "*b"] | float = 0.0,
) -> Float[Tensor, "*b r r"]:
    """M (G + ridge I)^-1, from a key to the next one by least squares (Propositions A.1 and A.2).

    Least squares proper where `gram` leaves out the last key, which has no successor.
    """
    return torch.linalg.solve(regularised(gram, ridge), lag, left=False)


def shrinkage(
    gram: Float[Tensor, "*b r r"], ridge: Float[Tensor, "*b"] | float
) -> tuple[Float[Tensor, "*b r"], Float[Tensor, "*b r r"]]:
    """s / (s + ridge) for each eigenvalue s of G, and its eigenvectors (Proposition A.2).

    What the ridge leaves of the transition along each direction, relative to no ridge.
    """
    support, directions = torch.linalg.eigh((gram + gram.mT) / 2)
    support = support.clamp_min(0)
    ridge = torch.as_tensor(ridge, dtype=gram.dtype, device=gram.device)
    return support / (support + ridge[..., None]), directions


def whitened_operator(
    gram: Float[Tensor, "*b r r"],
    lag: Float[Tensor, "*b r r"],
    ridge: Float[Tensor, "*b"] | float,
) -> Float[Tensor, "*b r r"]:
    """A_w = L^-1 M L^-T with L L' = G + ridge I (Propositions A.3 and I.4).

    Similar to `transition`, and sigma_max(A_w) <= 1 (ops/ska/README.md).
    """
    factor = torch.linalg.cholesky(regularised(gram, ridge))
    half = torch.linalg.solve_triangular(factor, lag, upper=False)
    return torch.linalg.solve_triangular(factor, half.mT, upper=False).mT


class Conditioning(NamedTuple):
    smallest: Float[Tensor, "*b"]
    """lambda_min(G + ridge I), at least the ridge (Lemmas A.4 and I.1)"""
    condition: Float[Tensor, "*b"]
    """lambda_max / lambda_min"""


def conditioning(gram: Float[Tensor, "*b r r"], ridge: Float[Tensor, "*b"] | float) -> Conditioning:
    """The stability diagnostic of Corollary C.2."""
    eigenvalues = torch.linalg.eigvalsh(regularised(gram, ridge))
    smallest = eigenvalues[..., 0]
    return Conditioning(smallest, eigenvalues[..., -1] / smallest)


def conditioning_along(
    keys: Float[Tensor, "*b t r"], ridge: Float[Tensor, "*b"] | float, counts: Sequence[int]
) -> Conditioning:
    """`conditioning` after each of `counts` tokens (rising), in a last dimension of its own."""
    tokens = keys.shape[-2]
    if not counts or list(counts) != sorted(counts) or counts[0] < 0 or counts[-1] > tokens:
        raise ValueError(f"counts must rise between 0 and {tokens}, got {list(counts)}.")
    pieces = torch.tensor_split(keys, torch.tensor(counts), dim=-2)[:-1]
    grams = torch.stack([piece.mT @ piece for piece in pieces], dim=-3).cumsum(-3)
    ridge = torch.as_tensor(ridge, dtype=keys.dtype, device=keys.device)
    return conditioning(grams, ridge[..., None])


def departure_from_normality(operator: Float[Tensor, "*b r r"]) -> Float[Tensor, "*b"]:
    """|A A' - A' A| / |A|^2: 0 for a normal A, as Theorem I.11 assumes it, and at most 1."""
    commutator = operator @ operator.mT - operator.mT @ operator
    size = torch.linalg.matrix_norm(operator, ord=2).square()
    tiny = torch.finfo(operator.dtype).tiny
    return torch.linalg.matrix_norm(commutator, ord=2) / size.clamp_min(tiny)
