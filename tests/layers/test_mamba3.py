"""Mamba-3 follows its definition step by step, in every option, and continues from any state."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from echo_lm.layers.mamba3 import Mamba3, Mamba3State
from echo_lm.ops.ssd import ssd

OPTIONS: list[dict[str, Any]] = [
    {},
    {"rank": 3},
    {"conv_kernel": 4, "gate": False},
    {"rank": 2, "conv_kernel": 3, "gate": False, "rope_fraction": 1.0},
    {"rope_fraction": 0.0},
    {"heads": None, "head_dim": 16},
    {"heads": 2, "head_dim": 24, "rank": 2},
]


def make(dtype: torch.dtype = torch.float64, **options: Any) -> Mamba3:
    """A layer whose every parameter matters, with steps long enough to turn and decay."""
    torch.manual_seed(0)
    layer = Mamba3(24, **({"heads": 6, "state_dim": 10, "chunk_size": 8} | options))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
        layer.dt_bias.add_(3)
    return layer.to(dtype)


def tokens(count: int, batch: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, count, 24, dtype=dtype)


def assert_same_state(got: Mamba3State, expected: Mamba3State, atol: float = 1e-11) -> None:
    a, b = got.to_dict(), expected.to_dict()
    assert a.keys() == b.keys()
    for name, value in b.items():
        if name == "ssd.angle":
            assert torch.allclose((a[name] - value).cos(), torch.ones_like(value))
        else:
            torch.testing.assert_close(a[name], value, rtol=0, atol=atol)


def written_out(layer: Mamba3, sequence: Tensor) -> Tensor:
    """Steps 1 to 7 for one sequence [T, d], head by head, rotating by 2 x 2 matrices."""
    H, P, N, R, S = layer.heads, layer.head_dim, layer.state_dim, layer.rank, layer.angles
    projected = sequence @ layer.in_proj.weight.T
    widths = [H * P * layer.gate, H * P, N * R, N * R, H, H, H, S]
    z, x, B, C, dt_raw, A_raw, trap, angle = projected.split(widths, dim=-1)
    if layer.conv is not None:
        x = layer.conv(x[None])[0][0]
    outputs = torch.zeros(len(sequence), H, P, dtype=sequence.dtype)
    ones = torch.ones(R, P, dtype=sequence.dtype)
    for h in range(H):
        state, last, theta = torch.zeros(P, N, dtype=x.dtype), None, torch.zeros(S, dtype=x.dtype)
        own = slice(h * P, h * P + P)
        mix_x, mix_z, mix_o = (
            ones if m is None else m[h] for m in (layer.mimo_x, layer.mimo_z, layer.mimo_o)
        )
        for t in range(len(sequence)):
            dt = F.softplus(dt_raw[t, h] + layer.dt_bias[h])
            A = torch.clamp(-F.softplus(A_raw[t, h]), max=-1e-4)
            lam = torch.sigmoid(trap[t, h])
            theta = theta + math.pi * torch.tanh(angle[t]) * dt
            turn = torch.eye(N, dtype=x.dtype)
            for i, th in enumerate(theta):
                block = torch.stack([th.cos(), -th.sin(), th.sin(), th.cos()]).view(2, 2)
                turn[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = block
            keys = []
            for v, scale, bias in (
                (B, layer.B_scale, layer.B_bias),
                (C, layer.C_scale, layer.C_bias),
            ):
                v = F.rms_norm(v[t].view(R, N), (N,), scale, 1e-5) + bias[h]
                keys.append(v @ turn.T)
            values = x[t, own] * mix_x
            now = values.T @ keys[0]
            before = now.new_zeros(P, N) if last is None else last
            a = torch.exp(dt * A)
            state = a * state + (1 - lam) * dt * a * before + lam * dt * now
            last = now
            y = keys[1] @ state.T + layer.D[h] * values
            if layer.gate:
                y = y * F.silu(z[t, own] * mix_z)
            outputs[t, h] = (y * mix_o).sum(0)
    return outputs.flatten(1) @ layer.out_proj.weight.T


@pytest.mark.parametrize("options", OPTIONS)
@torch.no_grad()
def test_equals_its_definition(options: dict[str, Any]) -> None:
    layer, x = make(**options), tokens(19)
    y, _ = layer(x)
    for got, sequence in zip(y, x, strict=True):
        torch.testing.assert_close(got, written_out(layer, sequence))


def test_full_lambda_without_angles_is_mamba2s_euler_step() -> None:
    """All of dt in gamma: the scan that Mamba-2 runs."""
    layer, seen = make(rope_fraction=0.0), tokens(15)
    with torch.no_grad():
        widths = layer.in_widths
        trapezoid = slice(sum(widths[:6]), sum(widths[:7]))
        layer.in_proj.weight[trapezoid] = 0
        layer.in_proj.weight[trapezoid, 0] = 1e3
        layer.D.zero_()
    seen[..., 0] = 1
    z, x, B, C, dt, rate, _, _ = layer.in_proj(seen).split(widths, dim=-1)
    dt = F.softplus(dt + layer.dt_bias)
    y = ssd(
        x.unflatten(-1, (6, 8)),
        layer._to_keys(B, layer.B_scale, layer.B_bias).squeeze(3),
        layer._to_keys(C, layer.C_scale, layer.C_bias).squeeze(3),
        log_decay=-dt * F.softplus(rate),
        gamma=dt,
    )
    euler = layer.out_proj(y.flatten(2) * F.silu(z))
    torch.testing.assert_close(layer(seen)[0], euler)


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
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-10, atol=1e-10)
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
            torch.testing.assert_close(y[b : b + 1, :length], expected, rtol=1e-10, atol=1e-10)
        assert_same_state(after.reorder(one), alone, atol=1e-11 if length else 0)
    assert torch.isfinite(y).all()


@pytest.mark.parametrize("options", OPTIONS)
def test_causal_to_the_bit(options: dict[str, Any]) -> None:
    layer, x = make(torch.float32, **options), tokens(30, dtype=torch.float32)
    y, _ = layer(x)
    moved, _ = layer(torch.cat([x[:, :13], 3 * tokens(17, dtype=torch.float32)], 1))
    assert torch.equal(y[:, :13], moved[:, :13])


@pytest.mark.parametrize("options", OPTIONS)
def test_every_parameter_learns(options: dict[str, Any]) -> None:
    layer = make(**options)
    layer(tokens(12))[0].square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_gradcheck() -> None:
    torch.manual_seed(0)
    layer = Mamba3(4, heads=2, state_dim=4, rank=2, conv_kernel=2, chunk_size=4).double()
    x = torch.randn(1, 5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: layer(x, return_state=False)[0], (x,))


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("rank", [1, 2])
def test_bf16_steps_equal_the_bf16_pass(autocast: bool, rank: int) -> None:
    layer = make(torch.float32 if autocast else torch.bfloat16, rank=rank, conv_kernel=4)
    x = tokens(12, dtype=torch.float32 if autocast else torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        whole, end = layer(x)
        state, pieces = None, []
        for piece in x.split(1, dim=1):
            y, state = layer(piece, state)
            pieces.append(y)
    assert whole.dtype == torch.bfloat16
    assert end.ssd.h.dtype == torch.float32
    # A few roundings to 8 bits.
    limit = 0.02 * whole.abs().max().item()
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=limit)


def test_sizes_of_the_echo_paper() -> None:
    for heads in (3, 4):
        layer = Mamba3(96, heads=heads, state_dim=16, gate=False, conv_kernel=4)
        assert layer.head_dim == 192 // heads
        assert layer.in_proj.weight.shape == (192 + 2 * 16 + 3 * heads + 4, 96)


def test_initial_values() -> None:
    layer = Mamba3(32, heads=2, rank=4)
    for parameter in (layer.B_bias, layer.C_bias, layer.D, layer.mimo_z):
        assert parameter.eq(1).all()
    for parameter in (layer.mimo_x, layer.mimo_o):
        assert parameter.eq(1 / 4).all()
    dt = F.softplus(layer.dt_bias)
    assert 0.9e-3 < dt.min() <= dt.max() < 0.1001


@pytest.mark.parametrize("options", OPTIONS)
def test_state_survives_a_dictionary(options: dict[str, Any]) -> None:
    layer = make(torch.float32, **options)
    _, state = layer(tokens(10, dtype=torch.float32))
    assert state.nbytes == layer.init_state(2).nbytes
    assert_same_state(Mamba3State.from_dict(state.to_dict()), state, atol=0)
    empty = state.reset(torch.tensor([True, False]))
    assert_same_state(empty.reorder(torch.tensor([0])), layer.init_state(1), atol=0)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="rope_fraction is"):
        Mamba3(24, heads=6, rope_fraction=1.5)
    with pytest.raises(ValueError, match="rank is 0"):
        Mamba3(24, heads=6, rank=0)
    with pytest.raises(ValueError, match="heads is 7"):
        Mamba3(24, heads=7)
    layer = make()
    with pytest.raises(ValueError, match=r"takes \[batch, time, 24\]"):
        layer(torch.ones(2, 3, 25))
    with pytest.raises(ValueError, match="continues a Mamba3State"):
        layer(tokens(3), layer.init_state(2).ssd)
    with pytest.raises(ValueError, match="state holds"):
        layer(tokens(3), make(rank=2).init_state(2))
