"""Continuing from a state in any split, by any form, is the one pass; states merge and travel."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

from echo_lm.ops import SKAState, ska

from .ska_cases import (
    CAUSAL,
    MODES,
    MODES_AND_FORMS,
    assert_close,
    assert_identical,
    assert_same_state,
    forms,
    joined,
    make_inputs,
    row,
    tokens,
)

CHUNK = 8
TIGHT = 1e-11

every_mode = pytest.mark.parametrize("mode", MODES)
every_form = pytest.mark.parametrize(("mode", "form"), MODES_AND_FORMS)
causal_modes = pytest.mark.parametrize("mode", CAUSAL)
causal_forms = pytest.mark.parametrize(
    ("mode", "form"), [pair for pair in MODES_AND_FORMS if pair[0] in CAUSAL]
)


def options_of(mode: str) -> dict[str, Any]:
    return MODES[mode] | {"chunk_size": CHUNK, "return_state": True}


def state_after(count: int, mode: str, *, batch: int = 2, seed: int = 1) -> SKAState:
    return ska(**make_inputs(count, batch=batch, seed=seed), **options_of(mode))[1]


@causal_modes
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_split_in_any_forms_is_one_pass(mode: str, data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 40))
    cuts = data.draw(st.lists(st.integers(1, total), max_size=6).map(sorted))
    before = data.draw(st.sampled_from([0, 3, CHUNK, 13]))
    inputs = make_inputs(total, order=data.draw(st.integers(0, 3)), seed=total)
    mask = torch.rand(2, total) < 0.8
    start = state_after(before, mode) if before else None
    wanted, final = ska(**inputs, **options_of(mode), mask=mask, state=start, backend="naive")
    state, answers = start, []
    for a, b in zip([0, *cuts], [*cuts, total], strict=True):
        if a < b:
            form = data.draw(st.sampled_from([*forms(mode), "auto"]))
            y, state = ska(
                **tokens(inputs, a, b),
                **options_of(mode),
                mask=mask[:, a:b],
                state=state,
                backend=form,
            )
            answers.append(y)
    assert state is not None
    assert_close(torch.cat(answers, dim=1), wanted, TIGHT)
    assert_same_state(state, final, TIGHT)


@causal_modes
def test_prefill_then_steps_is_one_pass(mode: str) -> None:
    inputs = make_inputs(37)
    wanted, final = ska(**inputs, **options_of(mode))
    y, state = ska(**tokens(inputs, 0, 19), **options_of(mode))
    answers = [y]
    for t in range(19, 37):
        y, state = ska(**tokens(inputs, t, t + 1), **options_of(mode), state=state)
        answers.append(y)
    assert_close(torch.cat(answers, dim=1), wanted, TIGHT)
    assert_same_state(state, final, TIGHT)


@every_form
def test_rows_of_different_lengths_and_histories(mode: str, form: str) -> None:
    """Each row of three padded calls equals that row alone; padding may hold anything."""
    calls = [make_inputs(length, batch=4, seed=seed) for seed, length in enumerate((20, 20, 1))]
    lengths = torch.tensor([[0, 5, 16, 20], [20, 0, 3, 11], [1, 1, 0, 1]])
    state: SKAState | None = None
    alone: list[SKAState | None] = [None] * 4
    for inputs, real in zip(calls, lengths, strict=True):
        padded = dict(inputs)
        for name in ("q", "k", "v"):
            padded[name] = inputs[name].clone()
            for b, n in enumerate(real):
                padded[name][b, n:] = torch.nan
        y, state = ska(**padded, **options_of(mode), lengths=real, state=state, backend=form)
        for b, n in enumerate(real.tolist()):
            assert not y[b, n:].any()
            if n:
                wanted, alone[b] = ska(
                    **tokens(row(inputs, b), 0, n),
                    **options_of(mode),
                    state=alone[b],
                    backend="naive",
                )
                assert_close(y[b : b + 1, :n], wanted, TIGHT)
    assert state is not None
    for b, wanted_state in enumerate(alone):
        assert wanted_state is not None
        assert_same_state(state.reorder(torch.tensor([b])), wanted_state, TIGHT)


@pytest.mark.parametrize("count", [CHUNK + 5, 2 * CHUNK])
@every_form
def test_a_call_without_tokens_changes_nothing(mode: str, form: str, count: int) -> None:
    state = state_after(count, mode)
    y, after = ska(
        **make_inputs(4),
        **options_of(mode),
        lengths=torch.tensor([0, 0]),
        state=state,
        backend=form,
    )
    assert not y.any()
    assert_same_state(after, state, 1e-15)


@every_form
@pytest.mark.parametrize("continued", [False, True])
def test_packed_sequences_equal_each_alone(mode: str, form: str, continued: bool) -> None:
    bounds = [0, 5, 5, 23, 24]
    inputs = make_inputs(24, batch=1)
    mask = torch.rand(1, 24) < 0.7
    start = state_after(13, mode, batch=4) if continued else None
    y, state = ska(
        **inputs,
        **options_of(mode),
        mask=mask,
        cu_seqlens=torch.tensor(bounds),
        state=start,
        backend=form,
    )
    assert y.shape == inputs["v"].shape
    for n, (a, b) in enumerate(pairwise(bounds)):
        one = torch.tensor([n])
        own = None if start is None else start.reorder(one)
        call = tokens(inputs, a, max(b, a + 1))
        wanted, final = ska(
            **call,
            **options_of(mode),
            mask=mask[:, a : max(b, a + 1)],
            lengths=torch.tensor([b - a]),
            state=own,
            backend="naive",
        )
        assert_close(y[:, a:b], wanted[:, : b - a], TIGHT)
        assert_same_state(state.reorder(one), final, TIGHT)


@every_form
def test_gradients_of_packed_sequences(mode: str, form: str) -> None:
    bounds = [0, 9, 9, 23]
    inputs = {n: t.requires_grad_() for n, t in make_inputs(23, batch=1).items()}
    options = MODES[mode] | {"chunk_size": CHUNK, "backend": form}
    packed = ska(**inputs, **options, cu_seqlens=torch.tensor(bounds))
    parts = [ska(**tokens(inputs, a, b), **options) for a, b in ((0, 9), (9, 23))]
    weights = torch.randn_like(packed)
    got = torch.autograd.grad(packed, list(inputs.values()), weights)
    wanted = torch.autograd.grad(torch.cat(parts, dim=1), list(inputs.values()), weights)
    for name, a, b in zip(inputs, got, wanted, strict=True):
        assert_close(a, b, TIGHT, f"gradients of {name}")


@pytest.mark.parametrize("form", ["naive", "chunk", "recurrent"])
@pytest.mark.parametrize("prefix", [13, 16])
def test_exact_mode_continues_a_prefix(form: str, prefix: int) -> None:
    """Statistics are the same sums however they were gathered."""
    inputs = make_inputs(30)
    mask = torch.rand(2, 30) < 0.7
    wanted, final = ska(**inputs, **options_of("exact"), mask=mask, backend="naive")
    _, state = ska(**tokens(inputs, 0, prefix), **options_of("full"), mask=mask[:, :prefix])
    assert state.inverse is None
    y, state = ska(
        **tokens(inputs, prefix, 30),
        **options_of("exact"),
        mask=mask[:, prefix:],
        state=state,
        backend=form,
    )
    assert_close(y, wanted[:, prefix:], TIGHT)
    assert_same_state(state, final, TIGHT)


@pytest.mark.parametrize("form", ["naive", "chunk", "recurrent"])
@pytest.mark.parametrize("prefix", [13, 16])
def test_chunk_mode_continues_a_prefix(form: str, prefix: int) -> None:
    """Up to the next chunk boundary the whole prefix answers; from there on, chunks as ever."""
    inputs = make_inputs(30)
    options = options_of("chunk relative")
    state = ska(**tokens(inputs, 0, prefix), **options_of("full relative"))[1]
    y, _ = ska(**tokens(inputs, prefix, 30), **options, state=state, backend=form)
    boundary = -(-prefix // CHUNK) * CHUNK
    if boundary > prefix:
        rest = tokens(inputs, prefix, boundary)
        unseen = torch.zeros(2, boundary - prefix, dtype=torch.bool)
        from_prefix, _ = ska(**rest, **options_of("full relative"), mask=unseen, state=state)
        assert_close(y[:, : boundary - prefix], from_prefix, TIGHT)
    one_pass = ska(**inputs, **options, backend="naive")[0]
    assert_close(y[:, boundary - prefix :], one_pass[:, boundary:], TIGHT)


@pytest.mark.parametrize("masked_at_seam", [None, "left", "right"])
@pytest.mark.parametrize("cut", [0, 1, 7, 16, 24])
@every_mode
def test_merged_halves_are_the_whole(mode: str, cut: int, masked_at_seam: str | None) -> None:
    inputs = make_inputs(24)
    mask = torch.ones(2, 24, dtype=torch.bool)
    if masked_at_seam and 0 < cut < 24:
        mask[:, cut - 1 if masked_at_seam == "left" else cut] = False
    halves = []
    for a, b in ((0, cut), (cut, 24)):
        call = tokens(inputs, a, b) if a < b else tokens(inputs, 0, 1)
        halves.append(
            ska(
                **call,
                **options_of(mode),
                mask=mask[:, a:b] if a < b else None,
                lengths=torch.tensor([b - a] * 2),
            )[1]
        )
    whole = ska(**inputs, **options_of(mode), mask=mask)[1]
    share = MODES[mode].get("decay")
    decay = None if share is None else torch.full((2,), share, dtype=torch.float64)
    if share and cut % CHUNK:
        with pytest.raises(ValueError, match="chunk of 8 ends"):
            halves[0].merge(halves[1], decay)
        return
    merged = halves[0].merge(halves[1], decay)
    assert_same_state(replace(merged, chunk_size=None), bare(whole), 1e-13)
    more = make_inputs(9, seed=3)
    y, _ = ska(**more, **options_of(mode), state=merged)
    wanted, _ = ska(**more, **options_of(mode), state=whole)
    assert_close(y, wanted, TIGHT)


def bare(state: SKAState) -> SKAState:
    """Without what is derived from the sums."""
    return replace(state, inverse=None, inverse_ridge=None, readout=None, chunk_size=None)


def test_merging_is_associative_and_knows_empty_rows() -> None:
    """Rows of a batch may be empty on either side."""
    parts = [make_inputs(6, batch=3, seed=seed) for seed in range(3)]
    lengths = [torch.tensor(n) for n in ([0, 6, 2], [6, 0, 3], [1, 0, 6])]
    a, b, c = (
        ska(**p, **options_of("exact"), lengths=n)[1] for p, n in zip(parts, lengths, strict=True)
    )
    assert_same_state(a.merge(b).merge(c), a.merge(b.merge(c)), 1e-14)
    for index in range(3):
        own = [
            tokens(row(p, index), 0, int(n[index]))
            for p, n in zip(parts, lengths, strict=True)
            if n[index]
        ]
        wanted = ska(**joined(own), **options_of("exact"))[1]
        merged = a.merge(b).merge(c).reorder(torch.tensor([index]))
        assert_same_state(merged, bare(wanted), 1e-13)


def test_half_read_chunks_do_not_merge() -> None:
    left, right = state_after(CHUNK + 3, "chunk"), state_after(CHUNK, "chunk")
    with pytest.raises(ValueError, match=r"whole chunks of 8; got counts \[19, 19\]"):
        left.merge(right)
    merged = left.merge(state_after(CHUNK - 3, "chunk", seed=2))
    assert merged.count.tolist() == [2 * CHUNK, 2 * CHUNK]


def test_states_of_other_shapes_do_not_merge() -> None:
    other = SKAState.init(2, 2, 7, 5, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"gram \(2, 2, 6, 6\).*gram \(2, 2, 7, 7\)"):
        state_after(3, "exact").merge(other)


@causal_forms
def test_reordered_rows_go_their_own_way(mode: str, form: str) -> None:
    """As in beam search: rows are dropped and doubled, then read different tokens."""
    rows = torch.tensor([1, 1, 0])
    state = state_after(11, mode).reorder(rows)
    inputs = make_inputs(7, batch=3, seed=2)
    y, new = ska(**inputs, **options_of(mode), state=state, backend=form)
    for b, origin in enumerate(rows.tolist()):
        alone = state_after(11, mode).reorder(torch.tensor([origin]))
        wanted, final = ska(**row(inputs, b), **options_of(mode), state=alone, backend="naive")
        assert_close(y[b : b + 1], wanted, TIGHT)
        assert_same_state(new.reorder(torch.tensor([b])), final, TIGHT)


@causal_forms
def test_reset_rows_start_afresh(mode: str, form: str) -> None:
    state = state_after(11, mode).reset(torch.tensor([True, False]))
    inputs = make_inputs(10, seed=2)
    y, new = ska(**inputs, **options_of(mode), state=state, backend=form)
    fresh, after_fresh = ska(**row(inputs, 0), **options_of(mode), backend="naive")
    assert_close(y[:1], fresh, TIGHT)
    assert_same_state(new.reorder(torch.tensor([0])), after_fresh, TIGHT)
    kept, _ = ska(**inputs, **options_of(mode), state=state_after(11, mode), backend="naive")
    assert_close(y[1:], kept[1:], TIGHT)


@causal_forms
def test_a_state_reset_as_a_whole_is_a_new_one(mode: str, form: str) -> None:
    inputs = make_inputs(10, seed=2)
    state = state_after(11, mode).reset()
    assert not any(t.any() for t in state.to_dict().values() if isinstance(t, Tensor))
    y, new = ska(**inputs, **options_of(mode), state=state, backend=form)
    wanted, final = ska(**inputs, **options_of(mode), backend="naive")
    assert_close(y, wanted, TIGHT)
    assert_same_state(new, final, TIGHT)


@every_form
def test_the_state_given_is_left_as_it_was(mode: str, form: str) -> None:
    state = state_after(11, mode)
    before = state.clone()
    ska(**make_inputs(10, seed=2), **options_of(mode), state=state, backend=form)
    assert_identical(state, before)


def test_a_clone_shares_no_memory() -> None:
    state = state_after(11, "exact")
    clone = state.clone()
    for tensor in clone.to_dict().values():
        tensor.zero_()
    assert_identical(state, state_after(11, "exact"))


@every_mode
def test_round_trip_through_a_dictionary_and_safetensors(mode: str) -> None:
    state = state_after(11, mode)
    entries = state.to_dict()
    assert_identical(SKAState.from_dict(entries), state)
    stored = load(save({name: t for name, t in entries.items() if isinstance(t, Tensor)}))
    plain = {name: value for name, value in entries.items() if name not in stored}
    restored = SKAState.from_dict(stored | plain)
    assert_identical(restored, state)
    inputs = make_inputs(9, seed=2)
    y, _ = ska(**inputs, **options_of(mode), state=restored)
    assert torch.equal(y, ska(**inputs, **options_of(mode), state=state)[0])


@pytest.mark.parametrize(("heads", "rank", "width"), [(2, 6, 5), (3, 24, 32), (1, 48, 64)])
@every_form
def test_bytes_are_what_the_formula_says(
    mode: str, form: str, heads: int, rank: int, width: int
) -> None:
    """Whatever the number of tokens, and whichever form read them."""
    for count in (1, 21):
        inputs = make_inputs(
            count, batch=3, heads=heads, rank=rank, width=width, dtype=torch.float32
        )
        _, state = ska(**inputs, **options_of(mode), backend=form)
        causal = MODES[mode]["causal"]
        assert state.nbytes == 3 * SKAState.bytes_per_row(heads, rank, width, causal)


@pytest.mark.parametrize("form", ["naive", "chunk", "recurrent"])
def test_a_state_moves_between_modes(form: str) -> None:
    """What is cached for one mode does not disturb another."""
    inputs = make_inputs(21)
    state: SKAState | None = None
    for mode, start in (("exact", 0), ("chunk", 7), ("exact", 14)):
        call = tokens(inputs, start, start + 7)
        y, state = ska(**call, **options_of(mode), state=state, backend=form)
    wanted, final = ska(**inputs, **options_of("exact"), backend="naive")
    assert state is not None
    assert_close(y, wanted[:, 14:], TIGHT)
    assert_same_state(state, final, TIGHT)


@every_form
def test_a_state_owns_its_memory(mode: str, form: str) -> None:
    """It keeps neither the prompt alive nor the sums of every chunk, and no one else writes it."""
    inputs = make_inputs(50, dtype=torch.float32)
    _, state = ska(**inputs, **options_of(mode), backend=form)
    tensors = [t for t in state.to_dict().values() if isinstance(t, Tensor)]
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in tensors)
    before = state.clone()
    for tensor in inputs.values():
        tensor.zero_()
    assert_identical(state, before)


@pytest.mark.parametrize("form", ["naive", "chunk", "recurrent"])
def test_a_ridge_changed_in_place_makes_the_inverse_anew(form: str) -> None:
    """As an optimiser changes a parameter."""
    inputs, more = make_inputs(13), make_inputs(3, seed=2)
    _, state = ska(**inputs, **options_of("exact"), backend=form)
    more["ridge"] = inputs["ridge"].mul_(3)
    y, _ = ska(**more, **options_of("exact"), state=state, backend="recurrent")
    wanted, _ = ska(**more, **options_of("exact"), state=state, backend="naive")
    assert_close(y, wanted, TIGHT)


def test_two_hundred_thousand_steps_do_not_drift() -> None:
    """fp32, u = 2^-24.

    Sums: each addition rounds by up to u |sum|, either way, and the sum grows evenly, so that n of
    them leave about sqrt(n) u |sum| / 3. Squares crowd near zero, where they are rounded down more
    often than up: six times that was seen, and twenty are allowed.
    Inverse: made anew every 64 tokens; in between each step rounds X by u, as it does G, hence at
    most 64 * 2 u, and the solve adds r u cond(G + lam I).
    """
    n, piece, u = 200_000, 10_000, 2.0**-24
    coef = torch.tensor([[0.5, 1.0]])
    random = torch.Generator().manual_seed(0)
    state: SKAState | None = None
    exact: dict[str, Tensor] = {}
    last = torch.zeros(1, 8, dtype=torch.float64)
    with torch.no_grad():
        for _ in range(n // piece):
            q, k, v = (torch.randn(1, piece, 1, 8, generator=random) for _ in range(3))
            _, state = ska(
                q, k, v, coef=coef, ridge=1.0, state=state, return_state=True, backend="recurrent"
            )
            keys, values = k[0, :, 0].double(), v[0, :, 0].double()
            before = torch.cat([last, keys[:-1]])
            last = keys[-1:]
            for name, left, right in (
                ("gram", keys, keys),
                ("lag", keys, before),
                ("value", values, keys),
            ):
                exact[name] = exact.get(name, torch.zeros(8, 8, dtype=torch.float64))
                exact[name] += left.T @ right
    assert state is not None
    assert state.inverse is not None
    assert state.count.tolist() == [n]
    largest = float(exact["gram"].abs().max())
    for name, wanted in exact.items():
        drift = float((getattr(state, name)[0, 0].double() - wanted).abs().max())
        assert drift < 20 * n**0.5 * u * largest / 3, name
    G = state.gram[0, 0].double() + torch.eye(8, dtype=torch.float64)
    allowed = (2 * 64 + 8 * float(torch.linalg.cond(G))) * u
    assert_close(state.inverse[0, 0], G.inverse(), allowed, "cached inverse")
