from __future__ import annotations

import pytest
import torch
from torch import Tensor

from echo_lm.layers.koopman_mlp import SpectralKoopmanMLP


def explicit(layer: SpectralKoopmanMLP, x: Tensor) -> Tensor:
    """The layer with its block-diagonal matrix written out."""
    blocks = []
    for gamma, omega in zip(layer.gamma.tolist(), layer.omega.tolist(), strict=True):
        eigenvalue = complex(gamma, omega)
        eigenvalue /= max(1.0, abs(eigenvalue))
        a, b = eigenvalue.real, eigenvalue.imag
        blocks.append(torch.tensor([[a, b], [-b, a]], dtype=torch.float64))
    lifted = x @ layer.lift_proj.weight.T
    z = (lifted / (1 + torch.exp(-lifted))) @ torch.block_diag(*blocks).T
    if layer.gate_proj is not None:
        z = z / (1 + torch.exp(-(x @ layer.gate_proj.weight.T)))
    return z @ layer.out_proj.weight.T


def spread(layer: SpectralKoopmanMLP, scale: float) -> SpectralKoopmanMLP:
    """Give the layer eigenvalues inside, on and outside the unit circle."""
    with torch.no_grad():
        layer.gamma.normal_(std=scale)
        layer.omega.normal_(std=scale)
        layer.gamma[0], layer.omega[0] = 0.6, 0.8
        layer.gamma[1], layer.omega[1] = 0.0, 0.0
    return layer


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("scale", [0.3, 1.0, 5.0])
def test_equals_the_explicit_block_diagonal_matrix(gated: bool, scale: float) -> None:
    layer = spread(SpectralKoopmanMLP(6, hidden=14, gated=gated).double(), scale)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(x), explicit(layer, x), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("dim", "hidden"), [(768, 2048), (448, 1216), (128, 384), (96, 256)])
def test_parameters(dim: int, hidden: int) -> None:
    with torch.device("meta"):
        plain, gated = SpectralKoopmanMLP(dim), SpectralKoopmanMLP(dim, gated=True)
    assert plain.hidden == hidden
    assert sum(p.numel() for p in plain.parameters()) == 2 * dim * hidden + hidden
    assert sum(p.numel() for p in gated.parameters()) == 3 * dim * hidden + hidden


def test_only_spectral_parameters_are_free_of_weight_decay() -> None:
    layer = SpectralKoopmanMLP(8, gated=True)
    free = {n for n, p in layer.named_parameters() if getattr(p, "_no_weight_decay", False)}
    assert free == {"gamma", "omega"}


def test_starts_near_the_rim_with_phases_all_around() -> None:
    eigenvalues = SpectralKoopmanMLP(128).eigenvalues()
    assert eigenvalues.shape == (192,)
    assert eigenvalues.abs().min() >= 0.9 - 1e-6
    assert eigenvalues.abs().max() <= 1 + 1e-6
    quadrants = torch.bincount((eigenvalues.angle() / (torch.pi / 2)).floor().long() + 2)
    assert quadrants.min() > 192 // 4 // 2


@pytest.mark.parametrize("scale", [0.5, 1.0, 1e3, 1e15])
def test_rotation_contracts(scale: float) -> None:
    layer = spread(SpectralKoopmanMLP(8), scale)
    g = torch.randn(100, layer.hidden)
    pairs, turned = g.view(100, -1, 2), layer._rotate(g).view(100, -1, 2)
    rounding = 1 + 8 * torch.finfo(torch.float32).eps
    assert (turned.norm(dim=-1) <= pairs.norm(dim=-1) * rounding).all()
    torch.testing.assert_close(
        turned.norm(dim=-1), pairs.norm(dim=-1) * layer.eigenvalues().abs(), rtol=1e-5, atol=1e-6
    )


def test_bf16_parameters_still_contract() -> None:
    eigenvalues = spread(SpectralKoopmanMLP(64), 2.0).bfloat16().eigenvalues()
    assert eigenvalues.dtype == torch.complex64
    assert eigenvalues.abs().max() <= 1 + 4 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("modulus", [0.0, 0.7, 3.0])
def test_gradients(gated: bool, modulus: float) -> None:
    layer = SpectralKoopmanMLP(3, hidden=6, gated=gated).double()
    with torch.no_grad():
        phase = 7 * torch.rand(3, dtype=torch.float64)
        layer.gamma.copy_(modulus * phase.cos())
        layer.omega.copy_(modulus * phase.sin())
    parameters = dict(layer.named_parameters())

    def run(x: Tensor, *values: Tensor) -> Tensor:
        named = dict(zip(parameters, values, strict=True))
        y: Tensor = torch.func.functional_call(layer, named, (x,))
        return y

    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(run, (x, *parameters.values()))


@pytest.mark.parametrize(
    ("gamma", "omega"),
    [(0.0, 0.0), (1.0, 0.0), (0.6, 0.8), (0.0, -1.0), (1e-30, 0.0), (1e15, 1e15)],
)
def test_value_and_gradient_are_finite_anywhere(gamma: float, omega: float) -> None:
    layer = SpectralKoopmanMLP(4, hidden=8)
    with torch.no_grad():
        layer.gamma.fill_(gamma)
        layer.omega.fill_(omega)
    y = layer(torch.randn(3, 4))
    y.square().sum().backward()
    assert y.isfinite().all()
    assert layer.gamma.grad is not None
    assert layer.omega.grad is not None
    assert layer.gamma.grad.isfinite().all()
    assert layer.omega.grad.isfinite().all()


def test_an_eigenvalue_outside_moves_only_along_the_circle() -> None:
    layer = SpectralKoopmanMLP(4, hidden=8).double()
    with torch.no_grad():
        layer.gamma.fill_(3.0)
        layer.omega.fill_(4.0)
    layer(torch.randn(3, 4, dtype=torch.float64)).square().sum().backward()
    assert layer.gamma.grad is not None
    assert layer.omega.grad is not None
    radial = 3 * layer.gamma.grad + 4 * layer.omega.grad
    torch.testing.assert_close(radial, torch.zeros_like(radial), rtol=0, atol=1e-14)


def test_bf16_stays_bf16() -> None:
    layer = SpectralKoopmanMLP(16, gated=True)
    x = torch.randn(2, 5, 16)
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    y = layer.bfloat16()(x.bfloat16())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), expected, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("hidden", [0, 7])
def test_refuses_a_width_without_pairs(hidden: int) -> None:
    with pytest.raises(ValueError, match=f"hidden is {hidden}"):
        SpectralKoopmanMLP(8, hidden=hidden)
