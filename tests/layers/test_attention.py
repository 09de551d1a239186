from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from echo_lm.layers import attention
from echo_lm.layers.attention import Attention, AttentionState
from echo_lm.ops.checks import debug

DIM, HEADS = 12, 2


def layer64() -> Attention:
    return Attention(DIM, heads=HEADS).double()


def random64(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def naive(layer: Attention, x: Tensor, start: int = 0) -> Tensor:
    """Softmax attention, one query at a time; the first token stands at position `start`."""
    batch, time, dim = x.shape
    width = dim // layer.heads
    frequency = layer.rope_theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)

    def project(weight: Tensor, turned: bool) -> Tensor:
        y = (x @ weight.T).view(batch, time, layer.heads, width)
        if not turned:
            return y
        angles = (start + torch.arange(time, dtype=torch.float64))[:, None] * frequency
        pairs = torch.view_as_complex(y.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * torch.exp(1j * angles)[None, :, None]).flatten(-2)

    q, k = project(layer.q_proj.weight, True), project(layer.k_proj.weight, True)
    v = project(layer.v_proj.weight, False)
    rows = []
    for t in range(time):
        scores = torch.einsum("bhp,bshp->bhs", q[:, t], k[:, : t + 1]) / width**0.5
        weight = scores.exp() / scores.exp().sum(-1, keepdim=True)
        rows.append(torch.einsum("bhs,bshp->bhp", weight, v[:, : t + 1]).flatten(-2))
    return torch.stack(rows, 1) @ layer.out_proj.weight.T


def in_pieces(layer: Attention, x: Tensor, cuts: list[int]) -> tuple[Tensor, AttentionState]:
    state, out = layer.init_state(x.shape[0]), []
    for begin, end in pairwise([0, *cuts, x.shape[1]]):
        y, state = layer(x[:, begin:end], state)
        out.append(y)
    return torch.cat(out, 1), state


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("time", [1, 2, 7, 33])
def test_equals_the_loop(time: int) -> None:
    layer, x = layer64(), random64(3, time, DIM)
    y, state = layer(x)
    close(y, naive(layer, x))
    assert state.count.tolist() == [time] * 3
    assert state.keys.shape == (3, time, HEADS, DIM // HEADS)


@settings(max_examples=25, deadline=None)
@given(cuts=st.sets(st.integers(1, 16), max_size=8).map(sorted))
def test_any_split_equals_one_pass(cuts: list[int]) -> None:
    layer, x = layer64(), random64(2, 17, DIM)
    whole, final = layer(x)
    pieces, state = in_pieces(layer, x, cuts)
    close(pieces, whole)
    for name, entry in final.to_dict().items():
        close(state.to_dict()[name], entry)


def test_token_by_token_needs_no_mask_and_equals_one_pass() -> None:
    layer, x = layer64(), random64(2, 9, DIM)
    pieces, state = in_pieces(layer, x, list(range(1, 9)))
    close(pieces, naive(layer, x))
    assert state.valid is None


def test_a_masked_continuation_in_slices_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = layer64(), random64(2, 20, DIM)
    monkeypatch.setattr(attention, "MASK_ENTRIES", 100)
    close(in_pieces(layer, x, [5])[0], naive(layer, x))


@pytest.mark.parametrize("cuts", [[], [4, 9]])
def test_gradients_equal_those_of_the_loop(cuts: list[int]) -> None:
    layer, x = layer64(), random64(2, 11, DIM).requires_grad_()
    g = random64(2, 11, DIM)
    inputs = [x, *layer.parameters()]
    expected = torch.autograd.grad(naive(layer, x), inputs, g)
    for ours, theirs in zip(
        torch.autograd.grad(in_pieces(layer, x, cuts)[0], inputs, g), expected, strict=True
    ):
        close(ours, theirs)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=4),
    last=st.sampled_from([1, 3]),
)
def test_ragged_rows_equal_each_row_alone(lengths: list[list[int]], last: int) -> None:
    layer = layer64()
    state, real = layer.init_state(3), [[] for _ in range(3)]
    outputs: list[list[Tensor]] = [[] for _ in range(3)]
    calls = [(torch.tensor(call), 5) for call in lengths] + [(None, last)]
    for call, time in calls:
        x = random64(3, time, DIM)
        y, state = layer(x, state, lengths=call)
        assert y.isfinite().all()
        for row in range(3):
            n = time if call is None else int(call[row])
            real[row].append(x[row, :n])
            outputs[row].append(y[row, :n])
    for row in range(3):
        tokens = torch.cat(real[row])
        close(torch.cat(outputs[row]), naive(layer, tokens[None])[0])
        assert state.count[row] == len(tokens)


def test_padding_reaches_neither_outputs_nor_state() -> None:
    layer, x = layer64(), random64(2, 6, DIM)
    lengths = torch.tensor([4, 0])
    poisoned = x.clone()
    poisoned[0, 4:] = torch.nan
    poisoned[1] = torch.inf
    y, state = layer(x, lengths=lengths)
    y_poisoned, state_poisoned = layer(poisoned, lengths=lengths)
    assert torch.equal(y[0, :4], y_poisoned[0, :4])
    for name, entry in state.to_dict().items():
        assert torch.equal(entry, state_poisoned.to_dict()[name])


def test_gradients_ignore_padding() -> None:
    layer, x = layer64(), random64(2, 5, DIM).requires_grad_()
    lengths = torch.tensor([3, 0])
    y, state = layer(x, lengths=lengths)
    z, _ = layer(x[:, :2], state)
    (y[0, :3].sum() + z.sum()).backward()
    assert x.grad is not None
    assert not x.grad[0, 3:].any()
    assert not x.grad[1, 2:].any()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("cut", [0, 4])
def test_the_future_does_not_move_the_past(cut: int) -> None:
    layer = Attention(DIM, heads=HEADS)
    x = torch.randn(2, 40, DIM)
    changed = x.clone()
    changed[:, 21:] = 1e3 * torch.randn(2, 19, DIM)
    state = layer(x[:, :cut])[1] if cut else None
    before, after = (layer(t[:, cut:], state)[0][:, : 21 - cut] for t in (x, changed))
    assert torch.equal(before, after)


def test_a_call_leaves_its_state_alone() -> None:
    layer = layer64()
    _, state = layer(random64(2, 4, DIM))
    kept = state.clone()
    layer(random64(2, 3, DIM), state, lengths=torch.tensor([1, 3]))
    for name, entry in kept.to_dict().items():
        assert torch.equal(entry, state.to_dict()[name])


def test_reset_and_reorder() -> None:
    layer, x, more = layer64(), random64(3, 5, DIM), random64(3, 4, DIM)
    _, state = layer(x)
    y, final = layer(more, state.reset(torch.tensor([False, True, False])))
    close(y[1:2], naive(layer, more[1:2]))
    close(y[0], naive(layer, torch.cat((x, more), 1))[0, 5:])
    assert final.count.tolist() == [9, 4, 9]

    y, _ = layer(more, final.reset())
    close(y, naive(layer, more))
    assert final.reset().nbytes == layer.init_state(3).nbytes

    rows = torch.tensor([2, 2, 0])
    y, _ = layer(more[rows], state.reorder(rows))
    close(y, naive(layer, torch.cat((x, more), 1))[rows, 5:])


def test_state_survives_a_dictionary() -> None:
    layer = layer64()
    for lengths in (None, torch.tensor([1, 3])):
        _, state = layer(random64(2, 3, DIM), lengths=lengths)
        again = AttentionState.from_dict(state.to_dict())
        assert again.to_dict().keys() == state.to_dict().keys()
        x = random64(2, 2, DIM)
        assert torch.equal(layer(x, state)[0], layer(x, again)[0])


def test_memory_grows_by_a_key_and_a_value_a_token() -> None:
    layer = Attention(DIM, heads=HEADS)
    assert layer.init_state(2).nbytes == 2 * 8
    for time in (1, 10, 100):
        _, state = layer(torch.randn(2, time, DIM))
        assert state.nbytes == 2 * 8 + 2 * time * 2 * DIM * 4
        assert sum(t.untyped_storage().nbytes() for t in state.to_dict().values()) == state.nbytes


def test_far_positions_are_as_exact_as_near_ones() -> None:
    layer = Attention(64, heads=2)
    x = torch.randn(1, 30, 64)
    state = layer.init_state(1)
    state.count += 1_000_000
    y, _ = layer(x, state)
    torch.testing.assert_close(y, layer(x)[0], rtol=0, atol=2e-6)


def test_bf16_and_autocast_continue_any_cache() -> None:
    layer, x = Attention(DIM, heads=HEADS), torch.randn(2, 8, DIM)
    expected = layer(x)[0]
    _, fp32_state = layer(x[:, :5])
    with torch.autocast("cpu", torch.bfloat16):
        y, state = layer(x[:, 5:], fp32_state)
    assert y.dtype == state.keys.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), expected[:, 5:], rtol=0.05, atol=0.02)
    y, state = layer.bfloat16()(x.bfloat16(), return_state=False)
    assert state is None
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), expected, rtol=0.05, atol=0.02)


def test_bad_arguments_say_what_is_wrong() -> None:
    layer, x = Attention(DIM, heads=HEADS), torch.randn(2, 3, DIM)
    with pytest.raises(ValueError, match="heads is 5"):
        Attention(DIM, heads=5)
    with pytest.raises(ValueError, match="multiple of 2"):
        Attention(6, heads=2)
    for bad in (x[0], x[..., 1:], x[:, :0]):
        with pytest.raises(ValueError, match="x has shape"):
            layer(bad)
    with pytest.raises(ValueError, match=r"lengths has shape \(3,\)"):
        layer(x, lengths=torch.ones(3, dtype=torch.long))
    with pytest.raises(ValueError, match="state holds 1 rows"):
        layer(x, layer.init_state(1))
    with pytest.raises(ValueError, match="state is a dict"):
        layer(x, {})
    x[1, 2, 0] = torch.nan
    with debug(), pytest.raises(ValueError, match=r"x\[1, 2, 0\] is nan"):
        layer(x)
