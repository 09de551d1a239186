"""Appendix D, statement by statement: what a power of the operator does to a query."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from echo_lm.analysis.filtering import (
    filter_gain,
    filter_response,
    order_shares,
    power_coefficients,
)
from echo_lm.analysis.operator import (
    departure_from_normality,
    regularised,
    sums,
    whitened_operator,
)
from echo_lm.analysis.perturbation import eigenvector_condition, norm

from .draws import EPS, Tokens, draw_keys, tokens

TABLES = {
    2: {0.95: 0.902, 0.90: 0.810, 0.70: 0.490, 0.50: 0.250, 0.30: 0.090},
    4: {0.95: 0.815, 0.90: 0.656, 0.70: 0.240, 0.50: 0.063, 0.30: 0.008},
}

coefficients = st.lists(st.sampled_from([-2.0, -0.5, 0.0, 0.3, 1.0]), min_size=1, max_size=6)


def applied(coef: Tensor, A: Tensor) -> Tensor:
    """sum_j c_j A^j, power by power."""
    powers = [torch.linalg.matrix_power(A, j) for j in range(len(coef))]
    return (coef.to(A.dtype)[:, None, None] * torch.stack(powers)).sum(0)


def whitened(case: Tokens) -> Tensor:
    return whitened_operator(*case.sums[:2], case.ridge)


@pytest.mark.parametrize("order", TABLES)
def test_proposition_d1_tables(order: int) -> None:
    """All ten entries are right to the digits given, for every phase of the eigenvalue."""
    moduli = torch.tensor(list(TABLES[order]), dtype=torch.float64)
    printed = torch.tensor(list(TABLES[order].values()), dtype=torch.float64)
    for phase in (0.0, 1.0, math.pi):
        modes = torch.polar(moduli, torch.full_like(moduli, phase))
        response = filter_response(power_coefficients(order), modes).abs()
        assert float((response - printed).abs().max()) <= 0.0005 + EPS


@given(case=tokens(), coef=coefficients)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_proposition_d1_a_filter_acts_on_each_mode_by_its_response(
    case: Tokens, coef: list[float]
) -> None:
    """Of any polynomial, the power being one of them."""
    A = whitened(case)
    modes, V = torch.linalg.eig(A)
    c = torch.tensor(coef, dtype=torch.float64)
    got = applied(c, A).to(V.dtype) @ V
    lost = 64 * EPS * len(coef) * float(c.abs().sum()) * A.shape[-1]
    assert_close(got, V * filter_response(c, modes), rtol=0, atol=lost)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_proposition_d1_for_a_batch_of_heads_each_with_its_filter(dtype: torch.dtype) -> None:
    coef = torch.tensor([[0.0, 0.0, 1.0], [1.0, -1.0, 0.5]], dtype=torch.float64)
    modes = torch.randn(2, 5, dtype=dtype)
    wanted = torch.stack([modes[0] ** 2, 1 - modes[1] + 0.5 * modes[1] ** 2])
    assert_close(filter_response(coef, modes), wanted)


@pytest.mark.parametrize("order", [1, 2, 4])
def test_proposition_d1_is_silent_about_defective_operators(order: int) -> None:
    """Keys e_1 ... e_8 once: every eigenvalue is 0, and a step of the filter loses next to nothing.

    V Lambda V^-1 does not exist. Hence eigenvalues do not tell what is "suppressed".
    """
    k = draw_keys("chain", 8, 8)
    G, M, _ = sums(k, k)
    A = whitened_operator(G, M, 1e-3)
    modes = torch.linalg.eigvals(A)
    assert not filter_response(power_coefficients(order), modes).any()
    assert eigenvector_condition(A) > 1e100
    assert_close(norm(torch.linalg.matrix_power(A, order)).item(), 1.001**-order)


def test_remark_3_the_tables_are_of_amplitudes_not_of_energy() -> None:
    def response(order: int, modulus: float) -> float:
        modes = torch.tensor([modulus], dtype=torch.float64)
        return filter_response(power_coefficients(order), modes).item()

    def kept_half(order: int, amount: float) -> float:
        """The modulus of which half is left, as amplitude (1) or energy (2)."""
        return float(0.5 ** (1 / (amount * order)))

    assert_close(response(2, 0.7), 0.49)  # "retain at least 49% of their energy"
    assert_close(response(2, 0.7) ** 2, 0.2401)
    assert_close(response(2, 0.9) ** 2, 0.6561)  # "retains 81% energy" (6.1)
    assert round(kept_half(4, 1), 3) == 0.841  # "only |lambda| >= 0.85 retain more than 50%"
    assert round(kept_half(4, 2), 3) == 0.917
    assert response(4, 0.85) > 0.5 > response(4, 0.85) ** 2


@given(case=tokens(), order=st.integers(1, 6))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_proposition_d2_the_power_filter_contracts(case: Tokens, order: int) -> None:
    """And there is nothing to normalise: max(1, sigma) is 1 on keys of every kind."""
    A = whitened(case)
    assert norm(A) <= case.slack
    assert norm(torch.linalg.matrix_power(A, order)) <= case.slack**order


def test_proposition_d2_holds_for_whitened_queries_only() -> None:
    """Remark 4 says no component of the query is amplified; L A_w L^-1 makes 9.09 of (1, 0)."""
    k = torch.tensor([[0.1, 0.0], [0.0, 1.0]], dtype=torch.float64)
    G, M, _ = sums(k, k)
    L = torch.linalg.cholesky(regularised(G, 1e-3))
    query = torch.tensor([1.0, 0.0], dtype=torch.float64)
    amplified = L @ whitened_operator(G, M, 1e-3) @ torch.linalg.inv(L) @ query
    assert_close(amplified.norm().item(), 100 / 11)


@given(case=tokens(), order=st.integers(0, 6), gamma=st.sampled_from([1.0, 1.2, 1.5]))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_proposition_d3_gamma_is_bounded_by_its_power(
    case: Tokens, order: int, gamma: float
) -> None:
    """Whatever the rank: 2.25 for gamma = 1.5 and K = 2."""
    coef = power_coefficients(order, gamma)
    assert_close(filter_gain(coef).item(), gamma**order)
    scaled = torch.linalg.matrix_power(gamma * whitened(case), order)
    assert_close(applied(coef, whitened(case)), scaled, rtol=0, atol=64 * EPS * gamma**order)
    assert norm(scaled) <= gamma**order * case.slack ** max(order, 1)
    assert filter_gain(power_coefficients(2, 1.5)) == 2.25


def test_proposition_d3_restores_no_mode_relative_to_another() -> None:
    """gamma multiplies all of them alike: a mode of 1/1.5 is "restored" together with the noise."""
    modes = torch.tensor([1.0, 1 / 1.5, 0.3, 0.01], dtype=torch.float64)
    plain = filter_response(power_coefficients(2), modes)
    restored = filter_response(power_coefficients(2, 1.5), modes)
    assert_close(restored / plain, torch.full_like(modes, 2.25))
    assert_close(restored[1].item(), 1.0)


@given(case=tokens(), coef=coefficients)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_filter_gain_bounds_every_filter(case: Tokens, coef: list[float]) -> None:
    """Von Neumann: a polynomial of a contraction is at most what it is on the unit disk."""
    c = torch.tensor(coef, dtype=torch.float64)
    assert norm(applied(c, whitened(case))) <= filter_gain(c) * case.slack ** len(coef) + 64 * EPS


@given(coef=coefficients)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_filter_gain_is_the_maximum_on_the_unit_circle(coef: list[float]) -> None:
    c = torch.tensor(coef, dtype=torch.float64)
    angles = torch.linspace(0, torch.pi, 20_000, dtype=torch.float64)
    circle = torch.polar(torch.ones_like(angles), angles)
    seen, gain = filter_response(c, circle).abs().max(), filter_gain(c)
    assert seen * (1 - 1e-12) <= gain <= seen * (1 + 4e-5)
    assert gain <= c.abs().sum()


def test_no_smaller_number_than_the_gain_serves_every_operator() -> None:
    """1 + A - A^2 of a quarter turn: sqrt(5), where the sizes of the coefficients add up to 3."""
    coef = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)
    steps = torch.pi / 2 * torch.arange(4000, dtype=torch.float64)
    k = torch.stack([steps.cos(), steps.sin()], 1)
    G, M, _ = sums(k, k)
    reached = norm(applied(coef, whitened_operator(G, M, 1e-6)))
    assert_close(filter_gain(coef).item(), 5**0.5, rtol=4e-5, atol=0)
    assert float(filter_gain(coef)) * 0.998 < reached <= filter_gain(coef)


def test_filter_gain_knows_batches_and_nothing() -> None:
    coef = torch.tensor([[0.0, 0.0], [2.0, -1.0], [0.5, 0.0]])
    assert_close(filter_gain(coef), torch.tensor([0.0, 3.0, 0.5]))


def test_order_shares_are_parts_of_one() -> None:
    coef = torch.tensor([[0.0, 0.0, 1.5], [1.0, -1.0, 2.0], [0.0, 0.0, 0.0]])
    wanted = torch.tensor([[0.0, 0.0, 1.0], [0.25, 0.25, 0.5], [0.0, 0.0, 0.0]])
    assert_close(order_shares(coef), wanted)


@given(case=tokens())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_departure_from_normality_is_a_share(case: Tokens) -> None:
    assert 0 <= departure_from_normality(whitened(case)) <= 1 + 64 * EPS


def test_modes_tell_the_gain_of_normal_operators_alone() -> None:
    """There |p(A)| is the largest response. The chain is as far from normal as can be."""
    A = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64)).Q
    coef = torch.tensor([0.3, 1.0, -0.7], dtype=torch.float64)
    assert departure_from_normality(A) < 64 * EPS
    assert departure_from_normality(torch.zeros(3, 3)) == 0
    response = filter_response(coef, torch.linalg.eigvals(A)).abs().max()
    assert_close(norm(applied(coef, A)), response)
    k = draw_keys("chain", 8, 8)
    G, M, _ = sums(k, k)
    assert_close(departure_from_normality(whitened_operator(G, M, 1e-3)).item(), 1.0)
