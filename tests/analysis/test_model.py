"""What is read of a model equals what its keys and values say, in every mode of SKA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from echo_lm import EchoConfig, EchoLM
from echo_lm.analysis import model as analysis
from echo_lm.analysis.gradients import effective_rank
from echo_lm.analysis.model import LayerReading, read_layers
from echo_lm.analysis.operator import conditioning, sums, whitened_operator
from echo_lm.analysis.ridge import readout
from echo_lm.model.config import Mamba2Config, SKAConfig

MODES: dict[str, dict[str, Any]] = {
    "exact": {},
    "power": {"filter": "power", "order": 2},
    "chunk": {"causal": "chunk"},
    "relative": {"causal": "chunk", "relative_ridge": True},
    "trace": {"causal": "chunk", "relative_ridge": "trace"},
    "all at once": {"causal": False, "relative_ridge": True},
    "lift": {"lift": 6},
    "convolution": {"conv_kernel": 3},
    "normed keys": {"key_norm": True},
}


def a_model(heads: int = 2, mixers: tuple[str, ...] = ("ska",), **settings: Any) -> EchoLM:
    torch.manual_seed(1)
    ska = SKAConfig(rank=5, chunk_size=8, **settings)
    mamba2 = Mamba2Config(state_dim=8, head_dim=16)
    config: Any = {"mixers": mixers, "vocab_size": 16, "heads": heads, "mlp": "none"}
    model = EchoLM(EchoConfig(dim=16, ska=ska, mamba2=mamba2, **config)).double()
    for mixer in model.mixers():
        torch.nn.init.xavier_uniform_(mixer.out_proj.weight)
    return model


def some_tokens(length: int = 40) -> Tensor:
    return torch.randint(16, (3, length))


def keys_and_values(model: EchoLM, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Of the first block, heads before tokens."""
    block = model.blocks[0]
    _, k, v, _ = block.mixers[0].project(block.mixer_norms[0](model.embedding(tokens)))
    return k.transpose(1, 2).detach(), v.transpose(1, 2).detach()


@pytest.mark.parametrize("mode", MODES)
def test_equals_what_keys_and_values_say(mode: str) -> None:
    model, tokens = a_model(**MODES[mode]), some_tokens()
    (reading,) = read_layers(model, tokens, points=5)
    layer, (k, v) = reading.layer, keys_and_values(model, tokens)
    assert_close(reading.key_norms, k.norm(dim=-1).transpose(1, 2))
    assert reading.counts[-1] == 40
    for i, count in enumerate(reading.counts):
        known = sums(k[:, :, :count], v[:, :, :count])
        ridge: Any = torch.as_tensor(layer.ridge).expand(3, 2)
        if layer.relative_ridge is True:
            ridge = ridge * k[:, :, :count].square().sum(-1).amax(-1)
        elif layer.relative_ridge == "trace":
            ridge = ridge * known.gram.diagonal(dim1=-2, dim2=-1).mean(-1)
        found = conditioning(known.gram, ridge)
        W = readout(known, layer.coefficients.double(), ridge)
        for got, wanted in (
            (reading.ridge, ridge),
            (reading.smallest, found.smallest),
            (reading.condition, found.condition),
            (reading.jacobian_rank, effective_rank(W)),
        ):
            assert_close(got[..., i], wanted, rtol=1e-6, atol=1e-9)
    operator = whitened_operator(known.gram, known.lag, ridge)
    assert_close(reading.operator_norm, torch.linalg.matrix_norm(operator, ord=2))
    assert float(reading.operator_norm.max()) <= 1 + 1e-12
    traces = reading.eigenvalues.sum(-1).real
    assert_close(traces, operator.diagonal(dim1=-2, dim2=-1).sum(-1))


def test_the_jacobian_is_that_of_the_answers() -> None:
    """By autograd through the layer, the last token's own query alone."""
    model, tokens = a_model(heads=1), some_tokens(12)
    (reading,) = read_layers(model, tokens, points=3)
    layer, block = reading.layer, model.blocks[0]
    x = block.mixer_norms[0](model.embedding(tokens)).detach()
    layer.out_proj.weight.data = torch.eye(16, dtype=x.dtype)
    asked = layer.q_proj(x[:, -1:]).detach().requires_grad_()
    before = layer.q_proj(x[:, :-1]).detach()
    hook = layer.q_proj.register_forward_hook(lambda *_: torch.cat([before, asked], 1))
    y = layer(x)[0][:, -1]
    hook.remove()
    slopes = [torch.autograd.grad(y[:, i].sum(), asked, retain_graph=True)[0] for i in range(16)]
    assert_close(effective_rank(torch.cat(slopes, 1)), reading.jacobian_rank[:, 0, -1])


def test_looks_where_queries_see_something() -> None:
    tokens = some_tokens(44)

    def counts(**settings: Any) -> tuple[int, ...]:
        return read_layers(a_model(**settings), tokens, points=4)[0].counts

    assert counts() == (1, 4, 12, 44)
    assert counts(causal="chunk") == (8, 16, 24, 40)
    assert counts(causal=False) == (44,)


def test_a_chunk_that_is_not_full_is_said() -> None:
    (reading,) = read_layers(a_model(causal="chunk"), some_tokens(7))
    assert reading.unread
    assert reading.counts == (7,)
    (reading,) = read_layers(a_model(causal="chunk"), some_tokens(8))
    assert not reading.unread


def same(a: LayerReading, b: LayerReading) -> bool:
    names = ("ridge", "smallest", "condition", "jacobian_rank", "eigenvalues", "key_norms")
    return all(
        torch.allclose(getattr(a, name).abs(), getattr(b, name).abs(), rtol=1e-8, atol=1e-10)
        for name in names
    )


def test_short_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = a_model(mixers=("mamba2", "ska", "ska"), half_life=16.0), some_tokens()
    whole = read_layers(model, tokens, points=2)
    monkeypatch.setattr(analysis, "LONGEST_PIECE", 3)
    parts = read_layers(model, tokens, points=2)
    assert [reading.block for reading in whole] == [1, 2]
    assert all(map(same, whole, parts))


def test_forgetting_shows_in_what_is_held() -> None:
    tokens = some_tokens()
    kept, faded = (
        read_layers(a_model(**settings), tokens, points=2)[0]
        for settings in ({}, {"half_life": 4.0})
    )
    largest = [(one.condition * one.smallest)[..., -1] for one in (kept, faded)]
    assert bool((largest[1] < 0.8 * largest[0]).all())
    assert_close(faded.key_norms, kept.key_norms)


def test_a_silent_layer_holds_the_same() -> None:
    model, tokens = a_model(), some_tokens()
    (voiced,) = read_layers(model, tokens)
    torch.nn.init.zeros_(model.mixers()[0].out_proj.weight)
    (silent,) = read_layers(model, tokens)
    assert silent.silent
    assert same(voiced, silent)


def test_filters_are_those_of_the_layer() -> None:
    (bank,) = read_layers(a_model(heads=4), some_tokens())
    assert bank.shares.argmax(-1).tolist() == [0, 1, 2, 0]
    (power,) = read_layers(a_model(filter="power", order=2), some_tokens())
    assert_close(power.shares, torch.tensor([[0.0, 0, 1]] * 2).double())
    assert_close(power.gain, torch.full((2,), 1.05**2).double())


def test_leaves_the_model_as_it_was() -> None:
    model = a_model().train()
    read_layers(model, some_tokens())
    assert model.training
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_says_what_it_cannot_look_at() -> None:
    with pytest.raises(ValueError, match="The model has no SKA layer"):
        read_layers(a_model(mixers=("mamba2",)), some_tokens())
    with pytest.raises(ValueError, match="points must be at least 1, got 0"):
        read_layers(a_model(), some_tokens(), points=0)
    broken = a_model()
    broken.mixers()[0].k_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="The memory of block 0 is not finite"):
        read_layers(broken, some_tokens())
    assert not any(m._forward_pre_hooks for m in broken.modules())
