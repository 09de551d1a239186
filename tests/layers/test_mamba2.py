"""Mamba-2 equals the one in transformers, and continues from any state."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache, Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from echo_lm.layers.mamba2 import Mamba2, Mamba2State
from echo_lm.layers.mamba3 import Mamba3

OPTIONS: list[dict[str, Any]] = [
    {"heads": 6},
    {"heads": None, "head_dim": 24},
    {"heads": 6, "groups": 3, "conv_kernel": 2, "bias": True, "conv_bias": False},
    {"heads": 4, "groups": 4, "state_dim": 3},
]


def make(dtype: torch.dtype = torch.float64, **options: Any) -> Mamba2:
    """A layer whose every parameter matters."""
    torch.manual_seed(0)
    layer = Mamba2(24, **({"heads": 6, "state_dim": 10, "chunk_size": 8} | options))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return layer.to(dtype)


def tokens(count: int, batch: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, count, 24, dtype=dtype)


def assert_same_state(got: Mamba2State, expected: Mamba2State, atol: float = 1e-12) -> None:
    a, b = got.to_dict(), expected.to_dict()
    assert a.keys() == b.keys()
    for name, value in b.items():
        torch.testing.assert_close(a[name], value, rtol=0, atol=atol)


@pytest.fixture(scope="module")
def oracle() -> tuple[Mamba2Mixer, Mamba2Config, Mamba2]:
    """transformers' layer and ours, with the same weights."""
    config = Mamba2Config(
        hidden_size=24,
        num_heads=6,
        head_dim=8,
        state_size=10,
        n_groups=1,
        chunk_size=8,
        num_hidden_layers=1,
    )
    theirs, ours = Mamba2Mixer(config, layer_idx=0).eval(), make(torch.float32)
    weights = {name.replace("conv.", "conv1d."): w for name, w in ours.state_dict().items()}
    weights["conv1d.weight"] = weights["conv1d.weight"].unsqueeze(1)
    theirs.load_state_dict(weights)
    return theirs, config, ours


@torch.no_grad()
def test_equals_transformers(oracle: tuple[Mamba2Mixer, Mamba2Config, Mamba2]) -> None:
    theirs, _, ours = oracle
    x = tokens(37, dtype=torch.float32)
    torch.testing.assert_close(ours(x)[0], theirs(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_decoding_equals_transformers(oracle: tuple[Mamba2Mixer, Mamba2Config, Mamba2]) -> None:
    theirs, config, ours = oracle
    x, cache, state = tokens(20, dtype=torch.float32), DynamicCache(config=config), None
    for piece in [x[:, :11], *x[:, 11:].split(1, dim=1)]:
        expected = theirs(piece, cache_params=cache)
        y, state = ours(piece, state)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    h = cache.layers[0].recurrent_states[0]
    torch.testing.assert_close(state.ssd.h, h, rtol=1e-4, atol=1e-5)


def test_gradients_equal_transformers(
    oracle: tuple[Mamba2Mixer, Mamba2Config, Mamba2],
) -> None:
    theirs, _, ours = oracle
    x, gradients = tokens(13, dtype=torch.float32), []
    for layer in (theirs, ours):
        layer.zero_grad()
        y = layer(x)
        (y if layer is theirs else y[0]).square().sum().backward()
        gradients.append(
            {n.replace("conv1d.", "conv."): p.grad.flatten() for n, p in layer.named_parameters()}
        )
    for name, gradient in gradients[0].items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=1e-5 * scale)


@settings(max_examples=15, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 20), max_size=6, unique=True).map(sorted),
    options=st.sampled_from(OPTIONS),
)
def test_any_split_equals_one_pass(cuts: list[int], options: dict[str, Any]) -> None:
    layer, x = make(**options), tokens(21)
    whole, end = layer(x)
    state, pieces = layer.init_state(2), []
    for start, stop in zip([0, *cuts], [*cuts, 21], strict=True):
        y, state = layer(x[:, start:stop], state)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-11, atol=1e-11)
    assert_same_state(state, end)


@pytest.mark.parametrize("options", OPTIONS)
def test_ragged_rows_equal_each_row_alone(options: dict[str, Any]) -> None:
    layer, x, lengths = make(**options), tokens(9, batch=4), torch.tensor([0, 9, 1, 5])
    _, before = layer(tokens(6, batch=4), lengths=torch.tensor([6, 2, 0, 4]))
    y, after = layer(x, before, lengths=lengths)
    for b, length in enumerate(lengths.tolist()):
        one = torch.tensor([b])
        alone = before.reorder(one)
        if length:
            expected, alone = layer(x[b : b + 1, :length], alone)
            torch.testing.assert_close(y[b : b + 1, :length], expected, rtol=1e-11, atol=1e-11)
        assert_same_state(after.reorder(one), alone, atol=1e-12 if length else 0)
    assert torch.isfinite(y).all()


def test_padding_reaches_no_gradient() -> None:
    layer, x, lengths = make(), tokens(7), torch.tensor([7, 3])
    x.requires_grad_()
    y, _ = layer(x, lengths=lengths)
    (y[0].sum() + y[1, :3].sum()).backward()
    assert x.grad is not None
    assert not x.grad[1, 3:].any()


def test_causal_to_the_bit() -> None:
    layer, x = make(torch.float32), tokens(30, dtype=torch.float32)
    y, _ = layer(x)
    moved, _ = layer(torch.cat([x[:, :13], 3 * tokens(17, dtype=torch.float32)], 1))
    assert torch.equal(y[:, :13], moved[:, :13])


@pytest.mark.parametrize("autocast", [True, False])
def test_bf16_steps_equal_the_bf16_pass(autocast: bool) -> None:
    # 1e-2 is a few roundings to 8 bits.
    layer = make(torch.float32 if autocast else torch.bfloat16)
    x = tokens(12, dtype=torch.float32 if autocast else torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        whole, end = layer(x)
        state, pieces = None, []
        for piece in x.split(1, dim=1):
            y, state = layer(piece, state)
            pieces.append(y)
    assert whole.dtype == torch.bfloat16
    assert end.ssd.h.dtype == torch.float32
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-2, atol=1e-2)


def test_initial_values() -> None:
    torch.manual_seed(0)
    layer = Mamba2(512, head_dim=4)
    rate, dt = layer.A_log.exp(), torch.nn.functional.softplus(layer.dt_bias)
    assert 1 <= rate.min() < 2
    assert 15 < rate.max() <= 16.001
    assert 0.9e-3 < dt.min() < 2e-3
    assert 0.05 < dt.max() < 0.1001
    assert dt.log().mean().item() == pytest.approx(math.log(1e-2), abs=0.4)
    assert layer.D.eq(1).all()


@pytest.mark.parametrize("layer", [Mamba2(8, heads=2, bias=True), Mamba3(8, heads=2, rank=2)])
def test_weight_decay_spares_all_but_matrices(layer: torch.nn.Module) -> None:
    decayed = {n for n, p in layer.named_parameters() if not hasattr(p, "_no_weight_decay")}
    matrices = {"in_proj.weight", "out_proj.weight", "conv.weight", "mimo_x", "mimo_z", "mimo_o"}
    assert decayed == matrices & dict(layer.named_parameters()).keys()


def test_state_is_of_fixed_size_and_survives_a_dictionary() -> None:
    layer = make(torch.float32)
    _, state = layer(tokens(30, dtype=torch.float32))
    assert state.nbytes == layer.init_state(2).nbytes == 4 * 2 * (3 * (48 + 20) + 48 * 10)
    assert_same_state(Mamba2State.from_dict(state.to_dict()), state, atol=0)
    assert layer(tokens(1, dtype=torch.float32), return_state=False)[1] is None


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="groups is 4"):
        Mamba2(24, heads=6, groups=4)
    with pytest.raises(ValueError, match="heads is 5"):
        Mamba2(24, heads=5)
    with pytest.raises(ValueError, match="48 inner channels"):
        Mamba2(24)
    layer = make()
    with pytest.raises(ValueError, match=r"takes \[batch, time, 24\]"):
        layer(torch.ones(2, 3, 25))
    with pytest.raises(ValueError, match="at least one token"):
        layer(tokens(0))
    with pytest.raises(ValueError, match="continues a Mamba2State"):
        layer(tokens(3), Mamba3(24, heads=6).init_state(2))
    with pytest.raises(ValueError, match="state"):
        layer(tokens(3), layer.init_state(3))
    with pytest.raises(ValueError, match="lengths"):
        layer(tokens(3), lengths=torch.tensor([1, 4]))
