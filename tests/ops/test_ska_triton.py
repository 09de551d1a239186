"""The Triton kernels under the interpreter, in fp32, against the naive form in fp64.

Sizes are small because the interpreter is slow; on a GPU the same comparison runs at full size with
`echo-lm bench ops`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from echo_lm.ops import SKAState, ska
from echo_lm.ops.ska import triton as kernels_home

SUMS = ("gram", "lag", "value", "last_key")

MODES: dict[str, dict[str, Any]] = {
    "exact": {"causal": "exact", "chunk_size": 16},
    "chunk": {"causal": "chunk", "chunk_size": 16},
    "chunk relative": {"causal": "chunk", "chunk_size": 16, "relative_ridge": True},
}
UNITS = 32
"""Allowed error in units of eps (1 + max |k|^2 / ridge), the measure of every form of SKA."""


@pytest.fixture(autouse=True)
def _tiles_as_long_as_chunks_and_few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In exact mode, where a program of the backward then serves several chunks."""
    monkeypatch.setattr(kernels_home, "best_tile_length", lambda problem: problem.chunk_size)
    monkeypatch.setattr(kernels_home, "MULTIPROCESSORS", 1)


def inputs(
    tokens: int, *, batch: int = 2, heads: int = 2, rank: int = 24, width: int = 20, order: int = 2
) -> dict[str, Tensor]:
    return {
        "q": torch.randn(batch, tokens, heads, rank),
        "k": torch.randn(batch, tokens, heads, rank),
        "v": torch.randn(batch, tokens, heads, width),
        "coef": torch.randn(heads, order + 1),
        "ridge": torch.linspace(1.0, 2.0, heads),
    }


def answers_and_gradients(
    given: dict[str, Tensor],
    backend: str,
    dtype: torch.dtype,
    state: SKAState | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Outputs, the final state, and the gradients of everything that has one."""
    leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in given.items()}
    start = state
    if state is not None:
        held = {
            name: x.detach().to(dtype).requires_grad_()
            for name, x in state.to_dict().items()
            if name in (*SUMS, "readout")
        }
        leaves |= held
        start = replace(
            state,
            first_key=state.first_key.to(dtype),
            key_energy=state.key_energy.to(dtype),
            inverse=None,
            inverse_ridge=None,
            **held,
        )
    arguments = {name: leaves[name] for name in given}
    y, end = ska(**arguments, state=start, return_state=True, backend=backend, **options)
    found = {"y": y} | {f"end {name}": x for name, x in end.to_dict().items() if name != "count"}
    results = {name: x for name, x in found.items() if isinstance(x, Tensor) and x.requires_grad}
    torch.manual_seed(1)
    loss = sum(((x * torch.randn(x.shape).to(dtype)).sum() for x in results.values()), y.sum())
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    for name, gradient in zip(leaves, gradients, strict=True):
        results[f"d {name}"] = torch.zeros_like(leaves[name]) if gradient is None else gradient
    return results


def assert_same_map(
    given: dict[str, Tensor], state: SKAState | None = None, **options: Any
) -> None:
    truth = answers_and_gradients(given, "naive", torch.float64, state, **options)
    found = answers_and_gradients(given, "triton", torch.float32, state, **options)
    assert truth.keys() == found.keys()
    ridge = 1.0 if "relative_ridge" in options else float(given["ridge"].min())
    energy = 1.0 if "relative_ridge" in options else float(given["k"].square().sum(-1).max())
    unit = torch.finfo(torch.float32).eps * (1 + energy / ridge)
    for name, expected in truth.items():
        error = (found[name] - expected).norm() / expected.norm().clamp_min(1e-30)
        assert error < UNITS * unit, f"{name} is off by {error / unit:.1f} units of rounding"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tokens", [1, 63])
def test_equals_naive(mode: str, tokens: int) -> None:
    assert_same_map(inputs(tokens), **MODES[mode])


@pytest.mark.parametrize("mode", ["exact", "chunk"])
def test_inputs_of_sixteen_bits(mode: str) -> None:
    """Products stay in fp32 here; what is stored in bf16 is rounded up to three times."""
    given = {name: x.bfloat16() for name, x in inputs(40, batch=1).items()}
    truth = answers_and_gradients(given, "naive", torch.float64, **MODES[mode])
    found = answers_and_gradients(given, "triton", torch.bfloat16, **MODES[mode])
    for name, expected in truth.items():
        error = (found[name] - expected).norm() / expected.norm()
        assert error < 3 * torch.finfo(torch.bfloat16).eps / 2, f"{name} is off by {error:.1e}"


def test_a_ridge_relative_to_the_trace() -> None:
    """It is made outside the kernels; gradients reach keys and state through it."""
    options = {"causal": "chunk", "chunk_size": 16, "relative_ridge": "trace"}
    _, state = ska(**inputs(20), **options, return_state=True)
    assert_same_map(inputs(21), state, **options)


@pytest.mark.parametrize(
    ("rank", "width", "chunk_size", "order"),
    [(16, 16, 16, 0), (48, 32, 32, 1), (50, 60, 64, 3), (56, 64, 32, 2)],
)
def test_sizes_and_orders(rank: int, width: int, chunk_size: int, order: int) -> None:
    given = inputs(70, batch=1, rank=rank, width=width, order=order)
    assert_same_map(given, causal="exact", chunk_size=chunk_size)
    assert_same_map(given, causal="chunk", chunk_size=chunk_size)


@pytest.mark.parametrize("mode", MODES)
def test_masks_and_padding(mode: str) -> None:
    given = inputs(40, batch=3)
    mask = torch.rand(3, 40) < 0.7
    lengths = torch.tensor([40, 0, 17])
    assert_same_map(given, **MODES[mode], mask=mask, lengths=lengths)


@pytest.mark.parametrize("mode", ["exact", "chunk"])
def test_packed_sequences(mode: str) -> None:
    given = inputs(40, batch=1)
    assert_same_map(given, **MODES[mode], cu_seqlens=torch.tensor([0, 9, 9, 30, 40]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lengths", [None, [37, 0, 17]])
def test_continues_a_state(mode: str, lengths: list[int] | None) -> None:
    """Rows stand at different counts, two of them inside a chunk."""
    options = MODES[mode]
    first, then = inputs(30, batch=3), inputs(37, batch=3)
    then |= {"coef": first["coef"], "ridge": first["ridge"]}
    _, state = ska(**first, **options, lengths=torch.tensor([30, 16, 5]), return_state=True)
    real = None if lengths is None else torch.tensor(lengths)
    assert_same_map(then, state, **options, lengths=real)


DECAY = {"decay": torch.tensor([0.4, 1.0])}


@pytest.mark.parametrize(("mode", "chunk_size"), [("exact", 48), ("chunk relative", 16)])
def test_fading_sums(mode: str, chunk_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows at different counts; in exact mode three tiles make a chunk."""
    monkeypatch.setattr(kernels_home, "best_tile_length", lambda problem: 16)
    options = MODES[mode] | {"chunk_size": chunk_size}
    first, then = inputs(50) | DECAY, inputs(20)
    then = first | {name: then[name] for name in ("q", "k", "v")}
    _, state = ska(**first, **options, lengths=torch.tensor([48, 35]), return_state=True)
    assert_same_map(then, state, **options, lengths=torch.tensor([3, 20]))
    assert_same_map(tokens_of(first, 34), **options, mask=torch.rand(2, 34) < 0.8)


def tokens_of(given: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    return given | {name: given[name][:, :count] for name in ("q", "k", "v")}


def test_fading_packed_sequences() -> None:
    given = inputs(40, batch=1) | DECAY
    assert_same_map(given, **MODES["exact"], cu_seqlens=torch.tensor([0, 9, 9, 30, 40]))


@pytest.mark.parametrize("mode", MODES)
def test_the_future_does_not_move_the_past(mode: str) -> None:
    given = inputs(60, batch=1)
    before = ska(**given, **MODES[mode], backend="triton")
    for name, size in (("q", 1.0), ("k", 1e3), ("v", 1e6)):
        given[name] = given[name].clone()
        given[name][:, 37:] = size * torch.randn_like(given[name][:, 37:])
    after = ska(**given, **MODES[mode], backend="triton")
    assert torch.equal(before[:, :37], after[:, :37])
    assert not torch.equal(before[:, 37:], after[:, 37:])


@pytest.mark.parametrize("mode", MODES)
def test_the_same_call_gives_the_same_bits(mode: str) -> None:
    given = inputs(40)
    first, second = (
        answers_and_gradients(given, "triton", torch.float32, **MODES[mode]) for _ in range(2)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("mode", ["exact", "chunk"])
def test_a_second_backward_of_one_graph(mode: str) -> None:
    """The first one overwrites what the forward kept."""
    given = {name: x.requires_grad_() for name, x in inputs(40).items()}
    loss = ska(**given, **MODES[mode], backend="triton").square().sum()
    once = torch.autograd.grad(loss, list(given.values()), retain_graph=True)
    again = torch.autograd.grad(loss, list(given.values()))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def test_views_with_other_strides() -> None:
    given = inputs(32, batch=2)
    q, k = torch.cat([given["q"], given["k"]], dim=-1).chunk(2, dim=-1)
    v = given["v"].transpose(1, 2).contiguous().transpose(1, 2)
    together = ska(**given, backend="triton")
    apart = ska(**(given | {"q": q, "k": k, "v": v}), backend="triton")
    assert torch.equal(together, apart)


@pytest.mark.parametrize("mode", MODES)
def test_hard_keys_give_finite_answers_and_gradients(mode: str) -> None:
    for scale in (0.0, 1e-6, 1e3):
        given = inputs(40, batch=1)
        given["k"] = scale * given["k"]
        given["k"][:, 20:] = given["k"][:, 20:21]
        found = answers_and_gradients(given, "triton", torch.float32, **MODES[mode])
        assert all(bool(x.isfinite().all()) for x in found.values()), scale


@pytest.mark.parametrize("mode", ["exact", "chunk"])
def test_nan_never_gives_a_finite_answer_behind_it(mode: str) -> None:
    given = inputs(60, batch=1, heads=1)
    given["k"][0, 20, 0, 3] = torch.nan
    y = ska(**given, **MODES[mode], backend="triton")
    seen_from = 20 if mode == "exact" else 32
    assert bool(y[:, seen_from:].isnan().all())
    assert bool(y[:, :16].isfinite().all())


@pytest.mark.parametrize(
    ("sizes", "options", "said"),
    [
        ({"rank": 8}, {}, "not 8 and 20"),
        ({"width": 65}, {}, "not 24 and 65"),
        ({}, {"causal": False}, "causal=False"),
        ({}, {"causal": "chunk", "chunk_size": 48}, "not 48"),
        ({}, {"decay": 0.5, "chunk_size": 40}, "fades every 16 tokens"),
    ],
)
def test_what_the_kernels_do_not_take(
    sizes: dict[str, int], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=r"use backend=.chunk") as error:
        ska(**inputs(4, **sizes), **options, backend="triton")
    assert said in str(error.value)


def test_without_a_gpu_and_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="needs a CUDA device, not cpu"):
        ska(**inputs(4), backend="triton")
