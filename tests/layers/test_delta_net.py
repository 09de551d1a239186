"""DeltaNet continues from any state, keeps rows and times apart, and is a mixer of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from echo_lm.layers import DeltaNet, DeltaNetState, Mamba2
from echo_lm.model import EchoConfig, EchoLM, EchoState
from echo_lm.model.config import DeltaConfig

OPTIONS: list[dict[str, Any]] = [
    {},
    {"heads": 1, "key_dim": 5},
    {"heads": 6, "key_dim": 7, "conv_kernel": 1},
]


def make(dtype: torch.dtype = torch.float64, **options: Any) -> DeltaNet:
    """A layer whose every parameter matters."""
    torch.manual_seed(0)
    layer = DeltaNet(24, **({"heads": 3, "chunk_size": 8} | options))
    with torch.no_grad():
        layer.norm.weight.add_(torch.randn_like(layer.norm.weight), alpha=0.2)
    return layer.to(dtype)


def tokens(count: int, batch: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, count, 24, dtype=dtype)


def assert_same_state(got: Any, expected: Any, atol: float = 1e-12) -> None:
    a, b = got.to_dict(), expected.to_dict()
    assert a.keys() == b.keys()
    for name, value in b.items():
        torch.testing.assert_close(a[name], value, rtol=0, atol=atol)


def written_out(layer: DeltaNet, x: Tensor) -> Tensor:
    """The layer token by token and head by head, from the weights alone."""
    r, p = layer.key_dim, layer.value_dim
    out = []
    for row in x:
        mixed = row @ layer.in_proj.weight.T
        widths = (layer.heads * r, layer.heads * r, layer.heads * p, layer.heads)
        q, k, v, beta = mixed.split(widths, dim=-1)
        taps = layer.conv.weight.split(widths[:3])
        q, k, v = (
            F.silu(
                F.conv1d(
                    F.pad(z.T, (layer.conv.kernel_size - 1, 0)),
                    w.unsqueeze(1),
                    groups=z.shape[1],
                ).T
            )
            for z, w in zip((q, k, v), taps, strict=True)
        )
        heads = []
        for h in range(layer.heads):
            S = x.new_zeros(p, r)
            answers = []
            for t in range(len(row)):
                key, query = (z[t, h * r : (h + 1) * r] for z in (k, q))
                key, query = key / key.norm(), query / query.norm()
                share = beta[t, h].sigmoid()
                S = S + share * torch.outer(v[t, h * p : (h + 1) * p] - S @ key, key)
                answers.append(S @ query)
            y = torch.stack(answers)
            eps = layer.norm.eps
            assert eps is not None
            heads.append(y / (y.square().mean(-1, keepdim=True) + eps).sqrt() * layer.norm.weight)
        out.append(torch.cat(heads, -1) @ layer.out_proj.weight.T)
    return torch.stack(out)


@pytest.mark.parametrize("options", OPTIONS)
def test_equals_the_layer_written_out(options: dict[str, Any]) -> None:
    layer, x = make(**options), tokens(19)
    torch.testing.assert_close(layer(x)[0], written_out(layer, x), rtol=1e-10, atol=1e-10)


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


def test_ragged_rows_equal_each_row_alone() -> None:
    layer, x, lengths = make(), tokens(13, batch=3), torch.tensor([13, 4, 0])
    _, start = layer(tokens(3, batch=3))
    y, end = layer(x, start, lengths=lengths)
    for b, length in enumerate(lengths.tolist()):
        before, after = (state.reorder(torch.tensor([b])) for state in (start, end))
        if length == 0:
            assert_same_state(after, before, atol=0)
            continue
        alone, alone_end = layer(x[b : b + 1, :length], before)
        torch.testing.assert_close(y[b : b + 1, :length], alone, rtol=1e-12, atol=1e-12)
        assert_same_state(after, alone_end)


def test_the_future_does_not_move_the_past_by_one_bit() -> None:
    layer, x = make(torch.float32), tokens(30, dtype=torch.float32)
    y, _ = layer(x)
    for t in (1, 8, 21):
        moved, _ = layer(torch.cat([x[:, :t], 9 * x[:, t:]], 1))
        assert torch.equal(moved[:, :t], y[:, :t])
        assert not torch.equal(moved[:, t], y[:, t])


def test_low_precision_and_silence_stay_finite() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        layer = make(dtype)
        for x in (tokens(20, dtype=dtype), torch.zeros(2, 20, 24, dtype=dtype)):
            x.requires_grad_()
            y, state = layer(x)
            y.float().square().sum().backward()
            assert (y.dtype, state.delta.S.dtype) == (dtype, torch.float32)
            assert x.grad is not None
            assert all(torch.isfinite(v).all() for v in (y, state.delta.S, x.grad))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = make(torch.float32)(tokens(20, dtype=torch.float32))
    assert (y.dtype, state.delta.S.dtype) == (torch.bfloat16, torch.float32)


def test_state_is_of_fixed_size_and_survives_a_dictionary() -> None:
    layer = make(torch.float32, key_dim=5)
    _, state = layer(tokens(30, dtype=torch.float32))
    assert state.nbytes == layer.init_state(2).nbytes == 4 * 2 * (3 * (2 * 15 + 24) + 3 * 8 * 5)
    assert_same_state(DeltaNetState.from_dict(state.to_dict()), state, atol=0)
    assert layer(tokens(1, dtype=torch.float32), return_state=False)[1] is None


@torch.no_grad()
def test_a_model_of_it_reads_on_from_a_file(tmp_path: Path) -> None:
    config = EchoConfig(
        dim=16, mixers=("delta", "ska"), heads=2, vocab_size=31, delta=DeltaConfig(key_dim=6)
    )
    config = EchoConfig.from_dict({**config.to_dict(), "ska": {"rank": 8}})
    model = EchoLM(config).double().eval()
    text = torch.randint(31, (2, 40))
    whole = model(text, return_state=True)
    model.save_pretrained(tmp_path)
    again = EchoLM.from_pretrained(tmp_path, dtype=torch.float64)
    state = again(text[:, :23], return_state=True).state
    state.save(tmp_path / "state.safetensors")
    state = EchoState.load(tmp_path / "state.safetensors")
    rest = again(text[:, 23:], state=state, return_state=True)
    torch.testing.assert_close(rest.logits, whole.logits[:, 23:])
    assert isinstance(rest.state.layers[0], DeltaNetState)
    assert_same_state(rest.state.layers[0], whole.state.layers[0])


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="dim=24 and heads=5"):
        DeltaNet(24, heads=5)
    with pytest.raises(ValueError, match="key_dim is 0"):
        DeltaNet(24, heads=2, key_dim=0)
    layer = make()
    with pytest.raises(ValueError, match=r"takes \[batch, time, 24\]"):
        layer(torch.ones(2, 3, 25))
    with pytest.raises(ValueError, match="continues a DeltaNetState"):
        layer(tokens(3), Mamba2(24, heads=6).init_state(2))
    with pytest.raises(ValueError, match="state"):
        layer(tokens(3), layer.init_state(3))
    with pytest.raises(ValueError, match="lengths"):
        layer(tokens(3), lengths=torch.tensor([1, 4]))
