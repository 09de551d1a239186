"""Sums that fade at chunk boundaries: against weights written out, and what they do to merging.

That all forms agree, in any split and under masks, is tested with all other modes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from echo_lm.analysis.bounds import contraction
from echo_lm.analysis.operator import whitened_operator
from echo_lm.analysis.perturbation import norm
from echo_lm.ops import SKAState, ska

from ..analysis.draws import KINDS, draw_keys
from .ska_cases import Inputs, assert_close, assert_same_state, gradients, make_inputs, tokens

CHUNK = 4
TIGHT = 1e-11
FORMS = ["naive", "chunk", "recurrent"]
FADING: dict[str, dict[str, Any]] = {
    "exact": {"causal": "exact", "chunk_size": CHUNK},
    "chunk": {"causal": "chunk", "chunk_size": CHUNK},
    "chunk relative": {"causal": "chunk", "chunk_size": CHUNK, "relative_ridge": True},
}

every_form = pytest.mark.parametrize("form", FORMS)
every_mode = pytest.mark.parametrize("mode", FADING)


def fading_inputs(count: int, **sizes: Any) -> Inputs:
    inputs = make_inputs(count, **sizes)
    heads = inputs["ridge"].shape[0]
    return inputs | {"decay": torch.linspace(0.4, 0.9, heads, dtype=torch.float64)}


@every_mode
@every_form
def test_to_fade_is_to_scale_keys_and_values(mode: str, form: str) -> None:
    """Read c chunks ago, they count as if multiplied by the root of decay^c, whatever they meet."""
    inputs, options = fading_inputs(15, batch=1, heads=1), FADING[mode]
    q, k, v = (inputs[name][0, :, 0] for name in ("q", "k", "v"))
    y = ska(**inputs, **options, backend=form)[0, :, 0]
    for t in range(15):
        seen = t + 1 if mode == "exact" else t // CHUNK * CHUNK
        age = t // CHUNK - torch.arange(seen) // CHUNK
        root = inputs["decay"] ** (age / 2)
        keys, values = root[:, None] * k[:seen], root[:, None] * v[:seen]
        energy = torch.cat([keys.new_zeros(1), keys.square().sum(-1)]).max()
        lam = inputs["ridge"] * (energy.clamp_min(1e-12) if "relative" in mode else 1)
        X = torch.linalg.inv(keys.T @ keys + lam * torch.eye(6))
        term = values.T @ keys @ X
        W = torch.zeros_like(term)
        for c in inputs["coef"][0]:
            W += c * term
            term = term @ (keys[1:].T @ keys[:-1]) @ X
        assert_close(y[t] + 1, W @ q[t] + 1, TIGHT)


@every_mode
@every_form
@pytest.mark.parametrize("continued", [False, True])
def test_gradients_of_the_decay_and_all_else(mode: str, form: str, continued: bool) -> None:
    inputs, options = fading_inputs(23), FADING[mode] | {"mask": torch.rand(2, 23) < 0.8}
    state = None
    if continued:
        earlier = {"lengths": torch.tensor([7, 8]), "return_state": True}
        state = ska(**fading_inputs(9, seed=1), **FADING[mode], **earlier)[1]
    wanted = gradients(inputs, state, **options, backend="naive")
    assert bool(wanted["decay"].all())
    for name, grad in gradients(inputs, state, **options, backend=form).items():
        assert_close(grad, wanted[name], TIGHT, f"gradients of {name}")


@every_mode
def test_gradcheck_of_the_decay(mode: str) -> None:
    inputs = fading_inputs(7, batch=1, rank=3, width=2)
    decay = inputs.pop("decay").requires_grad_()

    def call(decay: Tensor) -> Tensor:
        return ska(**inputs, decay=decay, **FADING[mode] | {"chunk_size": 2}, backend="naive")

    torch.autograd.gradcheck(call, decay)


@every_mode
@every_form
def test_a_decay_of_one_keeps_everything(mode: str, form: str) -> None:
    inputs = make_inputs(23)
    wanted = ska(**inputs, **FADING[mode], backend=form)
    assert_close(ska(**inputs, **FADING[mode], decay=1.0, backend=form), wanted, 1e-13)


@every_form
def test_an_overwritten_binding_wins_over_its_predecessor(form: str) -> None:
    """One key with two values: undimmed sums answer their mean, fading ones the later."""
    key, old, new = torch.eye(1, 6)[0], torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    k = key.expand(1, 8, 1, 6)
    v = torch.cat([old.expand(4, 2), new.expand(4, 2)]).view(1, 8, 1, 2)
    how: dict[str, Any] = {"coef": torch.ones(1, 1), "ridge": 1e-4, "chunk_size": 4}
    mean = ska(k, k, v, **how, backend=form)[0, -1, 0]
    later = ska(k, k, v, **how, decay=0.01, backend=form)[0, -1, 0]
    torch.testing.assert_close(mean, (old + new) / 2, atol=1e-3, rtol=0)
    torch.testing.assert_close(later, new, atol=0.02, rtol=0)


@every_mode
def test_a_thousand_chunks_neither_overflow_nor_vanish(mode: str) -> None:
    """0.01^1000 is nothing in any precision; the sums of the last chunks are not."""
    inputs = {name: x.float() for name, x in make_inputs(1000 * CHUNK, batch=1).items()}
    leaves = inputs | {"decay": torch.tensor([0.01, 1.0])}
    for name, grad in gradients(leaves, None, **FADING[mode], backend="chunk").items():
        assert bool(grad.isfinite().all()), name
        assert bool(grad.any()), name


@given(
    kind=st.sampled_from(sorted(KINDS)),
    count=st.integers(1, 30),
    rank=st.integers(1, 9),
    ridge=st.sampled_from([1e-6, 1e-3, 1.0]),
    decay=st.sampled_from([1e-3, 0.3, 0.99]),
    cut=st.integers(0, 7),
    masked=st.booleans(),
    form=st.sampled_from(FORMS),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60, deadline=None)
def test_the_whitened_lag_operator_never_expands(
    kind: str,
    count: int,
    rank: int,
    ridge: float,
    decay: float,
    cut: int,
    masked: bool,
    form: str,
    seed: int,
) -> None:
    """sigma_max(A_w) <= 1 wherever reading stops, and after merging whole chunks.

    Without forgetting: tests/analysis/test_our_bounds.py.
    """
    k = draw_keys(kind, count, rank, seed, batch=(2, 2)).transpose(1, 2)
    inputs = {"q": k, "k": k, "v": k, "coef": torch.ones(2, 1, dtype=k.dtype), "ridge": ridge}
    options = FADING["chunk"] | {"decay": decay, "backend": form, "return_state": True}
    mask = torch.rand(2, count) < 0.7 if masked else torch.ones(2, count, dtype=torch.bool)
    lost = 64 * torch.finfo(k.dtype).eps * (1 + float(k.square().sum((1, 3)).max()) / ridge)
    states = [ska(**inputs, **options, mask=mask)[1]]
    seam, end = cut * CHUNK, count // CHUNK * CHUNK
    if 0 < seam < end:
        halves = [
            ska(**tokens(inputs, a, b), **options, mask=mask[:, a:b])[1]
            for a, b in ((0, seam), (seam, end))
        ]
        states.append(halves[0].merge(halves[1], torch.full((2,), decay, dtype=k.dtype)))
    for state in states:
        sigma = norm(whitened_operator(state.gram, state.lag, ridge))
        assert bool((sigma <= contraction(state.gram, ridge) + lost).all())


def test_merging_knows_empty_rows() -> None:
    """Rows may be empty on either side, and more can be merged onto what was merged."""
    decay = torch.tensor([0.3, 0.8], dtype=torch.float64)
    options = FADING["exact"] | {"decay": decay, "return_state": True}
    lengths = [torch.tensor(n) for n in ([0, 8, 4], [4, 0, 8], [8, 4, 0])]
    parts = [make_inputs(8, batch=3, seed=seed) for seed in range(3)]
    a, b, c = (ska(**p, **options, lengths=n)[1] for p, n in zip(parts, lengths, strict=True))
    left, right = a.merge(b, decay).merge(c, decay), a.merge(b.merge(c, decay), decay)
    assert_same_state(left, right, 1e-14)
    state: SKAState | None = None
    for part, real in zip(parts, lengths, strict=True):
        _, state = ska(**part, **options, lengths=real, state=state)
    assert state is not None
    for name in ("gram", "lag", "value", "first_key", "last_key", "key_energy"):
        assert_close(getattr(left, name), getattr(state, name), 1e-14, name)


def test_states_that_never_faded_merge_without_decay() -> None:
    state = ska(**make_inputs(8), return_state=True)[1]
    with pytest.raises(ValueError, match="neither was made with one; merge them without"):
        state.merge(state, torch.ones(2))
