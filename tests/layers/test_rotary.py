from __future__ import annotations

import mpmath
import pytest
import torch

from echo_lm.layers.rotary import rotary_tables, rotate


@pytest.mark.parametrize("position", [0, 1, 63, 131_072, 1_000_000, 16_777_217, 1_000_000_000])
def test_tables_are_the_rounded_truth(position: int) -> None:
    width, theta = 16, 10_000.0
    cos, sin = rotary_tables(torch.tensor([[position]]), width, theta=theta)
    cos64, sin64 = rotary_tables(
        torch.tensor([[position]]), width, theta=theta, dtype=torch.float64
    )
    with mpmath.workdps(50):
        angles = [position * mpmath.mpf(theta) ** (mpmath.mpf(-i) / width) for i in range(0, 16, 2)]
        true_cos = torch.tensor([float(mpmath.cos(a)) for a in angles], dtype=torch.float64)
        true_sin = torch.tensor([float(mpmath.sin(a)) for a in angles], dtype=torch.float64)
    angle_error = 4 * torch.finfo(torch.float64).eps * max(1, position)
    half_ulp = torch.finfo(torch.float32).eps / 4
    for table, table64, truth in ((cos, cos64, true_cos), (sin, sin64, true_sin)):
        assert table.dtype == torch.float32
        assert (table64[0, 0] - truth).abs().max() <= angle_error
        assert (table[0, 0].double() - truth).abs().max() <= half_ulp + angle_error


def test_rotation_is_a_complex_product() -> None:
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    positions = torch.randint(0, 10**6, (2, 5))
    cos, sin = rotary_tables(positions, 8, dtype=torch.float64)
    turned = torch.view_as_complex(rotate(x, cos, sin).unflatten(-1, (-1, 2)))
    phase = torch.complex(cos, sin).unsqueeze(2)
    expected = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * phase
    torch.testing.assert_close(turned, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("start", [1_000, 1_000_000, 1_000_000_000])
def test_inner_products_depend_on_distance_alone(start: int) -> None:
    q, k = torch.randn(2, 1, 32, 2, 64)

    def scores(at: int) -> torch.Tensor:
        cos, sin = rotary_tables(at + torch.arange(32)[None], 64)
        return torch.einsum("bthp,bshp->bhts", rotate(q, cos, sin), rotate(k, cos, sin))

    torch.testing.assert_close(scores(start), scores(0), rtol=0, atol=2e-5)


def test_rows_have_positions_of_their_own() -> None:
    x = torch.randn(1, 4, 2, 8).expand(2, -1, -1, -1)
    positions = torch.stack((torch.arange(4), 7 + torch.arange(4)))
    both = rotate(x, *rotary_tables(positions, 8))
    for row in range(2):
        alone = rotate(x[:1], *rotary_tables(positions[row : row + 1], 8))
        assert torch.equal(both[row : row + 1], alone)


def test_keeps_the_dtype() -> None:
    x = torch.randn(1, 3, 2, 4).bfloat16()
    turned = rotate(x, *rotary_tables(torch.arange(3)[None], 4))
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned[:, 0], x[:, 0])


def test_refuses_an_odd_width_and_a_bad_base() -> None:
    with pytest.raises(ValueError, match="width is 5"):
        rotary_tables(torch.zeros(1, 1, dtype=torch.long), 5)
    with pytest.raises(ValueError, match=r"theta is -1\.0"):
        rotary_tables(torch.zeros(1, 1, dtype=torch.long), 4, theta=-1.0)
