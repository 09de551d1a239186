"""Appendix C, statement by statement: what errors in the sums do to the operator."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from echo_lm.analysis.operator import (
    Sums,
    conditioning,
    conditioning_along,
    regularised,
    sums,
    transition,
    whitened_operator,
)
from echo_lm.analysis.perturbation import (
    bauer_fike,
    eigenvalue_bound,
    eigenvalue_distance,
    eigenvector_condition,
    norm,
    operator_bound,
    paper_eigenvalue_bound,
    paper_operator_bound,
)
from echo_lm.layers.lift import clebsch_gordan
from echo_lm.layers.rotary import rotary_tables, rotate

from .draws import EPS, KINDS, Tokens, draw_keys, tokens

sizes = st.sampled_from([1e-3, 0.1, 1.0])


def of_other_keys(case: Tokens, size: float) -> tuple[Tensor, Tensor]:
    """E_G and E_M where the inexact sums are those of keys read inexactly."""
    G, M, _ = case.sums
    other = sums(case.keys + size * torch.randn_like(case.keys), case.values)
    return other.gram - G, other.lag - M


def of_any_kind(case: Tokens, size: float) -> tuple[Tensor, Tensor]:
    """Any E_M, and any symmetric E_G that leaves a positive definite Gram matrix."""
    G, M, _ = case.sums
    E_G, E_M = torch.randn_like(G), size * torch.randn_like(M)
    E_G = E_G + E_G.mT
    smallest = float(conditioning(G, case.ridge).smallest)
    return E_G * (0.9 * size * smallest / float(norm(E_G))), E_M


def scalars(*values: float) -> list[Tensor]:
    return [torch.tensor([[value]], dtype=torch.float64) for value in values]


@given(case=tokens(), size=sizes, sums_over_keys=st.booleans())
@settings(max_examples=80, deadline=None, derandomize=True)
def test_theorem_c1_bounds_the_error_of_the_transition(
    case: Tokens, size: float, sums_over_keys: bool
) -> None:
    """By ours too, which is the smaller: the condition number of the Gram matrix is not needed."""
    G, M, _ = case.sums
    E_G, E_M = (of_other_keys if sums_over_keys else of_any_kind)(case, size)
    ours = operator_bound(G, M, E_G, E_M, case.ridge)
    moved = norm(transition(G + E_G, M + E_M, case.ridge) - transition(G, M, case.ridge))
    lost = 64 * case.rounding * float(ours + norm(transition(G, M, case.ridge)))
    assert moved <= ours * case.slack + lost
    assert ours <= paper_operator_bound(G, M, E_G, E_M, case.ridge) * case.slack


def test_theorem_c1_is_loose_by_the_condition_number_where_ours_is_attained() -> None:
    G = torch.diag(torch.tensor([99.0, 0.0], dtype=torch.float64))
    M, E_G = torch.zeros_like(G), torch.zeros_like(G)
    M[0, 1], E_G[1, 1] = 1.0, -0.5
    errors = (G, M, E_G, torch.zeros_like(M), 1.0)
    moved = norm(transition(G + E_G, M, 1.0) - transition(G, M, 1.0))
    assert_close(moved.item(), 1.0)
    assert_close(operator_bound(*errors).item(), 1.0)
    assert_close(paper_operator_bound(*errors).item(), 100.0)


def test_theorem_c1_is_not_controlled_by_the_true_gram_alone() -> None:
    """lambda_min(G) = 1 and |E_G| < 1, yet the operator moves without limit: the inexact one ends
    up nearly singular."""
    for left in (0.5, 1e-3, 1e-6):
        G, M, E_G, E_M = scalars(1.0, 1.0, left - 1, 0.0)
        moved = norm(transition(G + E_G, M, 0.0) - transition(G, M, 0.0))
        assert_close(moved.item(), 1 / left - 1, rtol=1e-9, atol=0)
        assert_close(operator_bound(G, M, E_G, E_M, 0.0).item(), 1 / left - 1, rtol=1e-9, atol=0)


@given(case=tokens(), size=sizes)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_corollary_c2_noise_in_the_lag_is_amplified_by_at_most_one_over_lambda_min(
    case: Tokens, size: float
) -> None:
    """And by just that where it meets the weakest direction."""
    G, M, _ = case.sums
    smallest = conditioning(G, case.ridge).smallest
    weakest = torch.linalg.eigh(regularised(G, case.ridge)).eigenvectors[:, :1]
    E_M = size * torch.randn_like(M)
    aligned = size * torch.randn_like(weakest) @ weakest.mT
    # The transition is linear in M, so this is what the noise adds to it.
    added, most = transition(G, E_M, case.ridge), transition(G, aligned, case.ridge)
    assert norm(added) <= norm(E_M) / smallest * case.slack
    assert_close(norm(most), norm(aligned) / smallest, rtol=64 * case.rounding, atol=0)


def test_corollary_c2_holds_for_noise_in_the_gram_only_at_a_given_transition() -> None:
    """Reading 1 twice instead of once doubles lambda_min, and from no effect of E_G makes one."""
    moved, smallest = [], []
    for count in (1, 2):
        G, M, _ = sums(*[torch.ones(count, 1, dtype=torch.float64)] * 2)
        (E_G,) = scalars(0.1)
        smallest.append(float(conditioning(G, 0.0).smallest))
        moved.append(float(norm(transition(G + E_G, M) - transition(G, M))))
    assert smallest == [1.0, 2.0]
    assert moved[0] == 0
    assert_close(moved[1], 0.5 * 0.1 / 2.1)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_corollary_c2_the_diagnostic_never_falls_along_a_sequence(kind: str) -> None:
    """Each key adds to the Gram matrix. (The condition number may rise: 3.2 of the notes.)"""
    k = draw_keys(kind, 12, 4, batch=(2, 3))
    ridge = torch.tensor([0.01, 0.1, 1.0], dtype=torch.float64)
    counts = [0, 1, 5, 5, 12]
    along = conditioning_along(k, ridge, counts)
    for i, count in enumerate(counts):
        read = k[..., :count, :]
        alone = conditioning(read.mT @ read, ridge)
        rounded = 64 * EPS * float(k.square().sum((-2, -1)).max() / ridge.min())
        assert_close(along.smallest[..., i], alone.smallest, rtol=rounded, atol=0)
        assert_close(along.condition[..., i], alone.condition, rtol=rounded, atol=0)
    fallen = along.smallest.diff(dim=-1).clamp_max(0).abs()
    assert float(fallen.max()) <= 64 * EPS * float(along.smallest.max() * along.condition.max())


@pytest.mark.parametrize("counts", [[], [3, 1], [-1, 2], [4, 13]])
def test_counts_along_a_sequence_must_rise_within_it(counts: list[int]) -> None:
    with pytest.raises(ValueError, match="counts must rise between 0 and 12"):
        conditioning_along(torch.zeros(12, 4), 0.1, counts)


def with_eigenvalues(values: Tensor, skew: float) -> Tensor:
    """V diag(values) V^-1, with V the further from orthogonal the larger `skew` is."""
    rank = len(values)
    V = torch.linalg.qr(torch.randn(rank, rank, dtype=values.dtype)).Q
    V = V + skew * torch.randn(rank, 1, dtype=values.dtype)
    return V @ torch.diag(values) @ torch.linalg.inv(V)


@given(
    rank=st.integers(1, 7),
    skew=st.sampled_from([0.0, 1.0, 30.0]),
    gap=st.sampled_from([1.0, 1e-2, 1e-5]),
    size=sizes,
    seed=st.integers(0, 2**16),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_theorem_c3_bauer_fike(rank: int, skew: float, gap: float, size: float, seed: int) -> None:
    """For eigenvalues apart and in clusters, eigenvectors orthogonal and nearly parallel."""
    torch.manual_seed(seed)
    A = with_eigenvalues(0.9 - gap * torch.rand(rank, dtype=torch.float64), skew)
    error = size * gap * torch.randn_like(A)
    bound = bauer_fike(A, error)
    # Computed eigenvalues are those of a matrix eps away, for which the theorem holds as well.
    lost = 64 * EPS * float(eigenvector_condition(A) * (norm(A) + norm(error)))
    assert bool((eigenvalue_distance(A, A + error) <= bound + lost).all())


def test_theorem_c3_is_attained_by_a_normal_operator() -> None:
    A = torch.diag(torch.tensor([0.9, 0.3, -0.5], dtype=torch.float64))
    error = torch.diag(torch.tensor([0.05, 0.0, 0.0], dtype=torch.float64))
    assert_close(eigenvector_condition(A).item(), 1.0)
    assert_close(eigenvalue_distance(A, A + error).max(), bauer_fike(A, error))


@pytest.mark.parametrize("length", [2, 3, 5])
def test_theorem_c3_needs_a_basis_of_eigenvectors(length: int) -> None:
    """Keys e_1, e_2, ... once: a defective A_w, whose eigenvalues an error moves by its root."""
    k = draw_keys("chain", length, length)
    G, M, _ = sums(k, k)
    A = whitened_operator(G, M, 1e-3)
    assert eigenvector_condition(A) > 1e100
    error = torch.zeros_like(A)
    error[0, -1] = 1e-10
    moved = eigenvalue_distance(A, A + error)
    assert float(moved.min()) > 0.9 * 1e-10 ** (1 / length) > 1e4 * float(norm(error))
    assert bool((moved <= bauer_fike(A, error)).all())


@given(case=tokens(max_rank=5), size=sizes, sums_over_keys=st.booleans())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_corollary_c4_bounds_the_eigenvalues_on_every_draw(
    case: Tokens, size: float, sums_over_keys: bool
) -> None:
    """The paper's proof is not one, but neither is there a counter-example. Ours has a proof."""
    G, M, _ = case.sums
    E_G, E_M = (of_other_keys if sums_over_keys else of_any_kind)(case, size)
    A = whitened_operator(G, M, case.ridge)
    moved = eigenvalue_distance(A, transition(G + E_G, M + E_M, case.ridge)).max()
    condition = float(eigenvector_condition(A))
    lost = (
        64 * case.rounding * condition * float(1 + norm(transition(G + E_G, M + E_M, case.ridge)))
    )
    assert moved <= paper_eigenvalue_bound(G, M, E_G, E_M, case.ridge) * case.slack + lost
    if sums_over_keys:
        assert moved <= eigenvalue_bound(G, M, E_G, E_M, case.ridge) * case.slack + lost


def test_our_eigenvalue_bound_is_the_shorter_and_needs_sums_over_keys() -> None:
    """Its proof takes inexact eigenvalues to be at most 1, as they are where sums are over keys."""
    weak = torch.diag(torch.tensor([1.0, 1.0, 1.0, 0.03], dtype=torch.float64))
    k = draw_keys("normal", 40, 4) @ weak
    G, M, _ = sums(k, k)
    E_G, E_M = of_other_keys(Tokens(k, k, 1e-2), 1e-3)
    ours, paper = (
        float(bound(G, M, E_G, E_M, 1e-2)) for bound in (eigenvalue_bound, paper_eigenvalue_bound)
    )
    assert 10 * ours < paper

    G, M, E_G, E_M = scalars(1.0, 1.0, -0.9, 0.0)
    assert_close(eigenvalue_distance(M / G, M / (G + E_G)).item(), 9.0)
    assert_close(eigenvalue_bound(G, M, E_G, E_M, 0.0).item(), 0.9)
    assert_close(paper_eigenvalue_bound(G, M, E_G, E_M, 0.0).item(), 9.0)


def turned(content: Tensor, angles: Tensor) -> Sums:
    """Sums of one complex component, as a pair of real ones, under these phases."""
    cos, sin = angles.cos()[None, :, None], angles.sin()[None, :, None]
    k = rotate(content[None, :, None], cos, sin)[0, :, 0]
    return sums(k, k)


def invariant_ratio(content: Tensor) -> float:
    """M_inv / G_inv, with the keys of G that have a successor."""
    u = clebsch_gordan(content)[:, :1]
    return float(transition(u[:-1].mT @ u[:-1], sums(u, u).lag))


def test_proposition_c5_independent_phases_cancel_the_lag() -> None:
    """Content that never changes: without phases A = 1, with them it vanishes like 1 / sqrt(T)."""
    for count in (100, 10_000):
        content = torch.tensor([1.0, 0.0], dtype=torch.float64).expand(count, 2)
        still = turned(content, torch.zeros(count, dtype=torch.float64))
        assert norm(transition(still.gram, still.lag, 1e-9)) > 1 - 2 / count
        lost = turned(content, 2 * math.pi * torch.rand(count, dtype=torch.float64))
        assert_close(lost.gram.trace().item(), float(count))
        assert norm(transition(lost.gram, lost.lag)) < 4 / count**0.5


@pytest.mark.parametrize("step", [0.01, 0.3, math.pi / 2, 3.0])
def test_proposition_c5_rotary_phases_cancel_nothing(step: float) -> None:
    """They are sums of steps, not independent draws: a constant step turns the eigenvalue."""
    count = 5000
    content = torch.tensor([1.0, 0.0], dtype=torch.float64).expand(count, 2)
    G, M, _ = turned(content, step * torch.arange(count, dtype=torch.float64))
    wanted = torch.polar(torch.ones(2, dtype=torch.float64), torch.tensor([-step, step]).double())
    found = torch.linalg.eigvals(transition(G, M))
    assert float((found[:, None] - wanted).abs().amin(0).max()) < 0.01


def test_proposition_c5_nor_do_they_at_the_angles_of_a_model() -> None:
    """Sixteen components of one content, at the frequencies of rotary positions."""
    content = torch.randn(1, 1, 1, 16, dtype=torch.float64).expand(1, 20_000, 1, 16)
    tables = rotary_tables(torch.arange(20_000)[None], 16, dtype=torch.float64)
    k = rotate(content, *tables)[0, :, 0]
    G, M, _ = sums(k, k)
    assert torch.linalg.eigvals(whitened_operator(G, M, 1e-6)).abs().min() > 0.99


def test_proposition_c5_the_invariant_lag_cannot_vanish() -> None:
    """Independent content has no dynamics, but a sum of products of moduli leaves 1/2."""
    content = torch.randn(100_000, 2, dtype=torch.float64)
    assert abs(invariant_ratio(content) - 0.5) < 0.01
    G, M, _ = sums(content, content)
    assert norm(transition(G, M)) < 0.02


@pytest.mark.parametrize(("factor", "seen"), [(-1.0, 1.0), (0.9, 0.81), (-0.5, 0.25)])
def test_proposition_c5_the_invariant_lag_squares_the_dynamics(factor: float, seen: float) -> None:
    """Content that is multiplied by a number from token to token shows that number's square.

    The smallest case is two tokens, 1 and -1: their dynamics is -1, the invariant one 1.
    """
    for count in (2, 20):
        powers = factor ** torch.arange(count, dtype=torch.float64)
        content = torch.stack([powers, torch.zeros_like(powers)], 1)
        assert_close(invariant_ratio(content), seen)
        true = transition(
            content[:-1, :1].mT @ content[:-1, :1], sums(content, content).lag[:1, :1]
        )
        assert_close(true.item(), factor)
