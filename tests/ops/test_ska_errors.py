"""A bad argument gives one sentence that names it, and leaves the state as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echo_lm.ops import SKAState, ska

from .ska_cases import assert_identical, make_inputs

B, T, H, R, P = 2, 10, 2, 6, 5


def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def state_of(batch: int = B, rank: int = R, width: int = P, **options: Any) -> SKAState:
    inputs = make_inputs(3, batch=batch, rank=rank, width=width)
    return ska(**inputs, return_state=True, **options)[1]


def bools(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.bool)


BAD_ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "q of three dimensions": (
        {"q": zeros(B, T, R)},
        r"q and k must be \[B, T, H, r\].*got q \(2, 10, 6\), k \(2, 10, 2, 6\)",
    ),
    "k of another rank": ({"k": zeros(B, T, H, 7)}, r"got q \(2, 10, 2, 6\), k \(2, 10, 2, 7\)"),
    "v of another length": ({"v": zeros(B, 9, H, P)}, r"v \(2, 9, 2, 5\)"),
    "v without heads": ({"v": zeros(B, T, P)}, r"v \[B, T, H, P\]; got .*v \(2, 10, 5\)"),
    "no tokens": (
        {"q": zeros(B, 0, H, R), "k": zeros(B, 0, H, R), "v": zeros(B, 0, H, P)},
        r"at least one row, token, head and dimension; got q \(2, 0, 2, 6\)",
    ),
    "no rows": (
        {"q": zeros(0, T, H, R), "k": zeros(0, T, H, R), "v": zeros(0, T, H, P)},
        r"got q \(0, 10, 2, 6\), v \(0, 10, 2, 5\)",
    ),
    "values of no width": ({"v": zeros(B, T, H, 0)}, r"v \(2, 10, 2, 0\)"),
    "mixed dtypes": (
        {"k": zeros(B, T, H, R, dtype=torch.float32)},
        r"one floating dtype; got torch.float64, torch.float32, torch.float64",
    ),
    "integers": (
        {name: zeros(B, T, H, R, dtype=torch.int64) for name in ("q", "k", "v")},
        r"one floating dtype; got torch.int64",
    ),
    "coef of one dimension": ({"coef": zeros(3)}, r"coef must be \[H, K \+ 1\].*got \(3,\)"),
    "coef of other heads": ({"coef": zeros(3, 2)}, r"each of 2 heads.*got \(3, 2\)"),
    "coef without an order": ({"coef": zeros(H, 0)}, r"each order from 0 to K; got \(2, 0\)"),
    "unknown causality": (
        {"causal": "sliding"},
        r"causal must be \"exact\", \"chunk\" or False, got 'sliding'",
    ),
    "causal True": ({"causal": True}, r"got True"),
    "relative ridge in exact mode": (
        {"relative_ridge": True},
        r'drop relative_ridge or use causal="chunk"',
    ),
    "a ridge relative to what is not known": (
        {"relative_ridge": "mean", "causal": "chunk"},
        r"relative_ridge must be False, True or \"trace\", got 'mean'",
    ),
    "chunk of nothing": ({"chunk_size": 0}, r"chunk_size must be at least 1, got 0"),
    "ridge zero": ({"ridge": 0.0}, r"ridge must be positive, got 0.0"),
    "ridge negative": ({"ridge": -0.5}, r"ridge must be positive, got -0.5"),
    "ridge NaN": ({"ridge": float("nan")}, r"ridge must be positive, got nan"),
    "ridge of one head negative": (
        {"ridge": torch.tensor([1.0, -2.0])},
        r"positive for every head, got \[1.0, -2.0\]",
    ),
    "ridge of other heads": ({"ridge": torch.ones(3)}, r"each of 2 heads, got shape \(3,\)"),
    "decay zero": ({"decay": 0.0}, r"decay must be above 0 and at most 1, got 0.0"),
    "decay above one": ({"decay": 1.1}, r"decay must be above 0 and at most 1, got 1.1"),
    "decay of one head above one": (
        {"decay": torch.tensor([0.5, 1.5])},
        r"at most 1 for every head, got \[0.5, 1.5\]",
    ),
    "decay of other heads": ({"decay": torch.ones(3)}, r"decay .* 2 heads, got shape \(3,\)"),
    "decay without an order of reading": (
        {"decay": 0.5, "causal": False},
        r'drop decay, or use causal="exact" or "chunk"',
    ),
    "mask of another shape": (
        {"mask": bools(B, 9)},
        r"\[B, T\] = \[2, 10\], got torch.bool \[2, 9\]",
    ),
    "mask of numbers": (
        {"mask": torch.ones(B, T)},
        r"must be a bool tensor .* got torch.float32 \[2, 10\]",
    ),
    "lengths of other rows": (
        {"lengths": torch.tensor([1, 2, 3])},
        r"one integer for each of 2 rows, got torch.int64 \[3\]",
    ),
    "lengths that are not whole": (
        {"lengths": torch.tensor([1.0, 2.0])},
        r"one integer for each of 2 rows, got torch.float32 \[2\]",
    ),
    "a length beyond T": (
        {"lengths": torch.tensor([3, 11])},
        r"between 0 and T = 10, got \[3, 11\]",
    ),
    "a negative length": ({"lengths": torch.tensor([-1, 4])}, r"got \[-1, 4\]"),
    "cu_seqlens over rows": (
        {"cu_seqlens": torch.tensor([0, 10])},
        r"over a single row, got \[0, 10\] over 2 row",
    ),
    "unknown backend": (
        {"backend": "cuda"},
        r"backend must be one of auto, naive, chunk, recurrent.*got 'cuda'",
    ),
    "looking ahead token by token": (
        {"backend": "recurrent", "causal": False},
        r'backend="recurrent" reads token by token',
    ),
    "state of another batch": (
        {"state": state_of(batch=3)},
        r"holds \[rows, heads, value width, rank\] = \[3, 2, 5, 6\], this call has \[2, 2, 5, 6\]",
    ),
    "state of another rank": ({"state": state_of(rank=7)}, r"\[2, 2, 5, 7\]"),
    "state of another width": ({"state": state_of(width=4)}, r"\[2, 2, 4, 6\]"),
    "state of another dtype": (
        {"state": state_of().map(lambda t: t.float() if t.is_floating_point() else t)},
        r"The state is torch.float32 on cpu, this call computes in torch.float64",
    ),
    "state of another chunk size": (
        {"state": state_of(causal="chunk", chunk_size=4), "causal": "chunk", "chunk_size": 8},
        r"made with chunk_size=4; continue with that instead of 8",
    ),
    "fading state of another chunk size": (
        {"state": state_of(decay=0.5, chunk_size=4), "decay": 0.5, "chunk_size": 8},
        r"made with chunk_size=4; continue with that instead of 8",
    ),
}

PACKED: dict[str, tuple[dict[str, Any], str]] = {
    "falls": ({"cu_seqlens": torch.tensor([0, 7, 5, 10])}, r"got \[0, 7, 5, 10\] over 1 row"),
    "ends early": ({"cu_seqlens": torch.tensor([0, 5])}, r"rise from 0 to T = 10.*got \[0, 5\]"),
    "starts late": ({"cu_seqlens": torch.tensor([1, 10])}, r"got \[1, 10\]"),
    "a single bound": ({"cu_seqlens": torch.tensor([0])}, r"got \[0\]"),
    "with lengths": (
        {"cu_seqlens": torch.tensor([0, 10]), "lengths": torch.tensor([10])},
        r"lengths \(padded rows\) or cu_seqlens \(one packed row\), not both",
    ),
    "a state of one row for two sequences": (
        {"cu_seqlens": torch.tensor([0, 4, 10]), "state": state_of(batch=1)},
        r"\[1, 2, 5, 6\], this call has \[2, 2, 5, 6\]",
    ),
}


def check(inputs: dict[str, Any], bad: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {"state": state_of(batch=inputs["q"].shape[0]), **inputs, **bad}
    before = call["state"].clone()
    with pytest.raises(ValueError, match=message) as caught:
        ska(**call, return_state=True)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")
    assert_identical(call["state"], before)


@pytest.mark.parametrize(("bad", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_a_bad_argument_is_named(bad: dict[str, Any], message: str) -> None:
    check(make_inputs(T), bad, message)


@pytest.mark.parametrize(("bad", "message"), PACKED.values(), ids=PACKED)
def test_bad_packing_is_named(bad: dict[str, Any], message: str) -> None:
    check(make_inputs(T, batch=1), bad, message)
