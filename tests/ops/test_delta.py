"""The forms of the delta rule are one map, causal, continuable at any point, and hard to break."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from echo_lm.ops.checks import debug
from echo_lm.ops.delta import DeltaState, delta_rule

Inputs = dict[str, Tensor]

FORMS = ["naive", "chunk", "recurrent"]


def make_inputs(
    tokens: int,
    *,
    batch: int = 2,
    heads: int = 3,
    value_dim: int = 5,
    key_dim: int = 4,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Inputs:
    """Keys and queries of length 1, more of them than there are directions."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, tokens, heads, *shape, generator=random, dtype=dtype)

    return {
        "q": F.normalize(normal(key_dim), dim=-1),
        "k": F.normalize(normal(key_dim), dim=-1),
        "v": normal(value_dim),
        "beta": normal().sigmoid(),
    }


def some_state(inputs: Inputs) -> DeltaState:
    """A state in which something was read before."""
    earlier = {name: value.flip(1)[:, :3] for name, value in inputs.items()}
    return delta_rule(**earlier, backend="naive", return_state=True)[1]


def assert_same_state(got: DeltaState, expected: DeltaState, atol: float = 1e-12) -> None:
    torch.testing.assert_close(got.S, expected.S, rtol=0, atol=atol)


def test_naive_is_a_gradient_step_on_the_regression_of_each_token() -> None:
    """S_t = S - beta dL/dS with L = |S k - v|^2 / 2, by autograd."""
    inputs = make_inputs(7)
    S = torch.zeros(2, 3, 5, 4, dtype=torch.float64)
    y = delta_rule(**inputs, backend="naive")
    for t in range(7):
        q, k, v, beta = (inputs[name][:, t] for name in ("q", "k", "v", "beta"))
        S.requires_grad_()
        wrong = torch.einsum("bhpr,bhr->bhp", S, k) - v
        (slope,) = torch.autograd.grad(wrong.square().sum() / 2, S)
        S = (S - beta[:, :, None, None] * slope).detach()
        torch.testing.assert_close(y[:, t], torch.einsum("bhpr,bhr->bhp", S, q))


@pytest.mark.parametrize("form", FORMS)
def test_a_new_value_takes_the_place_of_the_old_one(form: Any) -> None:
    """With beta = 1, whatever was read between; a key orthogonal to all others keeps its value."""
    inputs = make_inputs(20)
    inputs["k"][..., 3] = 0
    inputs["k"] = F.normalize(inputs["k"], dim=-1)
    inputs["k"][:, 2] = torch.tensor([0.0, 0, 0, 1])
    inputs["beta"].fill_(1)
    _, end = delta_rule(**inputs, backend=form, chunk_size=6, return_state=True)
    for t in (2, 19):
        recalled = torch.einsum("bhpr,bhr->bhp", end.S, inputs["k"][:, t])
        torch.testing.assert_close(recalled, inputs["v"][:, t])


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize(("tokens", "chunk_size"), [(1, 64), (7, 64), (63, 6), (61, 2), (64, 16)])
def test_forms_agree_in_values_gradients_and_state(form: str, tokens: int, chunk_size: int) -> None:
    inputs = make_inputs(tokens)
    start = some_state(make_inputs(3, seed=1))

    def run(backend: Any) -> tuple[Tensor, DeltaState, Inputs]:
        leaves = {name: value.clone().requires_grad_() for name, value in inputs.items()}
        state = start.map(lambda t: t.clone().requires_grad_())
        y, end = delta_rule(
            **leaves, state=state, return_state=True, backend=backend, chunk_size=chunk_size
        )
        sum(
            (v * torch.linspace(-1, 2, v.numel(), dtype=v.dtype).view(v.shape)).sum()
            for v in (y, end.S)
        ).backward()
        return y, end, {n: t.grad for n, t in (leaves | state.to_dict()).items()}

    y, end, gradients = run(form)
    true_y, true_end, true_gradients = run("naive")
    torch.testing.assert_close(y, true_y, rtol=1e-11, atol=1e-11)
    assert_same_state(end, true_end, atol=1e-11)
    for name, gradient in true_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_gradcheck(form: Any) -> None:
    inputs = make_inputs(5, batch=1, heads=2, value_dim=2, key_dim=3)

    def run(*values: Tensor) -> tuple[Tensor, Tensor]:
        given = dict(zip(inputs, values, strict=True))
        y, end = delta_rule(**given, backend=form, chunk_size=3, return_state=True)
        return y, end.S

    assert torch.autograd.gradcheck(run, tuple(v.requires_grad_() for v in inputs.values()))


@settings(max_examples=30, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 29), max_size=5, unique=True).map(sorted),
    forms=st.lists(st.sampled_from([*FORMS, "auto"]), min_size=6, max_size=6),
    chunk_size=st.integers(1, 9),
)
def test_any_split_in_any_form_equals_one_pass(
    cuts: list[int], forms: list[Any], chunk_size: int
) -> None:
    inputs = make_inputs(30)
    whole, end = delta_rule(**inputs, backend="naive", return_state=True)
    state, pieces = None, []
    for start, stop, form in zip([0, *cuts], [*cuts, 30], forms, strict=False):
        y, state = delta_rule(
            **{name: value[:, start:stop] for name, value in inputs.items()},
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
def test_ragged_rows_equal_each_row_alone(form: Any) -> None:
    lengths = torch.tensor([0, 11, 1, 6])
    inputs = make_inputs(11, batch=4)
    start = some_state(inputs)
    poisoned = {name: value.clone() for name, value in inputs.items()}
    for b, length in enumerate(lengths):
        for value in poisoned.values():
            value[b, length:] = math.nan
    y, end = delta_rule(
        **poisoned, state=start, lengths=lengths, return_state=True, backend=form, chunk_size=4
    )
    for b, length in enumerate(lengths.tolist()):
        before, after = (state.reorder(torch.tensor([b])) for state in (start, end))
        assert not y[b, length:].any()
        if length == 0:
            assert_same_state(after, before, atol=0)
            continue
        row = {name: value[b : b + 1, :length] for name, value in inputs.items()}
        alone, alone_end = delta_rule(**row, state=before, return_state=True, backend=form)
        torch.testing.assert_close(y[b : b + 1, :length], alone, rtol=1e-12, atol=1e-12)
        assert_same_state(after, alone_end)


@pytest.mark.parametrize("form", FORMS)
def test_the_future_does_not_move_the_past_by_one_bit(form: Any) -> None:
    inputs = make_inputs(40, dtype=torch.float32)
    other = make_inputs(40, dtype=torch.float32, seed=1)
    y = delta_rule(**inputs, backend=form, chunk_size=8)
    for t in (1, 8, 21, 39):
        changed = {n: torch.cat([v[:, :t], 9 * other[n][:, t:]], 1) for n, v in inputs.items()}
        moved = delta_rule(**changed, backend=form, chunk_size=8)
        assert torch.equal(moved[:, :t], y[:, :t])
        assert not torch.equal(moved[:, t], y[:, t])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("keys", ["random", "one key for ever", "zeros"])
def test_fp32_keeps_its_precision_over_a_long_text(form: Any, keys: str) -> None:
    """Every factor has a norm of at most 1: errors add up and do not grow, and beta makes what is
    old, with its error, fade."""
    inputs = make_inputs(1500, batch=1, heads=1, key_dim=8, dtype=torch.float32)
    if keys != "random":
        inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"]) * float(keys != "zeros")
    truth = delta_rule(**{n: v.double() for n, v in inputs.items()}, backend="naive")
    y = delta_rule(**inputs, backend=form)
    assert torch.isfinite(y).all()
    scale = float(truth.abs().max())
    assert float((y - truth).abs().max()) <= 32 * torch.finfo(torch.float32).eps * scale


def test_half_precision_goes_in_and_out_and_sums_are_fp32() -> None:
    inputs = make_inputs(20, dtype=torch.bfloat16)
    y, end = delta_rule(**inputs, return_state=True)
    true_y, true_end = delta_rule(**{n: v.float() for n, v in inputs.items()}, return_state=True)
    assert (y.dtype, end.S.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(y, true_y.bfloat16())
    assert torch.equal(end.S, true_end.S)


def test_autocast_stays_outside() -> None:
    inputs = make_inputs(20, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = delta_rule(**inputs)
    assert torch.equal(y, delta_rule(**inputs))


def test_compiles_into_one_graph() -> None:
    inputs = make_inputs(37)
    compiled = torch.compile(delta_rule, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(**inputs), delta_rule(**inputs))


def test_a_call_changes_nothing_it_was_given() -> None:
    inputs = make_inputs(9)
    state = some_state(inputs)
    kept = {n: v.clone() for n, v in (inputs | state.to_dict()).items()}
    for form in FORMS:
        delta_rule(**inputs, state=state, lengths=torch.tensor([4, 0]), backend=form)  # type: ignore[call-overload]
    assert all(torch.equal(v, kept[n]) for n, v in (inputs | state.to_dict()).items())


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"v": torch.ones(2, 0, 3, 5)}, "no axis empty"),
    "v of two axes": ({"v": torch.ones(2, 9)}, r"v has shape \(2, 9\)"),
    "integers": ({"v": torch.ones(2, 9, 3, 5, dtype=torch.int64)}, "floating point"),
    "k of other length": ({"k": torch.ones(2, 8, 3, 4)}, "k has shape"),
    "k without width": ({"k": torch.ones(2, 9, 3, 0)}, "k has shape"),
    "q of other width": ({"q": torch.ones(2, 9, 3, 5)}, "they must be equal"),
    "beta of other heads": ({"beta": torch.ones(2, 9, 2)}, "one number for each token and head"),
    "lengths of other rows": ({"lengths": torch.tensor([1])}, "lengths has shape"),
    "lengths too long": ({"lengths": torch.tensor([1, 10])}, "between 0 and the 9 tokens"),
    "backend": ({"backend": "fast"}, "one of auto, naive, chunk, recurrent"),
    "chunk_size": ({"chunk_size": 0}, "at least one token"),
    "state of other sizes": ({"state": DeltaState(torch.ones(2, 3, 4, 5))}, "S of shape"),
    "no state": ({"state": torch.ones(2)}, "continues a DeltaState"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_argument_is_named_in_one_sentence(case: str) -> None:
    change, message = BAD[case]
    with pytest.raises(ValueError, match=message) as error:
        delta_rule(**(make_inputs(9) | change))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["q", "k", "v", "beta"])
def test_debug_mode_finds_nan_but_not_in_padding(name: str) -> None:
    inputs = make_inputs(9)
    inputs[name][1, 5] = math.nan
    with debug():
        delta_rule(**inputs, lengths=torch.tensor([9, 5]))
        with pytest.raises(ValueError, match=f"{name} must be finite"):
            delta_rule(**inputs)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("tokens", "chunk_size"), [(1, 64), (9, 4), (40, 2), (40, 64)])
def test_a_start_is_the_start_of_a_row(form: Any, tokens: int, chunk_size: int) -> None:
    """In answers, gradients and the state that is left."""
    inputs, state = make_inputs(tokens), some_state(make_inputs(3, seed=1))
    starts = torch.zeros(2, tokens, dtype=torch.bool)
    starts[0, [t for t in (1, 4, 5, 6, 20) if t < tokens]] = True
    starts[1, [0, tokens // 3]] = True
    leaves = {name: value.clone().requires_grad_() for name, value in inputs.items()}
    weights = torch.randn(2, tokens, 3, 5, dtype=torch.float64)
    y, end = delta_rule(
        **leaves, state=state, starts=starts, backend=form, chunk_size=chunk_size, return_state=True
    )
    got = torch.autograd.grad((y * weights).sum() + end.S.sum(), list(leaves.values()))
    told = torch.zeros(())
    for b in range(2):
        bounds = sorted({0, *starts[b].nonzero().flatten().tolist(), tokens})
        for first, stop in itertools.pairwise(bounds):
            mine = {name: leaf[b : b + 1, first:stop] for name, leaf in leaves.items()}
            own = None if starts[b, first] else state.reorder(torch.tensor([b]))
            wanted, left = delta_rule(**mine, state=own, backend="naive", return_state=True)
            torch.testing.assert_close(y[b : b + 1, first:stop], wanted, rtol=1e-11, atol=1e-11)
            told = told + (wanted * weights[b : b + 1, first:stop]).sum()
        assert_same_state(end.reorder(torch.tensor([b])), left, atol=1e-11)
        told = told + left.S.sum()
    true = torch.autograd.grad(told, list(leaves.values()))
    for name, ours, theirs in zip(leaves, got, true, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9, msg=name)


def test_a_start_in_the_padding_starts_nothing() -> None:
    inputs, lengths = make_inputs(6), torch.tensor([3, 6])
    starts = torch.zeros(2, 6, dtype=torch.bool)
    _, wanted = delta_rule(**inputs, lengths=lengths, return_state=True)
    starts[0, 4] = True
    _, state = delta_rule(**inputs, lengths=lengths, starts=starts, return_state=True)
    assert_same_state(state, wanted)


def test_starts_are_marks() -> None:
    with pytest.raises(ValueError, match=r"starts has shape \(2, 5\) .* must be bool \[2, 6\]"):
        delta_rule(**make_inputs(6), starts=torch.zeros(2, 5, dtype=torch.bool))
