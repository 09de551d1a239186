"""Inputs of the scan that its tests share."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from echo_lm.ops.ssd import SSDState, ssd

Inputs = dict[str, Any]

KINDS = {
    "mamba2": {},
    "mamba2 in groups": {"groups": 2},
    "trapezoid": {"trapezoid": True, "groups": 2},
    "rotation": {"angles": 2},
    "mamba3": {"trapezoid": True, "angles": 3, "groups": 4},
    "mimo": {"trapezoid": True, "angles": 2, "groups": 2, "rank": 3},
    "mimo without extras": {"rank": 2},
}


def make_inputs(
    tokens: int,
    *,
    batch: int = 2,
    heads: int = 4,
    head_dim: int = 5,
    state_dim: int = 7,
    groups: int = 1,
    rank: int = 1,
    trapezoid: bool = False,
    angles: int = 0,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Inputs:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, tokens, *shape, generator=random, dtype=dtype)

    ranks = [] if rank == 1 else [rank]
    inputs: Inputs = {
        "x": normal(heads, *ranks, head_dim),
        "B": normal(groups, *ranks, state_dim),
        "C": normal(groups, *ranks, state_dim),
        "log_decay": -normal(heads).exp() / 4,
        "gamma": normal(heads).sigmoid(),
    }
    if trapezoid:
        inputs["beta"] = normal(heads).sigmoid()
    if angles:
        inputs["angle"] = normal(heads, angles)
    return inputs


def cut(inputs: Inputs, start: int, stop: int) -> Inputs:
    """The tokens from `start` to `stop`."""
    return {name: value[:, start:stop] for name, value in inputs.items()}


def row(inputs: Inputs, b: int, length: int) -> Inputs:
    return {name: value[b : b + 1, :length] for name, value in inputs.items()}


def some_state(inputs: Inputs) -> SSDState:
    """A state in which something was read before."""
    earlier = {name: value.flip(1)[:, :3] for name, value in inputs.items()}
    return ssd(**earlier, backend="naive", return_state=True)[1]


def assert_same_state(got: SSDState, expected: SSDState, *, atol: float = 1e-12) -> None:
    for field in fields(SSDState):
        a, b = getattr(got, field.name), getattr(expected, field.name)
        if field.name == "angle" and b is not None:
            a, b = torch.polar(torch.ones_like(a), a), torch.polar(torch.ones_like(b), b)
        torch.testing.assert_close(a, b, rtol=0, atol=atol)
