"""Finite in, finite out; what is not finite is never hidden; what rounding forces is said aloud."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from echo_lm.ops import debug, ska

from .ska_cases import (
    CAUSAL,
    MODES,
    MODES_AND_FORMS,
    Inputs,
    assert_close,
    assert_identical,
    cast,
    make_inputs,
    rounding,
)

TOKENS = 200
FAST_FORMS = [(mode, form) for mode, form in MODES_AND_FORMS if form != "naive"]

fast_forms = pytest.mark.parametrize(("mode", "form"), FAST_FORMS)
every_form = pytest.mark.parametrize(("mode", "form"), MODES_AND_FORMS)


def few_directions(k: Tensor) -> Tensor:
    return k[..., :3] @ torch.randn(3, k.shape[-1])


HARD_KEYS = {
    "zero": lambda k: torch.zeros_like(k),
    "constant": lambda k: k[:, :1].expand_as(k),
    "constant and huge": lambda k: 1e4 * k[:, :1].expand_as(k),
    "1e-12": lambda k: 1e-12 * k,
    "1e4": lambda k: 1e4 * k,
    "1e6": lambda k: 1e6 * k,
    "32 for ever": lambda k: k[:, :32].repeat(1, 7, 1, 1)[:, :TOKENS],
    "32 for ever, huge": lambda k: 1e4 * k[:, :32].repeat(1, 7, 1, 1)[:, :TOKENS],
    "few directions": few_directions,
    "few directions, huge": lambda k: 1e4 * few_directions(k),
    "one in a hundred huge": lambda k: torch.where(torch.rand(k.shape[1], 1, 1) < 0.01, 1e4 * k, k),
}


def hard_inputs(keys: str, mode: str) -> Inputs:
    """Single precision, and a ridge of 1 or the paper's relative one."""
    inputs = make_inputs(TOKENS, batch=1, rank=24, width=8, dtype=torch.float32)
    ridge = 1e-3 if "relative" in mode else 1.0
    hard = HARD_KEYS[keys](inputs["k"]).contiguous()
    return inputs | {"k": hard, "ridge": torch.full((2,), ridge)}


@pytest.mark.parametrize("keys", HARD_KEYS)
@fast_forms
def test_hard_keys_give_finite_answers(mode: str, form: str, keys: str) -> None:
    y, state = ska(**hard_inputs(keys, mode), **MODES[mode], backend=form, return_state=True)
    assert y.isfinite().all()
    assert all(t.isfinite().all() for t in state.to_dict().values() if isinstance(t, Tensor))


@pytest.mark.parametrize("keys", HARD_KEYS)
@pytest.mark.parametrize("mode", MODES)
def test_hard_keys_give_finite_gradients(mode: str, keys: str) -> None:
    """In the form that trains. The recurrent one overflows beyond |k|^2 / lam = 1e9 or so."""
    leaves = {name: t.requires_grad_() for name, t in hard_inputs(keys, mode).items()}
    y = ska(**leaves, **MODES[mode], backend="chunk")
    for name, grad in zip(leaves, torch.autograd.grad(y.sum(), list(leaves.values())), strict=True):
        assert grad.isfinite().all(), name


@pytest.mark.parametrize("keys", ["zero", "constant", "1e-12", "32 for ever", "few directions"])
@pytest.mark.parametrize("mode", MODES)
def test_hard_but_not_huge_keys_give_the_right_answers(mode: str, keys: str) -> None:
    """A key that comes n times has n |k|^2 in G, hence n times the rounding."""
    inputs = hard_inputs(keys, mode)
    wanted = ska(**cast(inputs, torch.float64), **MODES[mode])
    y = ska(**inputs, **MODES[mode])
    repeats = {"constant": 64, "32 for ever": 7, "few directions": 64}.get(keys, 1)
    assert_close(y, wanted, 16 * repeats * rounding(inputs, torch.float32, mode))


@pytest.mark.parametrize("scale", [0.0, 1e-12, 1.0, 1e6])
@fast_forms
def test_one_token(mode: str, form: str, scale: float) -> None:
    inputs = make_inputs(1, dtype=torch.float32)
    leaves = {name: t.requires_grad_() for name, t in inputs.items()}
    y = ska(**leaves | {"k": scale * leaves["k"]}, **MODES[mode], backend=form)
    assert y.isfinite().all()
    grads = torch.autograd.grad(y.sum(), list(leaves.values()), materialize_grads=True)
    assert all(grad.isfinite().all() for grad in grads)


def test_jitter_is_said_aloud(caplog: pytest.LogCaptureFixture) -> None:
    inputs = hard_inputs("few directions, huge", "chunk")
    ska(**inputs | {"k": 1e3 * inputs["k"]}, causal="chunk")
    (record, *_) = [r for r in caplog.records if r.name == "echo_lm"]
    assert record.levelname == "WARNING"
    assert "not positive definite to rounding" in record.message
    assert "Raise the ridge or look at the keys" in record.message


@fast_forms
def test_ordinary_keys_pass_in_silence(
    mode: str, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    ska(**make_inputs(TOKENS, dtype=torch.float32), **MODES[mode], backend=form)
    assert not [r for r in caplog.records if r.name == "echo_lm"]


def first_token_that_knows(mode: str, token: int, chunk: int) -> int:
    """Where something in a token's key or value is first seen."""
    if MODES[mode]["causal"] is False:
        return 0
    return token if mode.startswith("exact") else -(-(token + 1) // chunk) * chunk


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@every_form
def test_what_is_not_finite_is_never_hidden(mode: str, form: str, bad: float) -> None:
    """In the head it touches, and for ever after; in a value, only that column."""
    token, chunk = 9, 8
    seen = slice(first_token_that_knows(mode, token, chunk), None)
    options = MODES[mode] | {"chunk_size": chunk, "backend": form}
    clean = make_inputs(30, batch=1, dtype=torch.float32)
    for name, touched in (
        ("q", (0, token, 1)),
        ("k", (0, seen, 1)),
        ("v", (0, seen, 1, 2)),
    ):
        inputs = clean | {name: clean[name].clone()}
        inputs[name][0, token, 1, 2] = bad
        y, state = ska(**inputs, **options, return_state=True)
        assert not y[touched].isfinite().any(), name
        assert y[:, :, 0].isfinite().all()
        if name != "q":
            later = ska(**clean, **options, state=state)
            assert not later[0][:, 1, 2].isfinite().any(), name


@pytest.mark.parametrize("form", ["naive", "recurrent"])
@pytest.mark.parametrize("mode", CAUSAL)
def test_tokens_before_a_nan_are_unharmed(mode: str, form: str) -> None:
    inputs = make_inputs(30)
    spoilt = inputs | {"k": inputs["k"].clone()}
    spoilt["k"][:, 20:] = torch.nan
    options = MODES[mode] | {"chunk_size": 8, "backend": form}
    assert torch.equal(ska(**spoilt, **options)[:, :20], ska(**inputs, **options)[:, :20])


@pytest.mark.parametrize("mode", CAUSAL)
def test_in_the_parallel_form_a_nan_spoils_its_chunk_but_no_earlier_one(mode: str) -> None:
    inputs = make_inputs(30)
    spoilt = inputs | {"k": inputs["k"].clone()}
    spoilt["k"][:, 20:] = torch.nan
    options = MODES[mode] | {"chunk_size": 8, "backend": "chunk"}
    assert torch.equal(ska(**spoilt, **options)[:, :16], ska(**inputs, **options)[:, :16])


@pytest.mark.parametrize("name", ["q", "k", "v", "coef", "ridge"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_debug_mode_names_what_is_not_finite(name: str, bad: float) -> None:
    inputs = make_inputs(5)
    inputs[name] = inputs[name].clone()
    inputs[name].view(-1)[-1] = bad
    where = [n - 1 for n in inputs[name].shape]
    state = ska(**make_inputs(3), return_state=True)[1]
    before = state.clone()
    with debug():
        with pytest.raises(ValueError, match=r"must be finite") as caught:
            ska(**inputs, state=state)
        ska(**make_inputs(5), state=state)
    assert f"{name}{where} is {bad}" in str(caught.value)
    assert_identical(state, before)


def test_debug_mode_ends_with_its_block() -> None:
    inputs: dict[str, Any] = make_inputs(5)
    inputs["q"][0, 0, 0, 0] = torch.nan
    with pytest.raises(RuntimeError, match="inside"), debug():
        raise RuntimeError("inside")
    assert ska(**inputs)[0, 0, 0].isnan().all()
