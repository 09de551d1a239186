"""The forms of the scan are one map, causal, continuable at any point, and hard to break."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.ssd_cases import (
    KINDS,
    Inputs,
    assert_same_state,
    cut,
    make_inputs,
    row,
    some_state,
)
from torch import Tensor

from echo_lm.ops.checks import debug
from echo_lm.ops.ssd import SSDState, ssd
from echo_lm.ops.ssd.restart import running_sum
from echo_lm.ops.ssd.rotation import accumulate

FORMS = ["naive", "chunk", "recurrent"]


def written_out(inputs: Inputs) -> Tensor:
    """Mamba-3's parallel form from a zero state, rotated pairs as complex numbers."""
    x, B, C = (inputs[name].numpy() for name in ("x", "B", "C"))
    if x.ndim == 4:
        x, B, C = (v[:, :, :, None] for v in (x, B, C))
    batch, tokens, heads, _, _ = x.shape
    B, C = (np.repeat(v, heads // v.shape[2], axis=2) for v in (B, C))
    a, gamma = inputs["log_decay"].numpy(), inputs["gamma"].numpy()
    beta = inputs["beta"].numpy() if "beta" in inputs else np.zeros_like(gamma)
    theta = np.zeros((batch, tokens, heads, 0))
    if "angle" in inputs:
        theta = np.cumsum(inputs["angle"].numpy(), axis=1)
    pairs = theta.shape[-1]

    def product(c: Any, b: Any, turned: Any) -> Any:
        """C^r . B^q when B is `turned` further than C."""
        as_complex = [v[:, 0 : 2 * pairs : 2] + 1j * v[:, 1 : 2 * pairs : 2] for v in (c, b)]
        head = (as_complex[0].conj() * np.exp(1j * turned)) @ as_complex[1].T
        return head.real + c[:, 2 * pairs :] @ b[:, 2 * pairs :].T

    y = np.zeros_like(x)
    for b, h, i in np.ndindex(batch, heads, tokens):
        for j in range(i + 1):
            decay = np.exp(a[b, j + 1 : i + 1, h].sum())
            weight = gamma[b, j, h] + (beta[b, j + 1, h] if j < i else 0)
            score = product(C[b, i, h], B[b, j, h], theta[b, j, h] - theta[b, i, h])
            y[b, i, h] += decay * weight * score @ x[b, j, h]
    return torch.from_numpy(y).view(inputs["x"].shape)


@pytest.mark.parametrize("kind", KINDS)
def test_naive_equals_the_sum_written_out(kind: str) -> None:
    inputs = make_inputs(9, **KINDS[kind])
    torch.testing.assert_close(ssd(**inputs, backend="naive"), written_out(inputs))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize(("tokens", "chunk_size"), [(1, 64), (7, 64), (63, 6), (61, 2)])
def test_forms_agree_in_values_gradients_and_state(
    kind: str, form: str, tokens: int, chunk_size: int
) -> None:
    # 61 tokens in chunks of 2 need the tree of chunks.
    inputs = make_inputs(tokens, **KINDS[kind])
    start = some_state(make_inputs(3, seed=1, **KINDS[kind]))

    def run(backend: Any) -> tuple[Tensor, SSDState, dict[str, Tensor]]:
        leaves = {name: value.clone().requires_grad_() for name, value in inputs.items()}
        state = start.map(lambda t: t.clone().requires_grad_())
        y, end = ssd(
            **leaves, state=state, return_state=True, backend=backend, chunk_size=chunk_size
        )
        sum(
            (v * torch.linspace(-1, 2, v.numel(), dtype=v.dtype).view(v.shape)).sum()
            for v in (y, *end.to_dict().values())
        ).backward()
        return y, end, {n: t.grad for n, t in (leaves | state.to_dict()).items()}

    y, end, gradients = run(form)
    true_y, true_end, true_gradients = run("naive")
    torch.testing.assert_close(y, true_y, rtol=1e-11, atol=1e-11)
    assert_same_state(end, true_end, atol=1e-11)
    for name, gradient in true_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("kind", ["mamba2 in groups", "mimo"])
def test_gradcheck(form: Any, kind: str) -> None:
    inputs = make_inputs(5, batch=1, heads=2, head_dim=2, state_dim=4, **KINDS[kind])
    names = list(inputs)

    def run(*values: Tensor) -> tuple[Tensor, Tensor]:
        given = dict(zip(names, values, strict=True))
        y, end = ssd(**given, backend=form, chunk_size=4, return_state=True)
        return y, end.h

    assert torch.autograd.gradcheck(run, tuple(v.requires_grad_() for v in inputs.values()))


@settings(max_examples=30, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 29), max_size=5, unique=True).map(sorted),
    kind=st.sampled_from(list(KINDS)),
    forms=st.lists(st.sampled_from([*FORMS, "auto"]), min_size=6, max_size=6),
    chunk_size=st.integers(1, 9),
)
def test_any_split_in_any_form_equals_one_pass(
    cuts: list[int], kind: str, forms: list[Any], chunk_size: int
) -> None:
    inputs = make_inputs(30, **KINDS[kind])
    whole, end = ssd(**inputs, backend="naive", return_state=True)
    state, pieces = None, []
    for start, stop, form in zip([0, *cuts], [*cuts, 30], forms, strict=False):
        y, state = ssd(
            **cut(inputs, start, stop),
            state=state,
            return_state=True,
            backend=form,
            chunk_size=chunk_size,
        )
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-11, atol=1e-11)
    assert state is not None
    assert_same_state(state, end, atol=1e-11)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_ragged_rows_equal_each_row_alone(kind: str, form: Any) -> None:
    lengths = torch.tensor([0, 11, 1, 6])
    inputs = make_inputs(11, batch=4, **KINDS[kind])
    start = some_state(inputs)
    poisoned = {name: value.clone() for name, value in inputs.items()}
    for b, length in enumerate(lengths):
        for value in poisoned.values():
            value[b, length:] = math.nan
    y, end = ssd(
        **poisoned, state=start, lengths=lengths, return_state=True, backend=form, chunk_size=4
    )
    for b, length in enumerate(lengths.tolist()):
        before = start.reorder(torch.tensor([b]))
        after = end.reorder(torch.tensor([b]))
        assert not y[b, length:].any()
        if length == 0:
            assert_same_state(after, before, atol=0)
            continue
        alone, alone_end = ssd(
            **row(inputs, b, length), state=before, return_state=True, backend=form
        )
        torch.testing.assert_close(y[b : b + 1, :length], alone, rtol=1e-12, atol=1e-12)
        assert_same_state(after, alone_end)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_future_does_not_move_the_past_by_one_bit(kind: str, form: Any) -> None:
    inputs = make_inputs(40, dtype=torch.float32, **KINDS[kind])
    other = make_inputs(40, dtype=torch.float32, seed=1, **KINDS[kind])
    y = ssd(**inputs, backend=form, chunk_size=8)
    for t in (1, 8, 21, 39):
        changed = {n: torch.cat([v[:, :t], 9 * other[n][:, t:]], 1) for n, v in inputs.items()}
        moved = ssd(**changed, backend=form, chunk_size=8)
        assert torch.equal(moved[:, :t], y[:, :t])
        assert not torch.equal(moved[:, t], y[:, t])


@pytest.mark.parametrize("form", FORMS)
def test_hard_inputs_stay_finite(form: Any) -> None:
    hard = {
        "zeros": lambda v, name: torch.zeros_like(v),
        "huge decay": lambda v, name: torch.full_like(v, -1e4) if name == "log_decay" else v,
        "tiny steps": lambda v, name: v * 1e-30 if name in ("log_decay", "gamma", "beta") else v,
    }
    for change in hard.values():
        plain = make_inputs(21, dtype=torch.float32, **KINDS["mimo"])
        inputs = {n: change(v, n).requires_grad_() for n, v in plain.items()}
        y, end = ssd(**inputs, backend=form, chunk_size=12, return_state=True)
        (y.square().sum() + end.h.square().sum()).backward()
        for value in (y, end.h, *(v.grad for v in inputs.values())):
            assert torch.isfinite(value).all()


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_fp32_keeps_its_precision_behind_a_huge_decay(form: Any) -> None:
    inputs = make_inputs(64, **KINDS["mamba3"])
    inputs["log_decay"][:, ::20] = -1e4
    narrow = {name: value.float() for name, value in inputs.items()}
    truth = ssd(**{n: v.double() for n, v in narrow.items()}, backend="naive")
    y = ssd(**narrow, backend=form)
    assert (y - truth).abs().max() < 2e-6 * truth.abs().max()


def test_half_precision_goes_in_and_out_and_sums_are_fp32() -> None:
    inputs = make_inputs(20, dtype=torch.bfloat16, **KINDS["mamba3"])
    y, end = ssd(**inputs, return_state=True)
    wide = {name: value.float() for name, value in inputs.items()}
    true_y, true_end = ssd(**wide, return_state=True)
    assert y.dtype == torch.bfloat16
    assert end.h.dtype == end.x.dtype == torch.float32
    assert torch.equal(y, true_y.bfloat16())
    assert torch.equal(end.h, true_end.h)


def test_autocast_stays_outside() -> None:
    inputs = make_inputs(20, dtype=torch.float32, **KINDS["mimo"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = ssd(**inputs)
    assert torch.equal(y, ssd(**inputs))


def test_angle_holds_over_a_million_tokens() -> None:
    steps = torch.rand(1, 1_000_000, 1, 2) * 0.3 - 0.1
    angle = torch.zeros(1, 1, 2)
    for piece in steps.split(9_973, dim=1):
        angle = accumulate(piece, angle)[:, -1]
    exact = [math.fsum(column) % (2 * math.pi) for column in steps[0, :, 0].T.tolist()]
    assert torch.allclose(angle.flatten(), torch.tensor(exact, dtype=torch.float64), atol=1e-9)


def test_compiles_into_one_graph() -> None:
    inputs = make_inputs(37, **KINDS["mimo"])
    lengths = torch.tensor([37, 20])

    def run(lengths: Tensor, **inputs: Tensor) -> tuple[Tensor, SSDState]:
        return ssd(**inputs, lengths=lengths, return_state=True, chunk_size=6)

    y, end = torch.compile(run, backend="aot_eager", fullgraph=True)(lengths, **inputs)
    true_y, true_end = run(lengths, **inputs)
    torch.testing.assert_close(y, true_y)
    assert_same_state(end, true_end)


def test_memory_grows_linearly() -> None:
    def saved_bytes(tokens: int) -> int:
        saved: dict[int, int] = {}

        def keep(t: Tensor) -> Tensor:
            saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        inputs = make_inputs(tokens, batch=1, dtype=torch.float32, **KINDS["mimo"])
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            y = ssd(**{n: v.requires_grad_() for n, v in inputs.items()}, chunk_size=12)
        assert y.requires_grad
        return sum(saved.values())

    assert saved_bytes(2048) < 2.1 * saved_bytes(1024)


@pytest.mark.parametrize("form", FORMS)
def test_a_state_owns_no_more_than_it_holds(form: Any) -> None:
    inputs = make_inputs(50, **KINDS["mamba3"])
    _, end = ssd(**inputs, backend=form, return_state=True)
    for value in end.to_dict().values():
        assert value.untyped_storage().nbytes() == value.nbytes
    assert end.nbytes == 2 * 4 * 8 * (5 * 7 + 5 + 7 + 3)


def test_a_call_changes_nothing_it_was_given() -> None:
    inputs = make_inputs(9, **KINDS["mamba3"])
    state = some_state(inputs)
    kept = {n: v.clone() for n, v in (inputs | state.to_dict()).items()}
    for form in FORMS:
        ssd(**inputs, state=state, lengths=torch.tensor([4, 0]), backend=form)  # type: ignore[arg-type]
    assert all(torch.equal(v, kept[n]) for n, v in (inputs | state.to_dict()).items())


BAD = {
    "no tokens": ({"x": torch.ones(2, 0, 4, 5)}, "no axis empty"),
    "x of two axes": ({"x": torch.ones(2, 9)}, r"x has shape \(2, 9\)"),
    "integers": ({"x": torch.ones(2, 9, 4, 5, dtype=torch.int64)}, "floating point"),
    "B of other length": ({"B": torch.ones(2, 8, 4, 7)}, "B has shape"),
    "B with a rank axis": ({"B": torch.ones(2, 9, 4, 2, 7)}, "B has shape"),
    "C of other size": ({"C": torch.ones(2, 9, 4, 6)}, "C has shape"),
    "groups": ({"B": torch.ones(2, 9, 3, 7), "C": torch.ones(2, 9, 3, 7)}, "3 groups"),
    "gamma": ({"gamma": torch.ones(2, 9)}, "gamma has shape"),
    "beta": ({"beta": torch.ones(2, 9, 3)}, "beta has shape"),
    "angle": ({"angle": torch.ones(2, 9, 4)}, "angle has shape"),
    "too many angles": ({"angle": torch.ones(2, 9, 4, 4)}, "turns 4 pairs"),
    "lengths of other rows": ({"lengths": torch.tensor([1])}, "lengths has shape"),
    "lengths too long": ({"lengths": torch.tensor([1, 10])}, "between 0 and the 9 tokens"),
    "backend": ({"backend": "fast"}, "one of auto, naive, chunk, recurrent"),
    "chunk_size": ({"chunk_size": 0}, "at least one token"),
    "state of other sizes": ({"state": SSDState(torch.ones(2, 4, 5, 8))}, "state holds"),
    "state of a plain scan": ({"state": SSDState(torch.ones(2, 4, 5, 7))}, "state holds"),
    "no state": ({"state": torch.ones(2)}, "continues an SSDState"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_argument_is_named_in_one_sentence(case: str) -> None:
    change, message = BAD[case]
    inputs = make_inputs(9, **KINDS["mamba3"])
    with pytest.raises(ValueError, match=message) as error:
        ssd(**(inputs | change))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", make_inputs(1, **KINDS["mamba3"]))
def test_debug_mode_finds_nan_but_not_in_padding(name: str) -> None:
    inputs = make_inputs(9, **KINDS["mamba3"])
    inputs[name][1, 5] = math.nan
    with debug():
        ssd(**inputs, lengths=torch.tensor([9, 5]))
        with pytest.raises(ValueError, match=f"{name} must be finite"):
            ssd(**inputs)


STARTS = [1, 4, 5, 6, 40, 75, 76]
"""Where row 0 begins anew; row 1 does so at its first token, and once more."""


def starts_among(tokens: int) -> Tensor:
    starts = torch.zeros(2, tokens, dtype=torch.bool)
    starts[0, [t for t in STARTS if t < tokens]] = True
    starts[1, [0, tokens // 3]] = True
    return starts


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "chunk_size"), [(1, 64), (9, 4), (80, 2), (80, 32)])
def test_a_start_is_the_start_of_a_row(form: Any, kind: str, tokens: int, chunk_size: int) -> None:
    """Also where more chunks are chained than by one product."""
    inputs, starts = make_inputs(tokens, **KINDS[kind]), starts_among(tokens)
    state = some_state(make_inputs(3, seed=1, **KINDS[kind]))
    how: dict[str, Any] = dict(backend=form, chunk_size=chunk_size, return_state=True)
    y, end = ssd(**inputs, state=state, starts=starts, **how)
    for b in range(2):
        bounds = sorted({0, *starts[b].nonzero().flatten().tolist(), tokens})
        alone = state.reorder(torch.tensor([b]))
        for first, stop in itertools.pairwise(bounds):
            mine = {name: value[b : b + 1, first:stop] for name, value in inputs.items()}
            own = None if starts[b, first] else alone
            wanted, left = ssd(**mine, state=own, **{**how, "backend": "naive"})
            torch.testing.assert_close(y[b : b + 1, first:stop], wanted, rtol=1e-11, atol=1e-11)
        assert_same_state(end.reorder(torch.tensor([b])), left, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_a_start_in_the_padding_starts_nothing(kind: str) -> None:
    inputs, lengths = make_inputs(6, **KINDS[kind]), torch.tensor([3, 6])
    starts = torch.zeros(2, 6, dtype=torch.bool)
    _, wanted = ssd(**inputs, lengths=lengths, return_state=True)
    starts[0, 4] = True
    _, state = ssd(**inputs, lengths=lengths, starts=starts, return_state=True)
    assert_same_state(state, wanted, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_stop_at_a_start(kind: str) -> None:
    """In the chunk form as in the recurrence, and those across one are 0."""
    inputs, starts = make_inputs(40, **KINDS[kind]), starts_among(40)

    def gradients(form: Any) -> Inputs:
        leaves = {name: value.clone().requires_grad_() for name, value in inputs.items()}
        y = ssd(**leaves, starts=starts, backend=form, chunk_size=2)
        (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
        return {name: leaf.grad for name, leaf in leaves.items()}

    got, wanted = gradients("chunk"), gradients("naive")
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-9, atol=1e-9)
    assert not got["log_decay"][starts].any()
    assert "beta" not in got or not got["beta"][starts].any()


@pytest.mark.parametrize("tokens", [1, 64, 65, 300, 5000])
def test_running_sums_begin_anew(tokens: int) -> None:
    """At every start, whatever was before: huge numbers leave no rounding behind."""
    v, starts = torch.randn(2, tokens, 3).double(), torch.rand(2, tokens) < 0.03
    v[:, : tokens // 2] *= 1e15
    sums = running_sum(v, starts)
    for b in range(2):
        bounds = sorted({0, *starts[b].nonzero().flatten().tolist(), tokens})
        parts = [v[b, first:stop].cumsum(0) for first, stop in itertools.pairwise(bounds)]
        scale = [part.abs().cummax(0).values for part in parts]
        assert (sums[b] - torch.cat(parts)).abs().le(1e-12 * torch.cat(scale)).all()
    other = v.clone()
    past = torch.arange(tokens) < bounds[-2]
    other[1, past] = torch.randn_like(other[1, past])
    assert torch.equal(running_sum(other, starts)[1, ~past], sums[1, ~past])
    torch.testing.assert_close(running_sum(v, None), v.cumsum(1))
