"""Appendix B, statement by statement: features of rotated keys that forget the rotation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from echo_lm.analysis.operator import sums
from echo_lm.layers.lift import ClebschGordanLift, clebsch_gordan
from echo_lm.layers.rotary import rotary_tables, rotate
from echo_lm.ops import ska

from .draws import EPS, KINDS, draw_keys

every_lift = pytest.mark.parametrize("normalize", [False, True])


def turn(k: Tensor, angles: Tensor) -> Tensor:
    """Rotate pair j of k by angles[..., j]."""
    pairs = torch.view_as_complex(k.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.exp(1j * angles)).flatten(-2)


def at_positions(k: Tensor, start: int) -> Tensor:
    """The keys of tokens start, start + 1, ..."""
    positions = start + torch.arange(k.shape[1])[None]
    return rotate(k, *rotary_tables(positions, k.shape[-1], dtype=k.dtype))


@given(
    kind=st.sampled_from(sorted(KINDS)),
    seed=st.integers(0, 2**16),
    normalize=st.booleans(),
    angle=st.sampled_from([1.0, 100.0, 1e6]),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_proposition_b1_and_theorem_b2_phases_cancel_or_turn_twice(
    kind: str, seed: int, normalize: bool, angle: float
) -> None:
    """z z' is left as it is by any rotation, and z^2 turned by twice the angle."""
    k = draw_keys(kind, 5, 8, seed, batch=(3, 2)).transpose(1, 2)
    random = torch.Generator().manual_seed(seed)
    angles = angle * torch.rand(3, 5, 2, 4, dtype=k.dtype, generator=random)
    lift = ClebschGordanLift(8, rank=5, heads=2, normalize=normalize).double()
    before, after = lift._features(k), lift._features(turn(k, angles))
    lost = 64 * EPS * (1 + angle) * float(before.abs().max())
    assert_close(after[..., :4], before[..., :4], rtol=0, atol=lost)
    harmonic_before = torch.complex(before[..., 4:8], before[..., 8:])
    harmonic_after = torch.complex(after[..., 4:8], after[..., 8:])
    assert_close(harmonic_after, harmonic_before * torch.exp(2j * angles), rtol=0, atol=lost)


def test_proposition_b1_is_all_of_degree_two_for_one_pair_but_not_for_two() -> None:
    """x^2, x y, y^2 are mixtures of the three features; of the ten products of two pairs, six are.

    What is left out are the products of one pair with another.
    """
    for pairs, products, known in ((1, 3, 3), (2, 10, 6)):
        k = torch.randn(50, 2 * pairs, dtype=torch.float64)
        i, j = torch.triu_indices(2 * pairs, 2 * pairs)
        squares, features = k[:, i] * k[:, j], clebsch_gordan(k)
        assert squares.shape[1] == products
        assert torch.linalg.matrix_rank(squares) == products
        assert torch.linalg.matrix_rank(features) == known
        assert torch.linalg.matrix_rank(torch.cat([squares, features], 1)) == products


@every_lift
def test_theorem_b2_gram_and_lag_of_the_invariants_ignore_positions(normalize: bool) -> None:
    """Wherever a text begins. With the harmonics beside them they do not."""
    lift = ClebschGordanLift(16, rank=24, heads=3, normalize=normalize).double()
    k = torch.randn(1, 40, 3, 16, dtype=torch.float64)

    def statistics(start: int, columns: slice) -> list[Tensor]:
        features = lift._features(at_positions(k, start))[..., columns].transpose(1, 2)
        return list(sums(features, features))[:2]

    invariant, everything = slice(0, 8), slice(None)
    for moved, still in zip(statistics(10**6, invariant), statistics(0, invariant), strict=True):
        assert_close(moved, still, rtol=1e-11, atol=1e-11)
    for moved, still in zip(statistics(10**6, everything), statistics(0, everything), strict=True):
        assert not torch.allclose(moved, still, rtol=0.1)


@every_lift
def test_corollary_b3_inner_products_depend_on_content_alone(normalize: bool) -> None:
    """Each of two tokens may stand anywhere. Raw rotary keys know how far apart they are."""
    lift = ClebschGordanLift(8, rank=5, heads=1, normalize=normalize).double()
    k = torch.randn(1, 2, 1, 8, dtype=torch.float64)

    def products(*positions: int) -> tuple[Tensor, Tensor]:
        turned = rotate(k, *rotary_tables(torch.tensor([positions]), 8, dtype=k.dtype))
        psi = lift._features(turned)[0, :, 0, :4]
        return psi[0] @ psi[1], turned[0, 0, 0] @ turned[0, 1, 0]

    (lifted, raw), *others = (products(*at) for at in ((0, 0), (0, 7), (10**5, 3)))
    for other_lifted, other_raw in others:
        assert_close(other_lifted, lifted, rtol=1e-10, atol=0)
        assert abs(other_raw - raw) > 0.1


def test_corollary_b3_an_index_of_moduli_not_of_content() -> None:
    """Phases of the content go with those of the position: 1 and i cannot be told apart.

    Nor is any pair of keys ever orthogonal, unless they share no pair: for independent Gaussian
    content the mean product is half the mean square.
    """
    one, i = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    assert one @ i == 0
    assert torch.equal(clebsch_gordan(one)[:1], clebsch_gordan(i)[:1])
    psi = clebsch_gordan(torch.randn(2000, 16, dtype=torch.float64))[:, :8]
    products = psi @ psi.mT
    assert products.min() > 0
    others = (products.sum() - products.trace()) / (2000 * 1999)
    assert_close((others / products.trace() * 2000).item(), 0.5, rtol=0, atol=0.02)


@pytest.mark.parametrize("angle", [0.0, 0.3, math.pi / 2, 1e4])
def test_section_b4_harmonics_turn_by_the_matrix_of_twice_the_angle(angle: float) -> None:
    k = torch.randn(9, 2, dtype=torch.float64)
    turned = clebsch_gordan(turn(k, torch.full((9, 1), angle, dtype=k.dtype)))[:, 1:]
    c, s = math.cos(2 * angle), math.sin(2 * angle)
    matrix = torch.tensor([[c, -s], [s, c]], dtype=k.dtype)
    assert_close(turned, clebsch_gordan(k)[:, 1:] @ matrix.mT, rtol=0, atol=1e-11)


def test_section_b4_a_common_shift_of_positions_changes_no_answer() -> None:
    """The Gram matrix of all features turns with it, and the query turns alike."""
    k = torch.randn(1, 30, 2, 8, dtype=torch.float64)
    v = torch.randn(1, 30, 2, 3, dtype=torch.float64)
    coef = torch.tensor([[0.3, 1.0, -0.5], [0.0, 0.0, 1.0]], dtype=torch.float64)

    def answers(k: Tensor) -> Tensor:
        psi = clebsch_gordan(k)
        return ska(psi, psi, v, coef=coef, ridge=0.5)

    start = answers(at_positions(k, 0))
    assert_close(answers(at_positions(k, 1000)), start, rtol=0, atol=1e-9)
    stretched = rotate(k, *rotary_tables(3 * torch.arange(30)[None], 8, dtype=k.dtype))
    assert float((answers(stretched) - start).abs().max()) > 0.1


def test_section_b4_a_half_turn_is_lost() -> None:
    """Relative phase is kept up to a sign of the key: everything is of degree two."""
    k = torch.randn(9, 6, dtype=torch.float64)
    assert torch.equal(clebsch_gordan(-k), clebsch_gordan(k))
