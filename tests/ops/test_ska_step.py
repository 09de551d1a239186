"""The kernels of one step under the interpreter, in fp32, against the naive form in fp64.

Sizes are small because the interpreter is slow. `check_decoding` holds whole models to the same on
a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from echo_lm.ops import SKAState, ska
from echo_lm.ops.backends import choose_ska

from .ska_cases import Inputs, cast, make_inputs, row, tokens

MODES: dict[str, dict[str, Any]] = {
    "exact": {"causal": "exact"},
    "exact fading": {"causal": "exact", "decay": torch.tensor([0.5])},
    "chunk": {"causal": "chunk"},
    "chunk relative fading": {"causal": "chunk", "relative_ridge": True, "decay": 0.7},
    "chunk relative to the trace": {"causal": "chunk", "relative_ridge": "trace"},
}
UNITS = 32
"""Allowed error in units of eps (1 + max |k|^2 / ridge), the measure of every form of SKA."""


def some(count: int, *, heads: int = 1, **sizes: Any) -> Inputs:
    sizes = {"rank": 20, "width": 18, "dtype": torch.float32} | sizes
    return make_inputs(count, heads=heads, **sizes)


def strided(x: Tensor) -> Tensor:
    """The same numbers with others between them."""
    return torch.stack([x, 1 - x], dim=1)[:, 0]


def stepped(
    given: Inputs, state: SKAState | None, *, in_place: bool = True, **options: Any
) -> tuple[Tensor, SKAState]:
    """Answers of the kernels, token by token. The state that is given stays as it is."""
    answers, kept = [], None if state is None else state.clone()
    lengths = options.pop("lengths", None)
    with torch.no_grad():
        for t in range(given["q"].shape[1]):
            y, kept = ska(
                **tokens(given, t, t + 1),
                **options,
                lengths=None if lengths is None else strided((lengths > t).long()),
                state=kept,
                return_state=True,
                in_place=in_place,
                backend="triton",
            )
            answers.append(y)
    assert kept is not None
    return torch.cat(answers, dim=1), kept


def truth(given: Inputs, state: SKAState | None, **options: Any) -> tuple[Tensor, SKAState]:
    """The naive form in fp64. What a state has derived is made anew, but for a read-out."""
    wide = None
    if state is not None:
        wide = state.map(lambda x: x.double() if x.is_floating_point() else x)
        wide = replace(wide, inverse=None, inverse_ridge=None)
    if isinstance(options.get("decay"), Tensor):
        options["decay"] = options["decay"].double()
    return ska(
        **cast(given, torch.float64), **options, state=wide, return_state=True, backend="naive"
    )


def assert_same(
    found: tuple[Tensor, SKAState], wanted: tuple[Tensor, SKAState], given: Inputs, **options: Any
) -> None:
    """Answers and states, to rounding."""
    relative = "relative_ridge" in options
    energy = 1.0 if relative else float(given["k"].square().sum(-1).max())
    unit = torch.finfo(torch.float32).eps * (
        1 + energy / (1.0 if relative else float(given["ridge"].min()))
    )
    ours, theirs = ({"y": y, **state.to_dict()} for y, state in (found, wanted))
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        if not isinstance(expected, Tensor) or not expected.is_floating_point():
            same = torch.equal(ours[name], expected) if name == "count" else ours[name] == expected
            assert same, name
            continue
        error = (ours[name].double() - expected).norm() / expected.norm().clamp_min(1e-30)
        assert error < UNITS * unit, f"{name} is off by {error / unit:.1f} units of rounding"


@pytest.mark.parametrize("mode", MODES)
def test_equals_naive_over_chunks(mode: str) -> None:
    """Rows at different counts, one of them new, one that ends early."""
    options = MODES[mode] | {"chunk_size": 3}
    before, given = some(5, batch=3), some(7, batch=3, seed=1)
    _, state = ska(**before, **options, lengths=torch.tensor([5, 3, 0]), return_state=True)
    options["lengths"] = torch.tensor([7, 4, 7])
    assert_same(stepped(given, state, **options), truth(given, state, **options), given, **options)


@pytest.mark.parametrize("mode", ["exact", "chunk"])
@pytest.mark.parametrize(
    ("rank", "width", "order"), [(16, 16, 0), (24, 60, 1), (48, 64, 2), (50, 20, 3), (56, 33, 4)]
)
def test_sizes_and_orders(mode: str, rank: int, width: int, order: int) -> None:
    given = some(4, batch=1, rank=rank, width=width, order=order)
    options = {"causal": mode, "chunk_size": 3}
    assert_same(stepped(given, None, **options), truth(given, None, **options), given, **options)


@pytest.mark.parametrize("mode", ["exact", "chunk"])
def test_wide_heads(mode: str) -> None:
    given = some(2, batch=1, rank=128, width=70)
    options = {"causal": mode, "chunk_size": 1}
    assert_same(stepped(given, None, **options), truth(given, None, **options), given, **options)


@pytest.mark.parametrize("mode", ["exact", "chunk relative fading"])
def test_a_mask(mode: str) -> None:
    """A token that is left out still takes its place, and parts its neighbours."""
    options = MODES[mode] | {"chunk_size": 2}
    given = some(6, batch=1)
    mask = torch.tensor([[True, False, True, True, False, True]])
    wanted = truth(given, None, **options, mask=mask)
    answers, state = [], None
    with torch.no_grad():
        for t in range(6):
            here = {"mask": mask[:, t : t + 1], "state": state, "return_state": True}
            y, state = ska(**tokens(given, t, t + 1), **options, **here, backend="triton")
            answers.append(y)
    assert state is not None
    assert_same((torch.cat(answers, 1), state), wanted, given, **options)


@pytest.mark.parametrize("mode", ["exact fading", "chunk"])
def test_in_place_or_not_gives_the_same_bits(mode: str) -> None:
    options = MODES[mode] | {"chunk_size": 3}
    given = some(5, batch=2)
    _, state = ska(**some(4, seed=1), **options, return_state=True)
    kept = state.clone()
    over, copied = (stepped(given, state, **options, in_place=where) for where in (True, False))
    assert torch.equal(over[0], copied[0])
    for name, x in over[1].to_dict().items():
        y = copied[1].to_dict()[name]
        assert torch.equal(x, y) if isinstance(x, Tensor) else x == y, name
    once, _ = ska(
        **tokens(given, 0, 1), **options, state=state, return_state=True, backend="triton"
    )
    assert torch.equal(once, over[0][:, :1])
    for name, x in kept.to_dict().items():
        y = state.to_dict()[name]
        assert torch.equal(x, y) if isinstance(x, Tensor) else x == y, name


def test_in_place_keeps_every_tensor_where_it_is() -> None:
    """Or a CUDA graph would write where nobody looks."""
    for mode in ("exact fading", "chunk"):
        given, options = some(3, batch=1), MODES[mode] | {"chunk_size": 2}
        _, state = ska(**given, **options, return_state=True)
        places = {name: x for name, x in state.to_dict().items() if isinstance(x, Tensor)}
        with torch.no_grad():
            _, after = ska(
                **tokens(given, 0, 1),
                **options,
                state=state,
                return_state=True,
                in_place=True,
                backend="triton",
            )
        for name, x in after.to_dict().items():
            assert not isinstance(x, Tensor) or x is places[name], name


def test_another_ridge_makes_the_inverse_anew() -> None:
    """In the middle of a chunk, where nothing fades."""
    options = MODES["exact fading"] | {"chunk_size": 50}
    _, state = ska(**some(6), **options, return_state=True)
    given = some(2, ridge=3.0, seed=1)
    assert_same(stepped(given, state, **options), truth(given, state, **options), given, **options)


def test_a_state_without_a_readout_answers_from_all_it_holds() -> None:
    _, state = ska(**some(5, batch=2), causal=False, return_state=True)
    given, options = some(4, batch=2, seed=1), {"causal": "chunk", "chunk_size": 7}
    assert_same(stepped(given, state, **options), truth(given, state, **options), given, **options)


def test_views_with_other_strides() -> None:
    given = some(1, batch=2, heads=2)
    q, k = torch.cat([given["q"], given["k"]], dim=-1).chunk(2, dim=-1)
    v = given["v"].mT.contiguous().mT
    coef = given["coef"][:1].expand(2, -1)
    with torch.no_grad():
        apart = ska(**(given | {"coef": coef.contiguous()}), backend="triton")
        together = ska(**(given | {"q": q, "k": k, "v": v, "coef": coef}), backend="triton")
    assert torch.equal(together, apart)


def test_bf16_tokens() -> None:
    """Widened as they are read: all behind them is fp32, and the answer is rounded once."""
    given = cast(some(3, batch=1), torch.bfloat16)
    numbers = {name: given[name].float() for name in ("coef", "ridge")}
    y, state = stepped(given | numbers, None, chunk_size=2)
    wanted, wide = stepped(cast(given, torch.float32), None, chunk_size=2)
    assert y.dtype == torch.bfloat16
    assert ((y.float() - wanted).abs() <= torch.finfo(torch.bfloat16).eps * wanted.abs()).all()
    assert torch.equal(state.gram, wide.gram)


def test_rows_are_independent() -> None:
    given, options = some(2, batch=2), {"chunk_size": 2}
    y, _ = stepped(given, None, **options)
    alone, _ = stepped(row(given, 1), None, **options)
    assert torch.equal(y[1:2], alone)


def test_nan_spreads_to_every_later_answer_of_its_row() -> None:
    given = some(3, batch=2)
    given["k"][0, 1, 0, 3] = torch.nan
    y, _ = stepped(given, None, chunk_size=2)
    assert bool(y[0, 1:].isnan().all())
    assert bool(y[0, :1].isfinite().all())
    assert bool(y[1].isfinite().all())


def test_who_serves_a_single_token(monkeypatch: pytest.MonkeyPatch) -> None:
    given = some(1)
    one, wide = (given["q"], given["v"]), (torch.zeros(1, 1, 1, 129), given["v"])

    def chosen(q: Tensor, v: Tensor, backend: Any = "triton", **more: Any) -> str:
        return choose_ska(backend, q, v, causal="exact", chunk_size=64, **more)

    assert chosen(*one) == "step"
    assert chosen(*one, learning=True) == "triton"
    assert chosen(*one, backend="auto") == "recurrent"
    with pytest.raises(ValueError, match=r"up to 128, not 129 and 18; use backend=.recurrent"):
        chosen(*wide)
    with pytest.raises(ValueError, match=r"takes fp32, bf16 and fp16, not torch.float64"):
        chosen(*(x.double() for x in one))
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="needs a CUDA device, not cpu"):
        chosen(*one)


def test_nothing_is_written_over_where_gradients_are_recorded() -> None:
    given = some(1)
    _, state = ska(**given, return_state=True)
    given["q"].requires_grad_()
    with pytest.raises(ValueError, match=r"in_place=True .* torch\.no_grad\(\)"):
        ska(**given, state=state, return_state=True, in_place=True)
