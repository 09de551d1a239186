"""What the tests of SKA share: inputs, comparisons, and how much rounding an answer may show."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from echo_lm.ops import SKAState, ska

Inputs = dict[str, Any]
"""q, k, v, coef and ridge, ready for `ska(**inputs)`."""

MODES: dict[str, dict[str, Any]] = {
    "exact": {"causal": "exact"},
    "chunk": {"causal": "chunk"},
    "chunk relative": {"causal": "chunk", "relative_ridge": True},
    "chunk relative to the trace": {"causal": "chunk", "relative_ridge": "trace"},
    "exact fading": {"causal": "exact", "decay": 0.7},
    "chunk relative fading": {"causal": "chunk", "relative_ridge": True, "decay": 0.7},
    "full": {"causal": False},
    "full relative": {"causal": False, "relative_ridge": True},
}
CAUSAL = [mode for mode, options in MODES.items() if options["causal"]]


def forms(mode: str) -> list[str]:
    """The back ends that serve a mode."""
    return ["naive", "chunk", "recurrent"] if mode in CAUSAL else ["naive", "chunk"]


MODES_AND_FORMS = [(mode, form) for mode in MODES for form in forms(mode)]


def make_inputs(
    tokens: int,
    *,
    batch: int = 2,
    heads: int = 2,
    rank: int = 6,
    width: int = 5,
    order: int = 2,
    ridge: float = 1.0,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Inputs:
    """Normal q, k and v, every order of the filter in use, and another ridge for each head."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=dtype)

    return {
        "q": normal(batch, tokens, heads, rank),
        "k": normal(batch, tokens, heads, rank),
        "v": normal(batch, tokens, heads, width),
        "coef": normal(heads, order + 1),
        "ridge": ridge * torch.linspace(1.0, 1.5, heads, dtype=dtype),
    }


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return {name: tensor.to(dtype) for name, tensor in inputs.items()}


def tokens(inputs: Inputs, start: int, stop: int) -> Inputs:
    """The same call for the tokens from `start` to `stop`."""
    return inputs | {name: inputs[name][:, start:stop] for name in ("q", "k", "v")}


def row(inputs: Inputs, index: int) -> Inputs:
    """The same call for one row of the batch."""
    return inputs | {name: inputs[name][index : index + 1] for name in ("q", "k", "v")}


def joined(parts: list[Inputs]) -> Inputs:
    """One call for the tokens of several."""
    return parts[0] | {name: torch.cat([p[name] for p in parts], dim=1) for name in ("q", "k", "v")}


def gradients(inputs: Inputs, state: SKAState | None, **options: Any) -> dict[str, Tensor]:
    """Gradients of a random loss on the answers and on every number of the final state."""
    inputs = {name: t.detach().clone().requires_grad_() for name, t in inputs.items()}
    sums: Inputs = {}
    if state is not None:
        state, sums = with_leaves(state)
    y, new = ska(**inputs, state=state, return_state=True, **options)
    leaves = inputs | sums
    loss = random_loss(y, new)
    grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    found = dict(zip(leaves, grads, strict=True))
    if "gram" in found:
        # A Gram matrix is symmetric: only the symmetric part of its gradient has a meaning.
        found["gram"] = (found["gram"] + found["gram"].mT) / 2
    return found


def with_leaves(state: SKAState) -> tuple[SKAState, dict[str, Tensor]]:
    """The state with leaves of a graph in it; the cached inverse is not one, it follows."""
    leaves = {
        name: tensor.detach().clone().requires_grad_()
        for name, tensor in floating_fields(state)
        if not name.startswith("inverse")
    }
    return replace(state, **leaves), leaves


def random_loss(y: Tensor, state: SKAState) -> Tensor:
    """Weighs each part alike, so that none hides the errors of another."""
    random = torch.Generator().manual_seed(0)
    parts = [y, *(tensor for _, tensor in floating_fields(state))]
    weights = [torch.randn(x.shape, generator=random, dtype=torch.float64) for x in parts]
    scaled = [x / x.detach().norm().clamp_min(1.0) for x in parts]
    return torch.stack([(w.to(x) * x).sum() for w, x in zip(weights, scaled, strict=True)]).sum()


def floating_fields(state: SKAState) -> list[tuple[str, Tensor]]:
    pairs = [(f.name, getattr(state, f.name)) for f in fields(state)]
    return [(n, t) for n, t in pairs if isinstance(t, Tensor) and t.is_floating_point()]


def error(got: Tensor, wanted: Tensor) -> float:
    """Largest difference, as a part of the largest entry."""
    assert got.shape == wanted.shape
    if wanted.numel() == 0:
        return 0.0
    got, wanted = got.detach().double(), wanted.detach().double()
    return float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-300))


def assert_close(got: Tensor, wanted: Tensor, tolerance: float, what: str = "answers") -> None:
    found = error(got, wanted)
    assert found <= tolerance, f"{what} differ by {found:.1e}, allowed is {tolerance:.1e}"


def assert_same_state(got: SKAState, wanted: SKAState, tolerance: float) -> None:
    """Every field, those that are None included."""
    for field in fields(SKAState):
        a, b = getattr(got, field.name), getattr(wanted, field.name)
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.is_floating_point():
            assert_close(a, b, tolerance, field.name)
        elif isinstance(a, Tensor) and isinstance(b, Tensor):
            assert torch.equal(a, b), f"{field.name}: {a} is not {b}"
        else:
            assert a == b, f"{field.name}: {a} is not {b}"


def assert_identical(got: SKAState, wanted: SKAState) -> None:
    """Bit for bit."""
    left, right = got.to_dict(), wanted.to_dict()
    assert left.keys() == right.keys()
    for name, value in left.items():
        same = (
            torch.equal(value, right[name]) if isinstance(value, Tensor) else value == right[name]
        )
        assert same, f"{name} has changed"


def rounding(inputs: Inputs, dtype: torch.dtype, mode: str = "exact") -> float:
    """eps (1 + max |k|^2 / lam), the unit in which the errors of every form are counted.

    X = (G + lam I)^-1 has entries up to 1/lam, and rounding leaves eps/lam in it. Answers and
    gradients take products of X with keys: k' X k is at most 1 for a key k in G, while the error
    it meets is eps |k|^2 / lam. Sums over tokens and ranks add factors of a few: on normal keys
    we saw up to 5 units in answers, 7 in states and 16 in gradients.
    """
    ridge = float(inputs["ridge"].min())
    energy = float(inputs["k"].double().square().sum(-1).max())
    return torch.finfo(dtype).eps * (1 + (1 if "relative" in mode else energy) / ridge)
