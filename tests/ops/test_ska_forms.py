"""Naive, chunk and recurrent are one map: answers, every gradient, and the final state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from echo_lm.ops import SKAState, ska

from .ska_cases import (
    CAUSAL,
    MODES,
    MODES_AND_FORMS,
    Inputs,
    assert_close,
    assert_same_state,
    cast,
    forms,
    gradients,
    make_inputs,
    random_loss,
    rounding,
    tokens,
)

Size = dict[str, int]

SIZES: list[Size] = [
    {"tokens": 1, "rank": 24, "width": 32, "order": 3, "chunk_size": 64},
    {"tokens": 63, "rank": 48, "width": 60, "order": 1, "chunk_size": 16},
    {"tokens": 63, "rank": 50, "width": 64, "order": 2, "chunk_size": 20},
    {"tokens": 500, "rank": 24, "width": 60, "order": 2, "chunk_size": 48},
    {"tokens": 500, "rank": 56, "width": 32, "order": 0, "chunk_size": 64},
]

every_mode = pytest.mark.parametrize("mode", MODES)
every_size = pytest.mark.parametrize("size", SIZES, ids="T{tokens} r{rank} P{width}".format_map)
short_sizes = pytest.mark.parametrize("size", SIZES[:3], ids="T{tokens} r{rank}".format_map)


def case(size: Size, mode: str, seed: int = 0) -> tuple[Inputs, dict[str, Any]]:
    """Inputs and options of a size in a mode."""
    made = {name: value for name, value in size.items() if name != "chunk_size"}
    ridge = 0.05 if "relative" in mode else 2.0
    inputs = make_inputs(
        **made, batch=1, heads=1 if size["tokens"] > 100 else 2, ridge=ridge, seed=seed
    )
    return inputs, MODES[mode] | {"chunk_size": size["chunk_size"]}


def begun(size: Size, mode: str) -> SKAState:
    """A state that has read 37 tokens; in chunk mode it is inside a chunk."""
    inputs, options = case(size | {"tokens": 37}, mode, seed=1)
    return ska(**inputs, **options, return_state=True)[1]


@every_mode
@every_size
def test_forms_agree(size: Size, mode: str) -> None:
    inputs, options = case(size, mode)
    wanted, final = ska(**inputs, **options, backend="naive", return_state=True)
    allowed = 32 * rounding(inputs, torch.float64, mode)
    for form in forms(mode)[1:]:
        y, state = ska(**inputs, **options, backend=form, return_state=True)
        assert_close(y, wanted, allowed, form)
        assert_same_state(state, final, allowed)


@every_mode
@every_size
def test_single_precision_is_as_exact_as_its_rounding(size: Size, mode: str) -> None:
    inputs, options = case(size, mode)
    wanted, final = ska(**inputs, **options, backend="chunk", return_state=True)
    allowed = 16 * rounding(inputs, torch.float32, mode)
    for form in forms(mode):
        single = cast(inputs, torch.float32)
        y, state = ska(**single, **options, backend=form, return_state=True)
        assert y.dtype == state.gram.dtype == torch.float32
        assert_close(y, wanted, allowed, form)
        assert_same_state(state, final, allowed)


@pytest.mark.parametrize("from_state", [False, True], ids=["fresh", "continued"])
@every_mode
@short_sizes
def test_gradients_agree(size: Size, mode: str, from_state: bool) -> None:
    """Those of the initial state's sums too, whatever the state has cached."""
    inputs, options = case(size, mode)
    state = begun(size, mode) if from_state else None
    wanted = gradients(inputs, state, **options, backend="naive")
    if from_state:
        assert all(wanted[name].any() for name in ("gram", "lag", "value", "last_key"))
    for form in forms(mode)[1:]:
        got = gradients(inputs, state, **options, backend=form)
        for name, grad in got.items():
            assert_close(grad, wanted[name], 1e-11, f"{form}: gradients of {name}")


@every_mode
@short_sizes
def test_single_precision_gradients(size: Size, mode: str) -> None:
    inputs, options = case(size, mode)
    wanted = gradients(inputs, None, **options, backend="naive")
    allowed = 64 * rounding(inputs, torch.float32, mode)
    for form in forms(mode)[1:]:
        for name, grad in gradients(cast(inputs, torch.float32), None, **options).items():
            assert_close(grad, wanted[name], allowed, f"{form}: gradients of {name}")


@pytest.mark.parametrize("mode", ["exact", "chunk"])
def test_key_gradients_stay_exact_when_keys_repeat(mode: str) -> None:
    """-X (dX) X would square |k|^2 / lam here: sixty to a hundred times the error."""
    inputs = make_inputs(512, batch=1, heads=1, rank=48, width=16, order=1, ridge=0.1)
    inputs["k"] = inputs["k"][:, :32].repeat(1, 16, 1, 1)
    inputs["q"] = inputs["k"].roll(1, 1)
    weights = torch.randn_like(inputs["v"])

    def key_gradient(dtype: torch.dtype) -> Tensor:
        call = cast(inputs, dtype)
        keys = call["k"].requires_grad_()
        y = ska(**call, **MODES[mode], backend="chunk")
        return torch.autograd.grad(y, keys, weights.to(dtype))[0]

    allowed = 32 * rounding(inputs, torch.float32)
    assert_close(key_gradient(torch.float32), key_gradient(torch.float64), allowed)


@pytest.mark.parametrize("forms_of_calls", ["chunk recurrent", "recurrent chunk", "naive chunk"])
@pytest.mark.parametrize("mode", CAUSAL)
def test_gradients_pass_through_a_state(mode: str, forms_of_calls: str) -> None:
    """Two calls give the gradients of one, whichever form serves each."""
    inputs = make_inputs(23, order=1)
    options = MODES[mode] | {"chunk_size": 6}
    wanted = gradients(inputs, None, **options)
    leaves = {name: t.clone().requires_grad_() for name, t in inputs.items()}
    state: SKAState | None = None
    answers = []
    for form, (start, stop) in zip(forms_of_calls.split(), [(0, 9), (9, 23)], strict=True):
        y, state = ska(
            **tokens(leaves, start, stop),
            **options,
            backend=form,
            state=state,
            return_state=True,
        )
        answers.append(y)
    assert state is not None
    loss = random_loss(torch.cat(answers, dim=1), state)
    for name, grad in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
        assert_close(grad, wanted[name], 1e-11, f"gradients of {name}")


@pytest.mark.parametrize(("mode", "form"), MODES_AND_FORMS)
def test_a_detached_state_does_not_hide_the_gradient_of_the_ridge(mode: str, form: str) -> None:
    inputs = make_inputs(7, order=1)
    options = MODES[mode] | {"chunk_size": 4}
    earlier = make_inputs(9, order=1, seed=1)  # not at a boundary: the inverse is still cached
    state = ska(**earlier, **options, return_state=True)[1].detach()
    wanted = gradients(inputs, state, **options, backend="naive")["ridge"]
    leaf = inputs["ridge"].clone().requires_grad_()
    y, new = ska(
        **inputs | {"ridge": leaf},
        **options,
        state=state,
        backend=form,
        return_state=True,
    )
    assert_close(torch.autograd.grad(random_loss(y, new), leaf)[0], wanted, 1e-11)


@pytest.mark.parametrize(("mode", "form"), MODES_AND_FORMS)
def test_masks_and_states_in_every_form(mode: str, form: str) -> None:
    """A masked token is one with key and value zero, whatever it holds."""
    inputs = make_inputs(29, order=2)
    options = MODES[mode] | {"chunk_size": 8, "return_state": True}
    state = ska(**make_inputs(5, seed=1), **options)[1]
    mask = torch.rand(2, 29) < 0.6
    kept = mask[:, :, None, None]
    zeroed = inputs | {name: torch.where(kept, inputs[name], 0.0) for name in ("k", "v")}
    wanted, final = ska(**zeroed, **options, state=state, backend="naive")
    nans = inputs | {name: torch.where(kept, inputs[name], torch.nan) for name in ("k", "v")}
    y, new = ska(**nans, **options, state=state, mask=mask, backend=form)
    assert_close(y, wanted, 1e-12)
    assert_same_state(new, final, 1e-12)


@pytest.mark.parametrize("mode", ["exact", "chunk relative", "full"])
def test_gradcheck(mode: str) -> None:
    inputs = make_inputs(5, batch=1, heads=2, rank=3, width=2, order=2)
    leaves = [tensor.requires_grad_() for tensor in inputs.values()]

    def call(*leaves: Tensor) -> Tensor:
        named = dict(zip(inputs, leaves, strict=True))
        return ska(**named, **MODES[mode], chunk_size=2, backend="chunk")

    torch.autograd.gradcheck(call, leaves)


@pytest.mark.parametrize("mode", ["exact", "chunk relative", "full"])
def test_compiled_equals_eager(mode: str) -> None:
    inputs = make_inputs(21, batch=2, heads=2, rank=5, width=3)
    options = MODES[mode] | {"chunk_size": 8}

    def call(inputs: Inputs) -> Tensor:
        return ska(**inputs, **options)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=False)
    leaves = {name: t.requires_grad_() for name, t in inputs.items()}
    y, wanted = compiled(leaves), call(leaves)
    assert_close(y, wanted, 1e-13)
    weights = torch.randn_like(y)
    got = torch.autograd.grad(y, list(leaves.values()), weights)
    grads = torch.autograd.grad(wanted, list(leaves.values()), weights)
    for name, a, b in zip(leaves, got, grads, strict=True):
        assert_close(a, b, 1e-12, f"gradients of {name}")


@pytest.mark.parametrize(("mode", "form"), MODES_AND_FORMS)
def test_inputs_need_not_be_contiguous(mode: str, form: str) -> None:
    inputs = make_inputs(13)
    strided = {name: t.transpose(0, -1).contiguous().transpose(0, -1) for name, t in inputs.items()}
    strided["v"] = inputs["v"][:, :, :, :1].expand_as(inputs["v"])
    assert not any(strided[name].is_contiguous() for name in ("q", "k", "v", "coef"))
    plain = {name: t.contiguous() for name, t in strided.items()}
    options = MODES[mode] | {"chunk_size": 4, "backend": form}
    assert_close(ska(**strided, **options), ska(**plain, **options), 1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("mode", "form"), MODES_AND_FORMS)
def test_half_inputs_are_computed_in_single(mode: str, form: str, dtype: torch.dtype) -> None:
    """And autocast has no say inside."""
    inputs = make_inputs(40, rank=8, dtype=torch.float32)
    half = inputs | {name: inputs[name].to(dtype) for name in ("q", "k", "v")}
    options = MODES[mode] | {"chunk_size": 16, "backend": form, "return_state": True}
    wanted, final = ska(**cast(half, torch.float32), **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = ska(**half, **options)
    assert y.dtype == dtype
    assert torch.equal(y, wanted.to(dtype))
    assert_same_state(state, final, 0.0)


def test_ridge_may_be_a_number_or_a_scalar() -> None:
    inputs = make_inputs(9)
    wanted = ska(**inputs | {"ridge": torch.full((2,), 0.5, dtype=torch.float64)})
    for ridge in (0.5, torch.tensor(0.5)):
        assert torch.equal(ska(**inputs | {"ridge": ridge}), wanted)


def test_auto_serves_every_mode_and_length() -> None:
    for mode, options in MODES.items():
        for length in (1, 2, 9):
            inputs = make_inputs(length)
            wanted = ska(**inputs, **options, backend="naive")
            assert_close(ska(**inputs, **options), wanted, 1e-12, mode)
