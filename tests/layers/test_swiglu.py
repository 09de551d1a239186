from __future__ import annotations

import pytest
import torch

from echo_lm.layers.swiglu import SwiGLU, hidden_width


@pytest.mark.parametrize(
    ("dim", "width"),
    [(768, 2048), (448, 1216), (128, 384), (96, 256), (24, 64), (1, 64), (25, 128)],
)
def test_hidden_width_of_eight_thirds(dim: int, width: int) -> None:
    assert hidden_width(dim, 8 / 3) == width
    assert hidden_width(dim, 2.667) == width


def test_hidden_width_never_gains_a_block_by_rounding() -> None:
    for dim in range(24, 24 * 4000, 24):
        assert hidden_width(dim, 8 / 3) == dim * 8 // 3 + -(dim * 8 // 3) % 64


@pytest.mark.parametrize(("dim", "expansion"), [(0, 2.0), (8, 0.0), (8, float("nan"))])
def test_hidden_width_refuses_nonsense(dim: int, expansion: float) -> None:
    with pytest.raises(ValueError, match=r"dim is 0|expansion is"):
        hidden_width(dim, expansion)


def test_swiglu_is_its_formula() -> None:
    layer = SwiGLU(6, hidden=10).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    gate, up = x @ layer.gate_proj.weight.T, x @ layer.up_proj.weight.T
    expected = (gate / (1 + torch.exp(-gate)) * up) @ layer.out_proj.weight.T
    torch.testing.assert_close(layer(x), expected, rtol=1e-13, atol=1e-13)


def test_swiglu_parameters() -> None:
    layer = SwiGLU(96)
    assert layer.hidden == 256
    assert sum(p.numel() for p in layer.parameters()) == 3 * 96 * 256


def test_swiglu_refuses_an_empty_hidden_layer() -> None:
    with pytest.raises(ValueError, match="hidden is 0"):
        SwiGLU(8, hidden=0)
