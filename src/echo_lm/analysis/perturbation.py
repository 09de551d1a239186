"""How far errors in the sums move the operator and its eigenvalues (Appendix C)."""

from __future__ import annotations

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from echo_lm.analysis.operator import regularised, transition, whitened_operator


def norm(a: Float[Tensor, "*b m n"]) -> Float[Tensor, "*b"]:
    """The operator norm, the largest singular value."""
    return torch.linalg.matrix_norm(a, ord=2)


def paper_operator_bound(
    gram: Float[Tensor, "*b r r"],
    lag: Float[Tensor, "*b r r"],
    gram_error: Float[Tensor, "*b r r"],
    lag_error: Float[Tensor, "*b r r"],
    ridge: Float[Tensor, "*b"] | float,
) -> Float[Tensor, "*b"]:
    """Theorem C.1, for |A^ - A| of `transition`: |E_M| |G^^-1| + |A| |E_G| |G^^-1| cond(G)."""
    inexact = norm(torch.linalg.inv(regularised(gram + gram_error, ridge)))
    condition = torch.linalg.cond(regularised(gram, ridge), p=2)
    size = norm(transition(gram, lag, ridge))
    return (norm(lag_error) + size * condition * norm(gram_error)) * inexact


def operator_bound(
    gram: Float[Tensor, "*b r r"],
    lag: Float[Tensor, "*b r r"],
    gram_error: Float[Tensor, "*b r r"],
    lag_error: Float[Tensor, "*b r r"],
    ridge: Float[Tensor, "*b"] | float,
) -> Float[Tensor, "*b"]:
    """The same without the condition number: A^ - A = (E_M - A E_G) G^^-1, since M G^-1 is A."""
    inexact = norm(torch.linalg.inv(regularised(gram + gram_error, ridge)))
    size = norm(transition(gram, lag, ridge))
    return (norm(lag_error) + size * norm(gram_error)) * inexact


def eigenvector_condition(a: Float[Tensor, "*b r r"]) -> Float[Tensor, "*b"]:
    """kappa(V) of a = V Lambda V^-1; 1 for a normal matrix, infinite where V does not exist."""
    return torch.linalg.cond(torch.linalg.eig(a).eigenvectors, p=2)


def bauer_fike(a: Float[Tensor, "*b r r"], error: Float[Tensor, "*b r r"]) -> Float[Tensor, "*b"]:
    """Theorem C.3: an eigenvalue of a + error is within kappa(V) |error| of one of a."""
    return eigenvector_condition(a) * norm(error)


def paper_eigenvalue_bound(
    gram: Float[Tensor, "*b r r"],
    lag: Float[Tensor, "*b r r"],
    gram_error: Float[Tensor, "*b r r"],
    lag_error: Float[Tensor, "*b r r"],
    ridge: Float[Tensor, "*b"] | float,
) -> Float[Tensor, "*b"]:
    """Corollary C.4: kappa(V) of the whitened operator times Theorem C.1."""
    condition = eigenvector_condition(whitened_operator(gram, lag, ridge))
    return condition * paper_operator_bound(gram, lag, gram_error, lag_error, ridge)


def eigenvalue_bound(
    gram: Float[Tensor, "*b r r"],
    lag: Float[Tensor, "*b r r"],
    gram_error: Float[Tensor, "*b r r"],
    lag_error: Float[Tensor, "*b r r"],
    ridge: Float[Tensor, "*b"] | float,
) -> Float[Tensor, "*b"]:
    """kappa(V) (|E_M| + |E_G|) / lambda_min(G), where the inexact sums are sums over keys too.

    (M + E_M) x = l G^ x means (A_w - l) w = L^-1 (l E_G - E_M) L^-T w for w = L'x, and |l| <= 1.
    """
    condition = eigenvector_condition(whitened_operator(gram, lag, ridge))
    smallest = torch.linalg.eigvalsh(regularised(gram, ridge))[..., 0]
    return condition * (norm(gram_error) + norm(lag_error)) / smallest


def eigenvalue_distance(
    a: Float[Tensor, "*b r r"], moved: Float[Tensor, "*b r r"]
) -> Float[Tensor, "*b r"]:
    """From each eigenvalue of `moved` to the nearest one of `a`."""
    here: Complex[Tensor, "*b r"] = torch.linalg.eigvals(moved)
    there: Complex[Tensor, "*b r"] = torch.linalg.eigvals(a)
    return (here[..., :, None] - there[..., None, :]).abs().amin(-1)
