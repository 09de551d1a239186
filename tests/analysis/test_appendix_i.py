"""Appendix I: SKA, ridge retrieval and attention. One test, or a few, for every statement."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from echo_lm.analysis.gradients import koopman_rotation
from echo_lm.analysis.memory import cache_crossover, state_numbers
from echo_lm.analysis.operator import (
    Sums,
    conditioning,
    conditioning_along,
    departure_from_normality,
    regularised,
    sums,
    transition,
)
from echo_lm.analysis.ridge import (
    best_scale,
    contraction_crossover,
    contraction_error_bound,
    distance_to_ridge,
    error_crossover,
    excess,
    filter_bias,
    filter_crossover,
    filter_error_bound,
    isotropy_bound,
    objective,
    readout,
    readout_terms,
    ridge_readout,
)
from echo_lm.ops import SKAState, ska

from .draws import EPS, KINDS
from .heads import RIDGES, Head, assert_near, head, heads, norm, thorough

power = torch.linalg.matrix_power


def eye(size: int) -> Tensor:
    return torch.eye(size, dtype=torch.float64)


def vector(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def by_least_squares(h: Head) -> Tensor:
    """The ridge problem as least squares, K over sqrt(ridge) I: no Gram matrix is formed."""
    rank, width = h.keys.shape[1], h.values.shape[1]
    design = torch.cat([h.keys, h.ridge**0.5 * eye(rank)])
    targets = torch.cat([h.values, h.values.new_zeros(rank, width)])
    return torch.linalg.lstsq(design, targets).solution.mT


# Lemma I.1


@given(heads)
@thorough
def test_lemma_i1_lambda_min_is_at_least_the_ridge(h: Head) -> None:
    found = conditioning(h.sums.gram, h.ridge)
    rounding = EPS * h.keys.shape[1] * norm(h.full)
    assert float(found.smallest) >= h.ridge - rounding
    assert bool(torch.linalg.cholesky_ex(h.full).info == 0)
    wanted = float(torch.linalg.cond(h.full))
    assert_near(found.condition, wanted, h.rounding * wanted)
    if h.keys.shape[0] < h.keys.shape[1]:  # a direction no key has
        assert_near(found.smallest, h.ridge, rounding)


def test_lemma_i1_is_attained_for_ever_by_keys_that_leave_a_direction_out() -> None:
    k = torch.randn(1000, 6, dtype=torch.float64)
    k[:, 5] = 0
    along = conditioning_along(k, 0.01, [0, 10, 100, 1000])
    assert_near(along.smallest, torch.full((4,), 0.01, dtype=k.dtype), 1e-12)
    assert along.condition.tolist() == sorted(along.condition.tolist())
    assert along.condition[-1] > 5e4
    whole = conditioning(k.mT @ k, 0.01)
    assert_near(along.condition[-1], whole.condition, 1e-9 * float(whole.condition))


# Propositions I.2, I.3 and I.4


@given(heads)
@thorough
def test_proposition_i2_ridge_read_out_is_the_minimiser(h: Head) -> None:
    """It is what least squares finds, the slope there is zero, and every step away goes up."""
    B = ridge_readout(h.sums.gram, h.sums.value, h.ridge)
    assert_near(B, by_least_squares(h), h.rounding * h.scale)
    B.requires_grad_()
    (slope,) = torch.autograd.grad(objective(B, h.keys, h.values, h.ridge), B)
    assert_near(slope, torch.zeros_like(B), h.rounding * norm(h.full) * h.scale)
    step = h.queries[:1].expand_as(B) * h.scale
    there = objective(B.detach(), h.keys, h.values, h.ridge)
    assert objective(B.detach() + step, h.keys, h.values, h.ridge) > there


@given(heads)
@thorough
def test_proposition_i3_excess_is_the_exact_distance_from_the_minimum(h: Head) -> None:
    """L(B) - L(B*) = |(B - B*) (G + ridge I)^(1/2)|^2, here for a B that knows one value."""
    B = h.values[:1].mT @ h.queries[:1]
    best = ridge_readout(h.sums.gram, h.sums.value, h.ridge)
    here = objective(B, h.keys, h.values, h.ridge)
    rise = here - objective(best, h.keys, h.values, h.ridge)
    allowed = h.rounding * float(here + h.values.square().sum())
    assert_near(excess(B, h.sums, h.ridge), rise, allowed)
    assert rise > 0
    assert excess(best, h.sums, h.ridge) == 0


def test_proposition_i3_cholesky_factor_and_square_root_give_one_norm() -> None:
    h = head()
    B = torch.randn(4, 5, dtype=torch.float64)
    eigenvalues, U = torch.linalg.eigh(h.full)
    away = B - ridge_readout(h.sums.gram, h.sums.value, h.ridge)
    wanted = (away @ (U * eigenvalues.sqrt()) @ U.mT).square().sum()
    assert_near(excess(B, h.sums, h.ridge), wanted, 1e-12 * float(wanted))


@given(heads)
@thorough
def test_proposition_i4_whitened_and_unwhitened_operators_are_similar(h: Head) -> None:
    """L A_w = A L; hence also the same trace of every power, and the same eigenvalues."""
    A = transition(h.sums.gram, h.sums.lag, h.ridge)
    allowed = h.rounding * norm(h.factor)
    assert_near(h.factor @ h.operator, A @ h.factor, allowed)
    for order in (1, 2, 3):
        traces = (power(x, order).trace() for x in (h.operator, A))
        assert_near(*traces, order * h.rounding * h.condition**0.5)


def test_proposition_i4_holds_for_eigenvalues_that_are_well_apart() -> None:
    h = head(rank=4)
    spectra = [
        torch.linalg.eigvals(A) for A in (h.operator, transition(h.sums.gram, h.sums.lag, h.ridge))
    ]
    nearest = (spectra[0][:, None] - spectra[1]).abs().amin(0)
    assert float(nearest.max()) < 1e-12


# Proposition I.5 and Theorem I.6: linear attention


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ridge", RIDGES)
def test_proposition_i5_linear_attention_is_one_gradient_step(kind: str, ridge: float) -> None:
    """A step of 1/2 from B = 0, whatever the ridge."""
    h = head(kind, ridge=ridge)
    start = torch.zeros(4, 5, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(objective(start, h.keys, h.values, ridge), start)
    C = h.sums.value
    assert_near(-slope / 2, C, 40 * EPS * float(h.keys.abs().mT.mm(h.values.abs()).max()))


def test_proposition_i5_a_step_of_one_half_overshoots_where_keys_are_many() -> None:
    """It is sure to go down only where |G + ridge I| is at most 2."""
    few, many = (head(tokens=tokens, ridge=0.1) for tokens in (1, 200))
    for h, helps in ((few, True), (many, False)):
        h = Head(h.keys / h.keys.norm(dim=-1).max(), h.values, h.queries, h.ridge)
        nothing = objective(torch.zeros_like(h.sums.value), h.keys, h.values, h.ridge)
        step = objective(h.sums.value, h.keys, h.values, h.ridge)
        assert bool(step < nothing) == helps


@given(heads)
@thorough
def test_theorem_i6_bounds_the_distance_of_linear_attention_to_ridge(h: Head) -> None:
    """min_a |C q - a C (G + ridge I)^-1 q| <= |C| (kappa - 1) / (kappa + 1) |q|"""
    found = distance_to_ridge(h.queries, h.sums, h.ridge)
    bound = isotropy_bound(h.sums.gram, h.sums.value, h.ridge) * h.queries.norm(dim=-1)
    rounding = h.rounding * norm(h.sums.value) * h.queries.norm(dim=-1)
    assert bool((found <= bound + rounding).all())


@given(heads)
@thorough
def test_theorem_i6_scale_minimises_the_bound(h: Head) -> None:
    """|I - a (G + ridge I)^-1| is (kappa - 1) / (kappa + 1) at a*, and no less beside it."""
    X = torch.linalg.inv(h.full)
    best = float(best_scale(h.sums.gram, h.ridge))
    at = {part: norm(eye(len(X)) - part * best * X) for part in (0.9, 0.99, 1.0, 1.01, 1.1)}
    bound = float(isotropy_bound(h.sums.gram, eye(len(X)), h.ridge))
    assert_near(at[1.0], bound, h.rounding)
    assert min(at.values()) >= at[1.0] - h.rounding


@pytest.mark.parametrize("ridge", RIDGES)
def test_theorem_i6_isotropic_gram_gives_equality(ridge: float) -> None:
    """G + ridge I = c I: linear attention is c times ridge, also for any keys and a huge ridge."""
    k, v, q = 3 * torch.linalg.qr(torch.randn(5, 5).double()).Q, *torch.randn(2, 5, 5).double()
    known = sums(k, v)
    ridged = q @ ridge_readout(known.gram, known.value, ridge).mT
    assert_near(q @ known.value.mT, (9 + ridge) * ridged, 1e-9)
    assert float(distance_to_ridge(q, known, ridge).max()) < 1e-9
    assert float(isotropy_bound(known.gram, known.value, ridge)) < 1e-9
    any_keys = head(ridge=1e12)
    assert float(isotropy_bound(any_keys.sums.gram, any_keys.sums.value, 1e12)) < 1e-8


def test_theorem_i6_is_attained() -> None:
    """By C = I and one query: so no smaller number serves all C and q."""
    gram, ridge = torch.diag(vector(0.5, 2, 8)), 0.5
    known = Sums(gram, eye(3), eye(3))
    q = vector(1.0, 0, 8.5**0.5)[None]
    bound = isotropy_bound(gram, eye(3), ridge)
    assert_near(distance_to_ridge(q, known, ridge)[0], bound * q.norm(), 1e-14)


@pytest.mark.parametrize("tokens", [1, 3])
def test_theorem_i6_is_no_lower_bound(tokens: int) -> None:
    """One token, or orthogonal keys of one length: kappa is a million, the distance nothing.

    Not "exactly when the Gram is close to isotropic", and no "unavoidable error".
    """
    k, v = eye(4)[:tokens], torch.randn(tokens, 5, dtype=torch.float64)
    known = sums(k, v)
    q = torch.randn(50, 4, dtype=torch.float64)
    assert conditioning(known.gram, 1e-6).condition > 1e6
    assert float(isotropy_bound(known.gram, known.value, 1e-6)) > 0.999 * norm(known.value)
    assert float(distance_to_ridge(q, known, 1e-6).max()) < 1e-14


def test_theorem_i6_scale_does_not_minimise_the_error() -> None:
    """docs/paper-notes.md 9.2: a* = 1.6 leaves 0.6, and a = 1 nothing."""
    gram, q = torch.diag(vector(0.5, 3.5)), vector(1.0, 0)
    X = torch.linalg.inv(regularised(gram, 0.5))
    a = best_scale(gram, 0.5)
    assert_near(a, 1.6, 1e-15)
    assert_near((q - a * X @ q).norm(), 0.6, 1e-15)
    assert_near(distance_to_ridge(q[None], Sums(gram, gram, eye(2)), 0.5), vector(0), 1e-15)


def test_theorem_i6_minimum_over_positive_scales_may_not_exist() -> None:
    """Two orthogonal keys, one value: the answers are opposed, and the best a is the smallest."""
    k, v, q, ridge = torch.diag(vector(1.0, 3)), vector(1.0, 1)[:, None], vector(2.0, -1), 0.1
    known = sums(k, v)
    linear, ridged = known.value @ q, ridge_readout(known.gram, known.value, ridge) @ q
    assert linear < 0 < ridged
    errors = [float((linear - a * ridged).abs()) for a in (1.0, 0.1, 0.01, 1e-3)]
    assert errors == sorted(errors, reverse=True)
    assert_near(distance_to_ridge(q[None], known, ridge), linear.abs(), 1e-15)


# Propositions I.7 and I.8, Corollary I.9, Proposition I.10: SKA


@given(heads)
@thorough
def test_proposition_i7_two_triangular_solves_give_the_value_map(h: Head) -> None:
    B = ridge_readout(h.sums.gram, h.sums.value, h.ridge)
    assert_near(B @ h.full, h.sums.value, h.rounding * h.scale * norm(h.full))


@given(heads, st.integers(0, 3))
@thorough
def test_proposition_i8_full_formula(h: Head, order: int) -> None:
    """C (G + ridge I)^-1 L A_w^K L^-1 q, whitened and unwhitened, is `ska` in every mode."""
    B = ridge_readout(h.sums.gram, h.sums.value, h.ridge)
    filtered = power(h.operator, order) @ torch.linalg.solve_triangular(
        h.factor, h.queries.mT, upper=False
    )
    wanted = (B @ h.factor @ filtered).mT
    allowed = (order + 1) * h.rounding * h.scale * float(h.queries.norm())
    coef = eye(order + 1)[order]
    assert_near(h.queries @ readout(h.sums, coef, h.ridge).mT, wanted, allowed)
    for causal in ("exact", "chunk", False):
        assert_near(ask(h, coef, causal), wanted, allowed)


def ask(h: Head, coef: Tensor, causal: str | bool, scale: float = 1.0) -> Tensor:
    """`ska` reads everything, and is then asked with zero keys, which leave nothing behind."""
    q, k, v = (x[None, :, None] for x in (h.queries, h.keys, h.values))
    how = {"coef": coef[None], "ridge": h.ridge, "causal": causal, "chunk_size": len(h.keys)}
    _, state = ska(k, k, v, return_state=True, **how)
    nothing = torch.zeros_like(q), v.new_zeros(1, len(h.queries), 1, v.shape[-1])
    return ska(scale * q, *nothing, state=state, **how)[0, :, 0]


@given(heads)
@thorough
def test_corollary_i9_order_zero_equals_ridge(h: Head) -> None:
    wanted = h.queries @ by_least_squares(h).mT
    allowed = h.rounding * h.scale * float(h.queries.norm())
    coef = vector(1.5)
    for causal in ("exact", "chunk", False):
        assert_near(ask(h, coef, causal), 1.5 * wanted, 2 * allowed)


@given(heads, st.integers(0, 3))
@thorough
def test_proposition_i10_power_filter_bias_is_exact(h: Head, order: int) -> None:
    """The answers differ by B* (Phi_K - I) q, and the objective by its weighted square."""
    best = ridge_readout(h.sums.gram, h.sums.value, h.ridge)
    bias = filter_bias(h.sums, h.ridge, order)
    allowed = (order + 1) * h.rounding * h.scale
    inverse = torch.linalg.inv(h.factor)
    phi = h.factor @ power(h.operator, order) @ inverse
    assert_near(bias, best @ (phi - eye(len(phi))), allowed * h.condition**0.5)
    answers = ask(h, eye(order + 1)[order], False)
    assert_near(answers - h.queries @ best.mT, h.queries @ bias.mT, allowed * norm(h.queries))

    filtered = objective(best + bias, h.keys, h.values, h.ridge)
    rise = filtered - objective(best, h.keys, h.values, h.ridge)
    energy = float(h.values.square().sum())
    assert_near(rise, (bias @ h.factor).square().sum(), h.rounding * energy)
    assert_near(rise, excess(best + bias, h.sums, h.ridge), h.rounding * energy)


@given(heads, st.integers(1, 3), st.floats(0.0, 3.0))
@thorough
def test_proposition_i10_the_filter_can_only_raise_the_objective(
    h: Head, order: int, eta: float
) -> None:
    """And so does eta, by (eta - 1)^2 |B* G^(1/2)|^2 (docs/paper-notes.md 9.3)."""
    terms = readout_terms(h.sums, h.ridge, order)
    lowest = objective(terms[0], h.keys, h.values, h.ridge)
    rounding = h.rounding * float(h.values.square().sum())
    assert objective(terms[order], h.keys, h.values, h.ridge) >= lowest - rounding
    rise = objective(eta * terms[0], h.keys, h.values, h.ridge) - lowest
    assert_near(rise, (eta - 1) ** 2 * (terms[0] @ h.factor).square().sum(), 10 * rounding)


def test_proposition_i10_the_bias_is_no_loss_where_the_successor_is_wanted() -> None:
    """Orthonormal keys read once: order 1 is all bias for ridge's target, and right for another."""
    v = torch.randn(4, 3, dtype=torch.float64)
    known = sums(eye(4), v)
    step = readout(known, vector(0, 1), 1e-9)
    assert_near(eye(4)[:3] @ step.mT, v[1:], 1e-8)
    assert excess(step, known, 1e-9) > 1


# Theorem I.11 and Corollary I.12: when the power filter helps


def normal_operator(
    delta: float, rho: float, slow: int, rank: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A normal contraction, and orthonormal bases of its persistent and its transient space.

    Eigenvalues in pairs, on the edge of what is allowed: |1 - l| = delta, |l| = rho.
    """
    random = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(rank, rank, generator=random, dtype=torch.float64)).Q
    angle = 2 * math.pi * torch.rand(rank // 2, generator=random, dtype=torch.float64)
    near_one = 1 + delta * torch.polar(torch.ones_like(angle), angle)
    near_one = near_one / near_one.abs().clamp_min(1)
    small = rho * torch.polar(torch.ones_like(angle), angle)
    eigenvalues = torch.where(torch.arange(rank // 2) < slow, near_one, small)
    blocks = koopman_rotation(eigenvalues.real, eigenvalues.imag)
    return turn @ blocks @ turn.mT, turn[:, : 2 * slow], turn[:, 2 * slow :]


normal_cases = st.tuples(
    st.sampled_from([0.0, 1e-3, 0.1, 0.5]),
    st.sampled_from([0.0, 0.3, 0.9]),
    st.integers(1, 4),
    st.floats(0, 20),
    st.integers(0, 2**16),
)


def filtered_error(operator: Tensor, whitened_value: Tensor, order: int, p: Tensor, t: Tensor):
    """|C L^-T (A_w^K (q_pers + q_trans) - q_pers)|"""
    return float((whitened_value @ (power(operator, order) @ (p + t) - p)).norm())


@given(normal_cases)
@thorough
def test_theorem_i11_bounds_the_error_for_a_normal_operator(case: tuple) -> None:
    delta, rho, order, loudness, seed = case
    A, slow, fast = normal_operator(delta, rho, 2, 6, seed)
    assert departure_from_normality(A) < 1e-12
    h = head(rank=6, width=3, seed=seed)
    p, t = slow @ h.queries[0, :4], loudness * fast @ h.queries[1, :2]
    parts = (float(p.norm()), float(t.norm()))
    error = filtered_error(A, h.whitened_value, order, p, t)
    size = norm(h.whitened_value)
    bounds = [
        bound(delta, rho, order, *parts) for bound in (contraction_error_bound, filter_error_bound)
    ]
    rounding = 1e-12 * sum(parts)
    assert error / size <= bounds[0] + rounding
    assert bounds[0] <= bounds[1] + rounding


def test_theorem_i11_holds_for_keys_whose_operator_is_normal() -> None:
    """Walsh-like keys of docs/paper-notes.md 9.4: A_w = diag(0.9, 0.125) up to the ridge."""
    h = two_modes()
    assert departure_from_normality(h.operator) < 1e-4
    delta, rho = 0.1 + 1e-3, 0.126
    for order in range(4):
        error = filtered_error(
            h.operator, h.whitened_value, order, vector(1.0, 0), vector(0, 1.0)
        ) / norm(h.whitened_value)
        assert error <= filter_error_bound(delta, rho, order, 1, 1)


def two_modes() -> Head:
    """A constant component, and one that turns back and forth, seen under one value."""
    turning = vector(0, 1, 1, -1, -1, 1, 1, -1, -1, 0)
    return Head(
        torch.stack([torch.ones_like(turning), turning], 1),
        torch.ones(10, 1).double(),
        eye(2),
        1e-3,
    )


def test_theorem_i11_fails_where_the_operator_is_not_normal() -> None:
    """Two orthonormal keys, read once: both eigenvalues of A_w are 0, so order 1's bound is 0.

    But A_w sends the first key to the second, and the answer is the second value.
    """
    h = Head(eye(2), vector(0, 1)[:, None], eye(2), 1e-3)
    assert float(torch.linalg.eigvals(h.operator).abs().max()) == 0
    assert departure_from_normality(h.operator) > 0.999
    error = filtered_error(h.operator, h.whitened_value, 1, vector(0, 0), vector(1, 0))
    assert filter_error_bound(0.0, 0.0, 1, 0.0, 1.0) == 0
    assert error > 0.998


@given(heads, st.integers(1, 4))
@thorough
def test_theorem_i11_for_any_keys_with_lengths_in_the_place_of_eigenvalues(
    h: Head, order: int
) -> None:
    """delta = |(A_w - I) q_pers| / |q_pers| and |A_w^K q_trans| / |q_trans| for rho^K."""
    p, t = h.queries[0], h.queries[1]
    delta = float((h.operator @ p - p).norm() / p.norm())
    left = float((power(h.operator, order) @ t).norm() / t.norm())
    parts = (float(p.norm()), float(t.norm()))
    bound = contraction_error_bound(delta, left ** (1 / order), order, *parts)
    error = filtered_error(h.operator, h.whitened_value, order, p, t)
    assert error <= norm(h.whitened_value) * bound * (1 + 1e-12) + h.rounding * h.scale


@given(normal_cases)
@thorough
def test_corollary_i12_is_where_the_bounds_cross(case: tuple) -> None:
    delta, rho, order, ratio, _ = case
    edge = filter_crossover(delta, rho, order)
    assume(abs(ratio - edge) > 1e-9)
    with_filter = filter_error_bound(delta, rho, order, 1.0, ratio)
    assert (with_filter < filter_error_bound(delta, rho, 0, 1.0, ratio)) == (ratio > edge)
    rounding = 8 * EPS / (1 - rho**order)
    assert contraction_crossover(delta, rho, order) <= edge + rounding


def test_corollary_i12_compares_bounds_and_not_errors() -> None:
    """docs/paper-notes.md 9.4: above the crossover order 0 has no error and order 2 one of 0.6."""
    h = two_modes()
    p, t = vector(1.0, 0), vector(0, 1.0)
    assert filter_crossover(0.1, 0.126, 2) < 1
    without, with_filter = (
        filtered_error(h.operator, h.whitened_value, order, p, t) for order in (0, 2)
    )
    assert without < 1e-12
    assert_near(with_filter, 0.601, 1e-3)
    assert error_crossover(0.1, 0.126, 2, slack=math.inf) == math.inf


@given(normal_cases)
@thorough
def test_corollary_i12_holds_for_errors_with_the_slack_of_the_read_out(case: tuple) -> None:
    delta, rho, order, loudness, seed = case
    A, slow, fast = normal_operator(delta, rho, 2, 6, seed)
    h = head(rank=6, width=3, seed=seed)
    p, t = slow @ h.queries[0, :4], loudness * fast @ h.queries[1, :2]
    without = filtered_error(A, h.whitened_value, 0, p, t)
    assume(without > 1e-9)
    slack = norm(h.whitened_value) * float(t.norm()) / without
    if t.norm() > (1 + 1e-9) * error_crossover(delta, rho, order, slack) * p.norm():
        assert filtered_error(A, h.whitened_value, order, p, t) < without


def test_corollary_i12_needs_no_slack_where_the_read_out_is_an_isometry() -> None:
    assert error_crossover(0.1, 0.5, 2, slack=1.0) == filter_crossover(0.1, 0.5, 2)
    assert error_crossover(0.1, 0.9, 1, slack=2.0) == math.inf


# Proposition I.13: what no fixed SKA head can express


def softmax_rule(q: Tensor, keys: Tensor, values: Tensor, beta: float) -> Tensor:
    return (beta * q @ keys.mT).softmax(-1) @ values


@given(heads, st.integers(0, 2))
@thorough
def test_proposition_i13_ska_is_linear_in_the_query(h: Head, order: int) -> None:
    """With its state fixed: an answer to a multiple is the multiple, to a sum the sum."""
    coef = torch.linspace(1, -1, order + 1, dtype=torch.float64)
    y = ask(h, coef, False)
    allowed = (order + 1) * h.rounding * h.scale * float(h.queries.norm())
    assert_near(ask(h, coef, False, scale=-3.0), -3 * y, 12 * allowed)
    both = Head(h.keys, h.values, h.queries[:3] + h.queries[3:6], h.ridge)
    assert_near(ask(both, coef, False), y[:3] + y[3:6], 2 * allowed)


@pytest.mark.parametrize("beta", [0.1, 1.0, 30.0])
def test_proposition_i13_a_softmax_rule_that_no_ska_head_is(beta: float) -> None:
    """Keys 1 and -1, values 1 and 0: the logistic function. Every linear map is 1/2 off at 0.

    The best one by least squares leaves what is even in q, which is 1/2 everywhere; the best affine
    one leaves the bend.
    """
    keys, values = vector(1, -1)[:, None], vector(1, 0)[:, None]
    q = torch.linspace(-2, 2, 201, dtype=torch.float64)[:, None]
    f = softmax_rule(q, keys, values, beta)
    assert_near(f, torch.sigmoid(2 * beta * q), 1e-15)
    residual = f - q * torch.linalg.lstsq(q, f).solution
    assert_near(residual[100], vector(0.5), 1e-12)
    assert residual.square().mean().sqrt() > 0.5
    affine = torch.cat([q, torch.ones_like(q)], 1)
    bend = f - affine @ torch.linalg.lstsq(affine, f).solution
    assert bend.abs().max() > 0.001 * beta**3 / (1 + beta**3)


def test_proposition_i13_best_ska_head_is_no_better_than_the_best_linear_map() -> None:
    """Over ridges and coefficients, for the two tokens that the softmax rule has read."""
    h = Head(vector(1, -1)[:, None], vector(1, 0)[:, None], vector(-1, 0, 0.5, 1)[:, None], 0.1)
    f = softmax_rule(h.queries, h.keys, h.values, 3.0)
    limit = (f - h.queries * torch.linalg.lstsq(h.queries, f).solution).norm()
    errors = [
        (f - ask(Head(h.keys, h.values, h.queries, ridge), vector(a, b, c), False)).norm()
        for ridge in RIDGES
        for a in (-1, 0.5, 1, 3)
        for b in (0, 1)
        for c in (0, -2)
    ]
    assert min(errors) >= limit - 1e-12
    assert limit > 0.5


def test_proposition_i13_one_token_is_enough() -> None:
    """A smaller example than the paper's: softmax answers with the value, whatever is asked."""
    q = vector(-1, 0, 2)[:, None]
    assert softmax_rule(q, vector(1)[:, None], vector(1)[:, None], 1.0).tolist() == [[1], [1], [1]]
    h = Head(vector(1)[:, None], vector(1)[:, None], q, 0.1)
    assert ask(h, vector(1.0), False)[1] == 0


def test_proposition_i13_softmax_is_generally_and_not_always_nonlinear() -> None:
    """Equal keys, values that cancel: the softmax rule is 0, which is linear."""
    q = torch.randn(5, 3, dtype=torch.float64)
    keys, values = torch.ones(2, 3).double(), vector(1, -1)[:, None]
    assert_near(softmax_rule(q, keys, values, 2.0), torch.zeros(5, 1).double(), 1e-15)


# Proposition I.14: memory


@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 2000))
@thorough
def test_proposition_i14_crossover_in_numbers_is_exact(rank: int, width: int, tokens: int) -> None:
    smaller = state_numbers(rank, width) < tokens * (rank + width)
    assert smaller == (tokens > cache_crossover(rank, width))


def test_proposition_i14_counts_what_a_state_holds() -> None:
    state = SKAState.init(1, 1, 6, 5)
    held = (state.gram, state.lag, state.value, state.last_key, state.key_energy)
    assert sum(x.numel() for x in held) == state_numbers(6, 5)


def test_proposition_i14_is_not_exact_in_bytes() -> None:
    """At r = 48 and P = 64, 70 tokens are enough in numbers; 16-bit caches are smaller up to 138.

    What exact mode keeps beside the sums makes it 180 (docs/paper-notes.md 3.5).
    """
    rank, width = 48, 64
    assert math.floor(cache_crossover(rank, width)) == 69
    a_token = 2 * (rank + width)
    assert 138 * a_token < 4 * state_numbers(rank, width) < 139 * a_token
    assert 180 * a_token < SKAState.bytes_per_row(1, rank, width, "exact") < 181 * a_token
