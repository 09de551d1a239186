"""What we add: the operator contracts, answers are bounded, one factor serves all, states merge.

The proofs are in ops/ska/README.md.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from echo_lm.analysis.bounds import (
    contraction,
    eigenvalue_limit,
    jacobian_bound,
    reach,
    transition_bound,
)
from echo_lm.analysis.cost import (
    exact_chunk_factors,
    exact_chunk_products,
    solve_every_token,
)
from echo_lm.analysis.operator import (
    conditioning,
    regularised,
    sums,
    transition,
    whitened_operator,
)
from echo_lm.analysis.perturbation import norm
from echo_lm.analysis.ridge import readout, readout_terms
from echo_lm.ops import SKAState, ska
from echo_lm.ops.ska.linalg import inverse_cholesky

from .draws import EPS, KINDS, Tokens, draw_keys, tokens

TWO_KEYS = torch.tensor([[0.1, 0.0], [0.0, 1.0]], dtype=torch.float64)

coefficients = st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=4)


def row(coef: list[float]) -> Tensor:
    return torch.tensor(coef, dtype=torch.float64)


# The operator contracts.


@given(
    kind=st.sampled_from(sorted(KINDS)),
    count=st.integers(1, 30),
    rank=st.integers(1, 9),
    ridge=st.sampled_from([1e-6, 1e-3, 1.0]),
    cut=st.integers(0, 30),
    masked=st.booleans(),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_the_whitened_operator_never_expands(
    kind: str, count: int, rank: int, ridge: float, cut: int, masked: bool, seed: int
) -> None:
    """sigma_max(A_w) <= 1 under masks, for prefixes and rests, and for what they merge to.

    Rounding: whitening multiplies the error of M, eps |k|^2, by at most 1/ridge.
    """
    k = draw_keys(kind, count, rank, seed, batch=(2, 2)).transpose(1, 2)
    torch.manual_seed(seed)
    mask = torch.rand(2, count) < 0.7 if masked else torch.ones(2, count, dtype=torch.bool)
    cut = min(cut, count)
    states = []
    for start, stop in ((0, count), (0, cut), (cut, count)):
        if start < stop:
            part = k[:, start:stop]
            how = {"coef": torch.ones(2, 1, dtype=k.dtype), "ridge": ridge, "causal": False}
            seen = mask[:, start:stop]
            states.append(ska(part, part, part, **how, mask=seen, return_state=True)[1])
    if len(states) == 3:
        states.append(states[1].merge(states[2]))
    for state in states:
        G, M = state.gram, state.lag
        lost = 64 * EPS * (1 + float(k.square().sum((1, 3)).max()) / ridge)
        sigma = norm(whitened_operator(G, M, ridge))
        assert bool((sigma <= contraction(G, ridge) + lost).all())
        assert bool((contraction(G, ridge) <= 1).all())


def test_the_unwhitened_operator_does_expand() -> None:
    """M G^-1, as the paper first writes it: keys (0.1, 0), (0, 10) make a hundred of one."""
    k = torch.tensor([[0.1, 0.0], [0.0, 10.0]], dtype=torch.float64)
    G, M, _ = sums(k, k)
    assert norm(transition(G, M, 1e-6)) > 99
    assert norm(whitened_operator(G, M, 1e-6)) < 1


def test_nor_does_it_contract_where_a_key_of_the_lag_is_not_in_the_gram() -> None:
    """Proposition A.1 sums G to T - 1, the last key being in M alone."""
    G, M = TWO_KEYS[:-1].mT @ TWO_KEYS[:-1], sums(TWO_KEYS, TWO_KEYS).lag
    assert_close(norm(whitened_operator(G, M, 1e-3)).item(), 30.15, rtol=0, atol=0.01)
    G = sums(TWO_KEYS, TWO_KEYS).gram
    assert norm(whitened_operator(G, M, 1e-3)) < 1


def test_the_contraction_is_nearly_attained_by_a_constant_key() -> None:
    k = draw_keys("constant", 1000, 3)
    G, M, _ = sums(k, k)
    sigma = norm(whitened_operator(G, M, 1e-3))
    assert_close((sigma / contraction(G, 1e-3)).item(), 0.999, rtol=1e-9, atol=0)


@given(case=tokens())
@settings(max_examples=80, deadline=None, derandomize=True)
def test_no_eigenvalue_exceeds_what_the_number_of_tokens_allows(case: Tokens) -> None:
    """u* A_w u = s* S s for a shorter s, and the numerical radius of the shift S of T tokens is
    cos(pi / (T + 1)). So is that of A_w, then: the largest eigenvalue of any of its rotated
    symmetric parts."""
    G, M, _ = case.sums
    A = whitened_operator(G, M, case.ridge).to(torch.complex128)
    for angle in (0.0, 0.7, math.pi / 2, math.pi):
        rotated = A * complex(math.cos(angle), math.sin(angle))
        largest = torch.linalg.eigvalsh((rotated + rotated.mH) / 2)[-1]
        assert largest <= eigenvalue_limit(len(case.keys)) + 64 * case.rounding


@pytest.mark.parametrize("count", [1, 2, 3, 10])
def test_the_limit_of_eigenvalues_is_attained_by_half_a_sine(count: int) -> None:
    steps = torch.arange(1, count + 1, dtype=torch.float64)
    k = torch.sin(math.pi * steps / (count + 1))[:, None]
    G, M, _ = sums(k, k)
    largest = float(whitened_operator(G, M, 1e-12))
    assert_close(largest, eigenvalue_limit(count), rtol=0, atol=1e-11)
    assert eigenvalue_limit(0) == 0


@given(case=tokens())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_transition_expands_by_the_root_of_the_condition_number_at_most(case: Tokens) -> None:
    G, M, _ = case.sums
    bound = transition_bound(G, case.ridge)
    assert norm(transition(G, M, case.ridge)) <= bound * case.slack
    assert bound <= conditioning(G, case.ridge).condition.sqrt() * case.slack


def test_the_bound_on_the_transition_is_attained_by_two_keys() -> None:
    G, M, _ = sums(TWO_KEYS, TWO_KEYS)
    assert_close(norm(transition(G, M, 1e-3)), transition_bound(G, 1e-3))


# Answers are bounded.


@given(case=tokens(), coef=coefficients, masked=st.booleans(), exact=st.booleans())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_answers_are_bounded_by_the_values_and_the_query(
    case: Tokens, coef: list[float], masked: bool, exact: bool
) -> None:
    """After every token, by reach and by 1 / (2 sqrt(ridge)), whatever the keys and the order."""
    k, v = case.keys, case.values
    mask = torch.rand(len(k)) < (0.7 if masked else 1.1)
    q = torch.randn_like(k)
    y = ska(
        *(x[None, :, None] for x in (q, k, v)),
        coef=row(coef)[None],
        ridge=case.ridge,
        mask=mask[None],
        causal="exact" if exact else False,
        backend="naive",
    )[0, :, 0]
    for t in range(len(k)) if exact else [len(k) - 1]:
        read, said = k[: t + 1] * mask[: t + 1, None], v[: t + 1] * mask[: t + 1, None]
        loose = jacobian_bound(row(coef), said, case.ridge)
        bound = jacobian_bound(row(coef), said, case.ridge, read.mT @ read)
        lost = case.slack ** len(coef)
        assert y[t].norm() <= bound * q[t].norm() * lost + 64 * EPS
        assert bound <= loose * (1 + 64 * EPS)


@given(case=tokens(), order=st.integers(0, 4))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_every_order_reaches_no_further_than_the_ridge_answer_may(case: Tokens, order: int) -> None:
    """|C X (M X)^j| <= |V| reach for each j."""
    terms = norm(readout_terms(case.sums, case.ridge, order))
    bound = norm(case.values) * reach(case.sums.gram, case.ridge)
    assert bool((terms <= bound * case.slack ** (order + 1) + 64 * EPS).all())


def test_the_bound_on_answers_is_attained_by_one_token() -> None:
    """Of energy `ridge`, which is where a key answers most: v / (2 sqrt(ridge)) a unit of query."""
    k = torch.tensor([[0.3, 0.4]], dtype=torch.float64)
    v = torch.tensor([[2.0, -1.0, 5.0]], dtype=torch.float64)
    for ridge in (0.01, 0.25, 4.0):
        W = readout(sums(k, v), row([1.0]), ridge)
        assert_close(norm(W), jacobian_bound(row([1.0]), v, ridge, k.mT @ k))
    assert_close(norm(readout(sums(k, v), row([1.0]), 0.25)), jacobian_bound(row([1.0]), v, 0.25))


@pytest.mark.parametrize("order", [1, 3])
def test_the_bound_on_answers_is_nearly_attained_at_every_order(order: int) -> None:
    """By one key and one value, 1,000 times over: each step passes on 999 of 1,000."""
    k, v = draw_keys("constant", 1000, 3), torch.ones(1000, 1, dtype=torch.float64)
    coef, ridge = row([0.0] * order + [1.0]), 1e-3
    W = readout(sums(k, v), coef, ridge)
    share = norm(W) / jacobian_bound(coef, v, ridge, k.mT @ k)
    assert_close(share.item(), 0.999**order, rtol=1e-5, atol=0)


def test_bounds_of_a_batch_are_those_of_each_head() -> None:
    k, v = draw_keys("normal", 9, 4, batch=(2,)), torch.randn(2, 9, 3, dtype=torch.float64)
    coef, ridge = torch.randn(2, 3, dtype=k.dtype), torch.tensor([0.1, 2.0], dtype=k.dtype)
    G = k.mT @ k
    for h in range(2):
        lam = float(ridge[h])
        assert_close(jacobian_bound(coef, v, ridge)[h], jacobian_bound(coef[h], v[h], lam))
        assert_close(jacobian_bound(coef, v, ridge, G)[h], jacobian_bound(coef[h], v[h], lam, G[h]))
        assert_close(transition_bound(G, ridge)[h], transition_bound(G[h], lam))
        assert_close(contraction(G, ridge)[h], contraction(G[h], lam))


# One factor serves all tokens of a chunk.


@given(case=tokens(), coef=coefficients, size=st.sampled_from([1, 4, 8, 32]))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_the_exact_chunk_form_is_as_many_solves_as_tokens(
    case: Tokens, coef: list[float], size: int
) -> None:
    """Each answer is that of the sums up to its token, solved anew."""
    k, v = case.keys, case.values
    q = torch.randn_like(k)
    y = ska(
        *(x[None, :, None] for x in (q, k, v)),
        coef=row(coef)[None],
        ridge=case.ridge,
        chunk_size=size,
        backend="chunk",
    )[0, :, 0]
    separate = [
        readout(sums(k[: t + 1], v[: t + 1]), row(coef), case.ridge) @ q[t] for t in range(len(k))
    ]
    wanted = torch.stack(separate)
    bound = float(jacobian_bound(row(coef), v, case.ridge) * q.norm(dim=-1).max())
    lost = 64 * len(coef) * case.rounding * bound
    assert_close(y, wanted, rtol=0, atol=lost)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_leading_blocks_of_one_factor_give_the_inverse_after_every_token(kind: str) -> None:
    """X_t = X_0 - sum_{s<=t} e_s e_s' with the rows e_s of R^-1 K X_0, R R' = I + K X_0 K'."""
    before, k = draw_keys("normal", 5, 4), draw_keys(kind, 12, 4, seed=1)
    gram, ridge = before.mT @ before, 0.1
    X_0 = torch.linalg.inv(regularised(gram, ridge))
    eye = torch.eye(len(k), dtype=k.dtype)
    E = inverse_cholesky(eye + k @ X_0 @ k.mT) @ k @ X_0
    energy = float(k.square().sum())
    for t in range(len(k)):
        wanted = torch.linalg.inv(regularised(gram + k[: t + 1].mT @ k[: t + 1], ridge))
        got = X_0 - E[: t + 1].mT @ E[: t + 1]
        lost = 64 * EPS * (1 + energy / ridge) * float(norm(X_0))
        assert_close(got, wanted, rtol=0, atol=lost)


@pytest.mark.parametrize(
    ("rank", "width", "order", "size"), [(6, 5, 2, 32), (9, 1, 0, 7), (4, 8, 3, 1)]
)
def test_cost_of_the_products_is_what_the_exact_form_multiplies(
    rank: int, width: int, order: int, size: int
) -> None:
    """As torch counts them: two floating-point operations are one multiply-add."""
    k, v = draw_keys("normal", 3 * size, rank), torch.randn(3 * size, width, dtype=torch.float64)
    coef = torch.ones(1, order + 1, dtype=torch.float64)
    q, k, v = (x[None, :, None] for x in (k, k, v))
    with FlopCounterMode(display=False) as counter:
        ska(q, k, v, coef=coef, ridge=0.1, chunk_size=size, backend="chunk")
    assert counter.get_total_flops() == 2 * 3 * exact_chunk_products(rank, width, order, size)


def cholesky_counted(a: list[list[float]]) -> tuple[list[list[float]], int]:
    """The factor, and the multiply-adds of computing it."""
    n, done = len(a), 0
    L = [[0.0] * n for _ in range(n)]
    for i in range(n):
        for j in range(i + 1):
            rest = a[i][j]
            for m in range(j):
                rest -= L[i][m] * L[j][m]
                done += 1
            L[i][j] = math.sqrt(rest) if i == j else rest / L[j][j]
    return L, done


def solve_counted(L: list[list[float]], columns: int) -> int:
    """Multiply-adds of L^-1 times that many columns."""
    return sum(i for i in range(len(L))) * columns


def leading(count: list[int]) -> int:
    """Six times the factor of n^3 in a cubic, from four values one apart."""
    a, b, c, d = count
    return d - 3 * c + 3 * b - a


def test_cost_of_the_factors_is_two_thirds_of_a_cube_each() -> None:
    """n^3 / 6 for the factor and n^3 / 2 for its inverse, counted on factors that are right."""
    factors, inverses = [], []
    for n in range(9, 13):
        a = torch.eye(n, dtype=torch.float64) + torch.ones(n, n)
        L, done = cholesky_counted(a.tolist())
        assert_close(torch.tensor(L, dtype=a.dtype), torch.linalg.cholesky(a))
        factors.append(done)
        inverses.append(solve_counted(L, n))
    assert leading(factors) == 6 / 6
    assert leading(inverses) == 6 / 2
    assert leading([exact_chunk_factors(3 * n, 3 * n) for n in range(4)]) == 2 * 27 * 6 * 2 / 3


def test_cost_of_solving_for_every_token_is_what_it_multiplies() -> None:
    """G, M and C, a factor, K + 1 times two triangular solves, K times M, once C: up to O(r)."""
    order, width = 2, 5
    for rank in (24, 48):
        a = torch.eye(rank, dtype=torch.float64) + torch.ones(rank, rank)
        L, factor = cholesky_counted(a.tolist())
        added = 2 * rank**2 + width * rank
        answered = (order + 1) * 2 * solve_counted(L, 1) + order * rank**2 + width * rank
        counted = added + factor + answered
        assert abs(solve_every_token(rank, width, order) - counted) <= 4 * rank


def test_the_exact_form_multiplies_less_from_rank_84_on() -> None:
    """At the paper's 48 it multiplies 1.9 times as much, in products of matrices."""

    def ratio(rank: int, size: int) -> float:
        chunk = exact_chunk_products(rank, 64, 2, size) + exact_chunk_factors(rank, size)
        return chunk / size / solve_every_token(rank, 64, 2)

    assert_close(ratio(48, 64), 1.87, rtol=0, atol=0.01)
    assert min(ratio(83, size) for size in range(1, 200)) > 1
    assert min(ratio(84, size) for size in range(1, 200)) < 1


# States merge.


@given(case=tokens(), cuts=st.tuples(st.integers(0, 24), st.integers(0, 24)))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_merged_states_hold_the_sums_of_the_whole(case: Tokens, cuts: tuple[int, int]) -> None:
    """Three shards, some of them empty, in either order of merging; the seams' pairs included."""
    k, v = case.keys, case.values
    a, b = sorted(min(cut, len(k)) for cut in cuts)

    def read(start: int, stop: int) -> SKAState:
        if start == stop:
            return SKAState.init(1, 1, k.shape[1], v.shape[1], dtype=k.dtype)
        part = [x[None, start:stop, None] for x in (k, k, v)]
        coef = torch.ones(1, 1, dtype=k.dtype)
        return ska(*part, coef=coef, ridge=case.ridge, causal=False, return_state=True)[1]

    x, y, z = read(0, a), read(a, b), read(b, len(k))
    for merged in (x.merge(y).merge(z), x.merge(y.merge(z))):
        for got, wanted in zip((merged.gram, merged.lag, merged.value), case.sums, strict=True):
            lost = 64 * EPS * float(k.square().sum() + k.norm() * v.norm())
            assert_close(got[0, 0], wanted, rtol=0, atol=lost)


def test_merged_states_without_the_seam_would_forget_what_followed() -> None:
    """The pair across it is in neither half: without it, order 1 knows no successor of the last
    key of the first half."""
    k = draw_keys("chain", 4, 4)
    halves = [sums(half, half) for half in (k[:2], k[2:])]
    seamless = halves[0].lag + halves[1].lag
    whole = sums(k, k)
    seen = readout(whole, row([0.0, 1.0]), 1e-9) @ k[1]
    lost = readout(whole._replace(lag=seamless), row([0.0, 1.0]), 1e-9) @ k[1]
    assert_close(seen, k[2], rtol=0, atol=1e-8)
    assert not lost.any()
