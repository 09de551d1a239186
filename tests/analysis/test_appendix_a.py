"""Appendix A, statement by statement: estimating the operator."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from echo_lm.analysis.operator import (
    conditioning,
    regularised,
    shrinkage,
    sums,
    transition,
    whitened_operator,
)
from echo_lm.analysis.perturbation import norm

from .draws import EPS, Tokens, draw_keys, tokens

REGULAR = ["normal", "masked", "spread", "weak direction"]
"""Kinds of keys that fill all directions."""


def with_successor(keys: Tensor) -> tuple[Tensor, Tensor]:
    """G over the keys that have a successor, as A.1 has it, and M."""
    earlier = keys[..., :-1, :]
    return earlier.mT @ earlier, sums(keys, keys).lag


def misses(A: Tensor, keys: Tensor) -> Tensor:
    """sum_t |z_{t+1} - A z_t|^2"""
    return (keys[..., 1:, :] - keys[..., :-1, :] @ A.mT).square().sum((-2, -1))


def traces(A: Tensor) -> Tensor:
    """tr A^j for j up to the rank: they settle the eigenvalues, and are safe to compute."""
    rank = A.shape[-1]
    return torch.stack([torch.linalg.matrix_power(A, j + 1).trace() for j in range(rank)])


@pytest.mark.parametrize("kind", REGULAR)
def test_proposition_a1_least_squares_gives_the_transition(kind: str) -> None:
    k = draw_keys(kind, 30, 5, batch=(8,))
    G, M = with_successor(k)
    A = transition(G, M)
    lost = 64 * EPS * float(torch.linalg.cond(G).max())
    best = torch.linalg.lstsq(k[:, :-1], k[:, 1:]).solution.mT
    assert float(norm(A - best).max()) <= lost * float(norm(best).max())
    for size in (1e-3, 1.0):
        elsewhere = A + size * torch.randn_like(A)
        assert bool((misses(elsewhere, k) > misses(A, k)).all())


def test_proposition_a1_needs_an_invertible_gram() -> None:
    """Two keys of width two: one transition is seen, and any A that makes it is as good."""
    k = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    G, M = with_successor(k)
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        transition(G, M)
    for free in (-1.0, 0.0, 7.0):
        assert misses(torch.tensor([[0.0, free], [1.0, free]], dtype=k.dtype), k) == 0
    least = torch.tensor([[0.0, 0.0], [1.0, 0.0]], dtype=k.dtype)
    assert_close(transition(G, M, 1e-9), least, rtol=0, atol=2e-9)


def test_proposition_a1_with_a_vanishing_ridge_is_the_least_of_the_minimisers() -> None:
    k = draw_keys("normal", 5, 8)
    G, M = with_successor(k)
    least = k[1:].mT @ torch.linalg.pinv(k[:-1]).mT
    assert_close(transition(G, M, 1e-7), least, rtol=0, atol=1e-6)


def test_proof_of_proposition_a1_transposes_the_wrong_way() -> None:
    """Keys (1, 0), (0, 2), (0, 0): M G^-1 follows them, M' G^-1 and its transpose do not."""
    k = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]], dtype=torch.float64)
    G, M = with_successor(k)
    assert misses(transition(G, M), k) == 0
    assert misses(transition(G, M.mT), k) == 5
    assert misses(transition(G, M.mT).mT, k) == 2.25


@pytest.mark.parametrize("kind", REGULAR)
def test_remark_1_without_the_lag_the_transition_is_the_identity(kind: str) -> None:
    """Whatever the keys. With a ridge it is the shrinkage itself, as little of what followed."""
    G, _ = with_successor(draw_keys(kind, 30, 5))
    eye = torch.eye(5, dtype=G.dtype)
    lost = 64 * EPS * float(torch.linalg.cond(G))
    assert_close(transition(G, G), eye, rtol=0, atol=lost)
    share, V = shrinkage(G, 0.3)
    assert_close(transition(G, G, 0.3), V @ torch.diag(share) @ V.mT, rtol=0, atol=lost)


@given(case=tokens())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_proposition_a2_ridge_divides_each_direction_by_its_support(case: Tokens) -> None:
    """A_eps V = M V diag(1 / (s + eps)), on keys of every kind."""
    G, M, _ = case.sums
    share, V = shrinkage(G, case.ridge)
    support = torch.linalg.eigvalsh(G).clamp_min(0)
    wanted = M @ V / (support + case.ridge)
    lost = 64 * case.rounding * (1 + float(norm(wanted)))
    assert_close(transition(G, M, case.ridge) @ V, wanted, rtol=0, atol=lost)
    assert_close(share, support / (support + case.ridge), rtol=0, atol=64 * case.rounding)


@pytest.mark.parametrize("kind", REGULAR)
def test_proposition_a2_ridge_is_shrinkage_of_the_fit_without_ridge(kind: str) -> None:
    G, M = with_successor(draw_keys(kind, 30, 5))
    lost = 64 * EPS * float(torch.linalg.cond(G))
    for ridge in (1e-3, 1.0, 1e3):
        share, V = shrinkage(G, ridge)
        free = transition(G, M)
        wanted = free @ V * share
        assert float(norm(transition(G, M, ridge) @ V - wanted)) <= lost * float(norm(free))


def test_proposition_a2_minimises_the_misses_and_the_ridge() -> None:
    k = draw_keys("normal", 20, 6)
    design = torch.cat([k[:-1], 0.3**0.5 * torch.eye(6, dtype=k.dtype)])
    targets = torch.cat([k[1:], torch.zeros(6, 6, dtype=k.dtype)])
    best = torch.linalg.lstsq(design, targets).solution.mT
    assert_close(transition(*with_successor(k), 0.3), best, rtol=1e-12, atol=1e-12)


def test_proposition_a2_a_direction_far_below_the_ridge_may_still_count_nine_times() -> None:
    """Shrunk "toward zero" only beside the fit without ridge, 1 / s for keys (s, 0), (0, 1).

    The component is s / (s^2 + eps): with s falling it grows until s^2 = eps, and then vanishes.
    """
    sizes = torch.tensor([1.0, 0.1, 1e-3**0.5, 0.01, 1e-3, 1e-6], dtype=torch.float64)
    k = torch.zeros(6, 2, 2, dtype=torch.float64)
    k[:, 0, 0], k[:, 1, 1] = sizes, 1.0
    G, M, _ = sums(k, k)
    component = transition(G, M, 1e-3)[:, :, 0].norm(dim=-1)
    assert_close(component, sizes / (sizes**2 + 1e-3))
    assert int(component.argmax()) == 2
    share, _ = shrinkage(G[3], 1e-3)
    assert_close(share[0].item(), 1 / 11)
    assert_close(component[3].item(), 100 / 11)
    assert component[5] < 2e-3


@given(case=tokens())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_proposition_a2_a_component_is_bounded_by_its_support(case: Tokens) -> None:
    """|A_eps v| <= sqrt(s g_max) / (s + eps), which vanishes with s, but only beyond eps."""
    G, M, _ = case.sums
    _, V = shrinkage(G, case.ridge)
    support = torch.linalg.eigvalsh(G).clamp_min(0)
    component = (transition(G, M, case.ridge) @ V).norm(dim=0)
    # An eigenvalue is known to eps |G|, its root to the root of that.
    blurred = support + 64 * EPS * support[-1]
    bound = (blurred * support[-1]).sqrt() / (support + case.ridge)
    assert bool((component <= bound * case.slack).all())


@given(case=tokens(), spread=st.booleans())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_proposition_a3_whitened_operator_is_similar_to_the_transition(
    case: Tokens, spread: bool
) -> None:
    """L A_w L^-1 = A_eps, also for a batch and a ridge for each of it."""
    G, M, _ = case.sums
    ridge: float | Tensor = case.ridge
    if spread:
        G, M = G.expand(3, -1, -1), M.expand(3, -1, -1)
        ridge = case.ridge * torch.tensor([1.0, 2.0, 30.0], dtype=G.dtype)
    L = torch.linalg.cholesky(regularised(G, ridge))
    A_w, A = whitened_operator(G, M, ridge), transition(G, M, ridge)
    back = torch.linalg.solve_triangular(L, L @ A_w, upper=False, left=False)
    lost = 64 * case.rounding * (1 + float(norm(A).max()))
    assert_close(back, A, rtol=0, atol=lost)


@given(case=tokens(max_rank=5))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_proposition_a3_eigenvalues_are_the_same(case: Tokens) -> None:
    """As traces of powers: the eigenvalues of a defective operator are not safe to compute."""
    G, M, _ = case.sums
    A = transition(G, M, case.ridge)
    lost = 64 * case.rounding * sum(float(norm(A)) ** j for j in range(6))
    assert_close(traces(whitened_operator(G, M, case.ridge)), traces(A), rtol=0, atol=lost)


def test_proposition_a3_any_square_root_of_the_gram_serves() -> None:
    """The symmetric one gives an operator of the same singular values, turned."""
    G, M, _ = sums(*[draw_keys("normal", 30, 5)] * 2)
    support, V = torch.linalg.eigh(regularised(G, 0.1))
    half = V @ torch.diag(support.rsqrt()) @ V.mT
    symmetric, A_w = half @ M @ half, whitened_operator(G, M, 0.1)
    assert_close(torch.linalg.svdvals(symmetric), torch.linalg.svdvals(A_w))
    assert_close(traces(symmetric), traces(A_w))
    assert not torch.allclose(symmetric, A_w, atol=0.01)


def test_remark_2_eigenvalues_agree_but_norms_do_not() -> None:
    """Keys (0.1, 0), (0, 1): the whitened operator contracts, the other makes ten of one."""
    k = torch.tensor([[0.1, 0.0], [0.0, 1.0]], dtype=torch.float64)
    G, M, _ = sums(k, k)
    assert norm(whitened_operator(G, M, 1e-3)) < 0.954
    assert_close(norm(transition(G, M, 1e-3)).item(), 100 / 11)


@given(case=tokens(max_rank=5))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_remark_2_is_wrong_the_reversed_product_is_always_similar(case: Tokens) -> None:
    """G^-1 M = G^-1 (M G^-1) G, so its eigenvalues are those of the transition."""
    G, M, _ = case.sums
    full, A = regularised(G, case.ridge), transition(G, M, case.ridge)
    reversed_product = torch.linalg.solve(full, M)
    size = 1 + float(norm(A)) + float(norm(reversed_product))
    similar = torch.linalg.solve(full, A @ full)
    lost = 64 * case.rounding * size * float(norm(full)) / case.ridge
    assert_close(similar, reversed_product, rtol=0, atol=lost)
    lost = 64 * case.rounding * sum(size**j for j in range(6))
    assert_close(traces(reversed_product), traces(A), rtol=0, atol=lost)


@given(case=tokens())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_lemma_a4_regularised_gram_is_positive_definite(case: Tokens) -> None:
    G, _, _ = case.sums
    full = regularised(G, case.ridge)
    assert torch.equal(full, full.mT)
    assert int(torch.linalg.cholesky_ex(full).info) == 0
    rounded = 64 * EPS * float(norm(full))
    smallest, condition = conditioning(G, case.ridge)
    assert smallest >= case.ridge - rounded
    assert_close(condition, torch.linalg.cond(full, 2), rtol=64 * case.rounding, atol=0)
    if int(torch.linalg.matrix_rank(case.keys)) < case.keys.shape[-1]:
        assert smallest <= case.ridge + rounded


def test_lemma_a4_ends_where_rounding_takes_the_ridge() -> None:
    """One key (1, 1) and a ridge below the last bit of its Gram matrix."""
    k = torch.ones(1, 2, dtype=torch.float64)
    full = regularised(k.mT @ k, EPS / 4)
    assert torch.equal(full, k.mT @ k)
    assert int(torch.linalg.cholesky_ex(full).info) > 0
    assert int(torch.linalg.cholesky_ex(regularised(k.mT @ k, 4 * EPS)).info) == 0
