"""The lift as a layer; what its features are to rotations: tests/analysis/test_appendix_b.py."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from echo_lm.layers.lift import ClebschGordanLift, clebsch_gordan


def test_features_are_those_of_the_paper() -> None:
    k = torch.tensor([3.0, 4.0, -1.0, 2.0])
    squares = [complex(3, 4) ** 2, complex(-1, 2) ** 2]
    expected = [25.0, 5.0, *(z.real for z in squares), *(z.imag for z in squares)]
    assert clebsch_gordan(k).tolist() == expected


def test_normalised_features_grow_like_the_key() -> None:
    lift = ClebschGordanLift(16, rank=24, heads=1).double()
    k = torch.randn(1, 200, 1, 16, dtype=torch.float64)
    k[:, 0] = 1.0
    k[:, 1] = torch.tensor([3.0, 4.0] + 14 * [0.0])
    ratio = lift._features(k).norm(dim=-1) / k.norm(dim=-1)
    assert ratio.min() >= math.sqrt(2) * (1 - 1e-6)
    assert ratio.max() <= math.sqrt(16) * (1 + 1e-6)
    torch.testing.assert_close(ratio[0, 0, 0].item(), math.sqrt(2), rtol=1e-6, atol=0)
    torch.testing.assert_close(ratio[0, 1, 0].item(), 4.0, rtol=1e-5, atol=0)
    torch.testing.assert_close(lift(100 * k), 100 * lift(k), rtol=1e-5, atol=1e-5)


def test_raw_features_are_of_degree_two() -> None:
    lift = ClebschGordanLift(6, rank=4, heads=2, normalize=False).double()
    k = torch.randn(1, 3, 2, 6, dtype=torch.float64)
    torch.testing.assert_close(lift(3 * k), 9 * lift(k), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-5, 1e6])
def test_value_and_gradient_are_finite_for_any_size(normalize: bool, scale: float) -> None:
    lift = ClebschGordanLift(8, rank=6, heads=2, normalize=normalize)
    k = (scale * torch.randn(2, 3, 2, 8)).requires_grad_()
    y = lift(k)
    y.sum().backward()
    assert k.grad is not None
    assert y.isfinite().all()
    assert k.grad.isfinite().all()
    if scale == 0:
        assert not y.any()
        assert not k.grad.any()


@pytest.mark.parametrize("normalize", [False, True])
def test_gradients(normalize: bool) -> None:
    lift = ClebschGordanLift(4, rank=3, heads=2, normalize=normalize).double()
    k = torch.randn(1, 2, 2, 4, dtype=torch.float64, requires_grad=True)

    def run(k: Tensor, phi: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(lift, {"phi": phi}, (k,))
        return y

    assert torch.autograd.gradcheck(run, (k, lift.phi))


@pytest.mark.parametrize(("rank", "heads"), [(24, 3), (12, 2), (30, 1)])
def test_each_head_starts_orthogonal(rank: int, heads: int) -> None:
    phi = ClebschGordanLift(16, rank=rank, heads=heads).phi
    assert phi.shape == (heads, rank, 24)
    short = phi if rank <= 24 else phi.mT
    expected = torch.eye(min(rank, 24)).expand(heads, -1, -1)
    torch.testing.assert_close(short @ short.mT, expected, rtol=0, atol=1e-5)
    if heads > 1:
        assert not torch.allclose(phi[0], phi[1])


def test_bf16_in_and_out_but_fp32_inside() -> None:
    lift = ClebschGordanLift(16, rank=24, heads=3)
    k = torch.randn(2, 5, 3, 16).bfloat16()
    expected = lift(k.float())
    with torch.autocast("cpu", torch.bfloat16):
        y = lift(k)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, expected.bfloat16())


def test_refuses_what_it_cannot_lift() -> None:
    with pytest.raises(ValueError, match="dim is 5"):
        ClebschGordanLift(5, rank=4, heads=2)
    with pytest.raises(ValueError, match="rank is 0"):
        ClebschGordanLift(4, rank=0, heads=2)
    with pytest.raises(ValueError, match="2 heads of width 4"):
        ClebschGordanLift(4, rank=4, heads=2)(torch.zeros(1, 3, 4, 2))
