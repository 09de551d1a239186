"""The short convolution equals torch's, remembers its window, and stays causal."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from echo_lm.layers.conv import ConvState, ShortConv


def make(kernel_size: int = 4, *, bias: bool = True, silu: bool = True) -> ShortConv:
    torch.manual_seed(0)
    return ShortConv(6, kernel_size, bias=bias, silu=silu).double()


def tokens(count: int, batch: int = 3) -> Tensor:
    return torch.randn(batch, count, 6, dtype=torch.float64)


@pytest.mark.parametrize("kernel_size", [1, 2, 4, 7])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("count", [1, 3, 20])
def test_equals_a_padded_convolution(kernel_size: int, bias: bool, silu: bool, count: int) -> None:
    conv, x = make(kernel_size, bias=bias, silu=silu), tokens(count)
    padded = F.pad(x.mT, (kernel_size - 1, 0))
    expected = F.conv1d(padded, conv.weight.unsqueeze(1), conv.bias, groups=6).mT
    expected = F.silu(expected) if silu else expected
    torch.testing.assert_close(conv(x)[0], expected)


@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.integers(1, 16), max_size=6, unique=True).map(sorted))
def test_any_split_equals_one_pass(cuts: list[int]) -> None:
    conv, x = make(), tokens(17)
    whole, end = conv(x)
    state, pieces = conv.init_state(3), []
    for start, stop in zip([0, *cuts], [*cuts, 17], strict=True):
        y, state = conv(x[:, start:stop], state)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-14, atol=1e-14)
    assert torch.equal(state.window, end.window)


@pytest.mark.parametrize("kernel_size", [1, 4])
def test_ragged_rows_keep_their_own_window(kernel_size: int) -> None:
    conv, x, lengths = make(kernel_size), tokens(5, batch=5), torch.tensor([0, 1, 2, 3, 5])
    _, before = conv(tokens(4, batch=5))
    for b, length in enumerate(lengths):
        x[b, length:] = math.nan
    y, after = conv(x, before, lengths=lengths)
    for b, length in enumerate(lengths.tolist()):
        alone = ConvState(before.window[b : b + 1])
        if length:
            expected, alone = conv(x[b : b + 1, :length], alone)
            got = y[b : b + 1, :length]
            torch.testing.assert_close(got, expected, rtol=1e-14, atol=1e-14)
        assert torch.equal(after.window[b : b + 1], alone.window)


def test_causal_to_the_bit() -> None:
    conv, x = make(), tokens(9)
    changed = torch.cat([x[:, :5], tokens(4)], 1)
    assert torch.equal(conv(x)[0][:, :5], conv(changed)[0][:, :5])


def test_half_precision_in_and_out_sums_in_fp32() -> None:
    conv, x = make().bfloat16(), tokens(9).bfloat16()
    y, state = conv(x)
    assert y.dtype == torch.bfloat16
    assert state.window.dtype == torch.float32
    assert torch.equal(y, conv(x.float())[0].bfloat16())


def test_bias_is_not_decayed() -> None:
    conv = make()
    assert conv.bias._no_weight_decay
    assert not hasattr(conv.weight, "_no_weight_decay")


def test_bad_arguments() -> None:
    conv = make()
    with pytest.raises(ValueError, match="x has shape"):
        conv(torch.ones(2, 3, 7, dtype=torch.float64))
    with pytest.raises(ValueError, match="at least one token"):
        conv(tokens(0))
    with pytest.raises(ValueError, match="state has a window"):
        conv(tokens(3), make(3).init_state(3))
    with pytest.raises(ValueError, match="between 0 and the 3 tokens"):
        conv(tokens(3), lengths=torch.tensor([1, 4, 2]))
    with pytest.raises(ValueError, match="kernel_size is 0"):
        ShortConv(6, 0)
