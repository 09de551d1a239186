"""The robust factorisations: exact where they can be, honest where they cannot."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from echo_lm.ops.ska.linalg import inverse_cholesky, spd_inverse

OPERATORS = [spd_inverse, inverse_cholesky]

both = pytest.mark.parametrize("operator", OPERATORS, ids=["spd_inverse", "inverse_cholesky"])


def positive_definite(*batch: int, size: int = 6) -> Tensor:
    half = torch.randn(*batch, size, size, dtype=torch.float64)
    return half @ half.mT + torch.eye(size, dtype=torch.float64)


def of_keys(keys: Tensor) -> Tensor:
    return keys @ keys.mT + torch.eye(len(keys))


def huge_keys(count: int = 20) -> Tensor:
    """Two directions, beside which single precision cannot see the identity."""
    return 1e5 * torch.randn(count, 2)


@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (0, 2)])
def test_equals_the_plain_inverse(batch: tuple[int, ...]) -> None:
    a = positive_definite(*batch)
    torch.testing.assert_close(spd_inverse(a), torch.linalg.inv(a))
    torch.testing.assert_close(
        inverse_cholesky(a), torch.linalg.inv(torch.linalg.cholesky(a)), atol=1e-12, rtol=1e-12
    )


def test_the_inverse_is_symmetric_to_the_last_bit() -> None:
    inverse = spd_inverse(positive_definite(4).float())
    assert torch.equal(inverse, inverse.mT)


@both
def test_gradients(operator: Callable[[Tensor], Tensor]) -> None:
    def of_symmetric(a: Tensor) -> Tensor:
        return operator((a + a.mT) / 2)

    torch.autograd.gradcheck(of_symmetric, positive_definite(2, size=4).requires_grad_())


@pytest.mark.parametrize("name", ["spd_inverse", "inverse_cholesky"])
def test_registered_as_torch_expects(name: str) -> None:
    registered = getattr(torch.ops.echo_lm, name).default
    torch.library.opcheck(registered, (positive_definite(2).requires_grad_(),))


@both
def test_what_fails_is_jittered_and_said(
    operator: Callable[[Tensor], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    """The other matrices of the batch are not touched."""
    fine = positive_definite(size=20).float()
    got = operator(torch.stack([fine, of_keys(huge_keys())]))
    assert got.isfinite().all()
    assert torch.equal(got[0], operator(fine))
    assert "1 of 2 matrices were not positive definite to rounding: 1 factored" in caplog.text


def test_rows_depend_on_earlier_rows_alone_even_where_a_matrix_fails() -> None:
    """Rows can be tokens: the retry must not carry the future into the past."""
    keys = huge_keys()
    changed = torch.cat([keys[:12], 1e3 * huge_keys(8)])
    assert torch.linalg.cholesky_ex(of_keys(keys[:12])).info > 0
    got, other = inverse_cholesky(of_keys(keys)), inverse_cholesky(of_keys(changed))
    assert torch.equal(got[:12], other[:12])
    assert not torch.equal(got[12:], other[12:])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@both
def test_what_is_not_finite_stays_so(
    operator: Callable[[Tensor], Tensor], bad: float, caplog: pytest.LogCaptureFixture
) -> None:
    a = positive_definite(2)
    wanted = operator(a[1:])
    a[0, 2, :] = a[0, :, 2] = bad
    got = operator(a)
    torch.testing.assert_close(got[1:], wanted)
    assert not got[0].isfinite().all()
    if bad != bad:
        assert "of 2 matrices" in caplog.text
        assert "1 not at all (NaN)" in caplog.text


@both
def test_a_negative_matrix_is_no_inverse_of_anything(operator: Callable[[Tensor], Tensor]) -> None:
    assert operator(-positive_definite(1)).isnan().any()
