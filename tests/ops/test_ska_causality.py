"""The future never moves the past. Bit for bit, unless a failed factorisation has to be retried."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echo_lm.ops import ska

from .ska_cases import CAUSAL, MODES, MODES_AND_FORMS, Inputs, cast, make_inputs, tokens

CHUNK = 16
TOKENS = 4 * CHUNK - 5

causal_forms = pytest.mark.parametrize(
    ("mode", "form"), [pair for pair in MODES_AND_FORMS if pair[0] in CAUSAL]
)
a_cut = pytest.mark.parametrize("cut", [1, CHUNK - 3, CHUNK, 2 * CHUNK + 5])


def with_another_future(inputs: Inputs, cut: int, scale: float) -> Inputs:
    """The same tokens up to `cut`, others of size `scale` from there on."""
    changed = dict(inputs)
    for name in ("q", "k", "v"):
        changed[name] = inputs[name].clone()
        changed[name][:, cut:] = scale * torch.randn_like(inputs[name][:, cut:])
    return changed


def options_of(mode: str, form: str) -> dict[str, Any]:
    return MODES[mode] | {"chunk_size": CHUNK, "backend": form}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 1e2, 1e6, 1e15])
@a_cut
@causal_forms
def test_the_future_does_not_move_the_past(
    mode: str, form: str, cut: int, scale: float, dtype: torch.dtype
) -> None:
    """Also when its keys are so large beside the ridge that a factorisation fails."""
    inputs = cast(make_inputs(TOKENS, rank=6), dtype)
    if form == "naive":
        scale = min(scale, 1e2)  # its plain inverse refuses what is singular to rounding
    changed = with_another_future(inputs, cut, scale)
    y, other = (ska(**x, **options_of(mode, form)) for x in (inputs, changed))
    assert torch.equal(other[:, :cut], y[:, :cut])
    if scale == 1.0:
        seen_from = cut if mode.startswith("exact") else -(-(cut + 1) // CHUNK) * CHUNK
        assert not torch.equal(other[:, seen_from:], y[:, seen_from:])


@causal_forms
def test_chunk_mode_does_not_see_its_own_chunk(mode: str, form: str) -> None:
    """And exact mode does."""
    inputs = make_inputs(TOKENS)
    changed = inputs | {"v": inputs["v"].clone()}
    changed["v"][:, CHUNK] += 1
    y, other = (ska(**x, **options_of(mode, form)) for x in (inputs, changed))
    own = slice(CHUNK, 2 * CHUNK)
    assert torch.equal(other[:, own], y[:, own]) == (not mode.startswith("exact"))
    assert not torch.equal(other[:, 2 * CHUNK :], y[:, 2 * CHUNK :])


@a_cut
@causal_forms
def test_gradients_flow_back_only(mode: str, form: str, cut: int) -> None:
    """A loss on the first answers has no gradient at later tokens: exactly zero."""
    leaves = {n: t.requires_grad_() for n, t in make_inputs(TOKENS).items()}
    y = ska(**leaves, **options_of(mode, form))
    grads = torch.autograd.grad(y[:, :cut].sum(), [leaves[n] for n in ("q", "k", "v")])
    for grad in grads:
        assert not grad[:, cut:].any()


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("mode", CAUSAL)
def test_a_longer_call_begins_like_a_shorter_one(mode: str, form: str) -> None:
    """Up to rounding: the library multiplies matrices of other sizes in another order."""
    inputs = cast(make_inputs(TOKENS), torch.float32)
    short = ska(**tokens(inputs, 0, CHUNK + 3), **options_of(mode, form))
    torch.testing.assert_close(ska(**inputs, **options_of(mode, form))[:, : CHUNK + 3], short)


@causal_forms
def test_rows_and_heads_do_not_meet(mode: str, form: str) -> None:
    """Bit for bit, when one of them is huge."""
    inputs = cast(make_inputs(TOKENS, batch=3, heads=3), torch.float32)
    changed = {name: t.clone() for name, t in inputs.items()}
    changed["k"][1, :, 2] *= 1e2 if form == "naive" else 1e5
    y, other = (ska(**x, **options_of(mode, form)) for x in (inputs, changed))
    touched = torch.zeros(3, TOKENS, 3, dtype=torch.bool)
    touched[1, :, 2] = True
    assert torch.equal(other[~touched], y[~touched])
