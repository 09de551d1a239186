"""What one head may have read: keys that are random, and keys that are hard, always in fp64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from echo_lm.analysis.operator import Sums, conditioning, regularised, sums, whitened_operator

EPS = torch.finfo(torch.float64).eps

KINDS = (
    "normal",
    "few directions",
    "repeated",
    "constant",
    "silent",
    "one loud",
    "spread",
    "shift",
    "drift",
)
RIDGES = (1e-6, 1e-2, 1.0, 1e4)

thorough = settings(max_examples=50, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Head:
    keys: Tensor
    values: Tensor
    queries: Tensor
    ridge: float

    @cached_property
    def sums(self) -> Sums:
        return sums(self.keys, self.values)

    @cached_property
    def full(self) -> Tensor:
        """G + ridge I"""
        return regularised(self.sums.gram, self.ridge)

    @cached_property
    def factor(self) -> Tensor:
        """L"""
        return torch.linalg.cholesky(self.full)

    @cached_property
    def operator(self) -> Tensor:
        """A_w"""
        return whitened_operator(self.sums.gram, self.sums.lag, self.ridge)

    @cached_property
    def whitened_value(self) -> Tensor:
        """C L^-T, which answers whitened queries; no larger than the values."""
        return torch.linalg.solve_triangular(self.factor, self.sums.value.mT, upper=False).mT

    @property
    def condition(self) -> float:
        return float(conditioning(self.sums.gram, self.ridge).condition)

    @property
    def rounding(self) -> float:
        """What a chain of solves may lose: each, eps times the condition number and the rank."""
        return 16 * EPS * self.keys.shape[-1] * self.condition

    @property
    def scale(self) -> float:
        """|V| / sqrt(ridge), which no read-out exceeds: the size that errors are relative to."""
        return float(self.values.norm()) / self.ridge**0.5


def head(
    kind: str = "normal",
    tokens: int = 20,
    rank: int = 5,
    width: int = 4,
    ridge: float = 0.1,
    seed: int = 0,
) -> Head:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    return Head(
        keys=draw_keys(kind, normal(tokens, rank), normal(tokens, 1)),
        values=normal(tokens, width),
        queries=normal(7, rank),
        ridge=ridge,
    )


def draw_keys(kind: str, k: Tensor, one_each: Tensor) -> Tensor:
    """Keys of a kind, made of random ones and of one more number for each."""
    tokens, rank = k.shape
    match kind:
        case "few directions":
            return one_each * k[:1]
        case "repeated":
            return k[torch.arange(tokens) % min(3, tokens)]
        case "constant":
            return k[:1].expand(tokens, -1)
        case "silent":
            return torch.zeros_like(k)
        case "one loud":
            return k * torch.where(torch.arange(tokens) == tokens // 2, 30.0, 1.0)[:, None]
        case "spread":
            return k * 10 ** one_each.clamp(-1, 1)
        case "shift":  # each direction once, one after the other: A_w is nilpotent
            return torch.eye(max(tokens, rank), dtype=k.dtype)[:tokens, :rank]
        case "drift":
            return k.cumsum(0) / tokens**0.5
        case _:
            return k


ridges = st.sampled_from(RIDGES)
sizes = st.integers(1, 7)
heads = st.builds(
    head,
    kind=st.sampled_from(KINDS),
    tokens=st.integers(1, 24),
    rank=sizes,
    width=sizes,
    ridge=ridges,
    seed=st.integers(0, 2**16),
)


def norm(a: Tensor) -> float:
    return float(torch.linalg.matrix_norm(a.detach(), ord=2))


def rank_of(a: Tensor, smallest: float = 1e-10) -> int:
    """How many singular values are above this part of the largest."""
    return int(torch.linalg.matrix_rank(a, rtol=smallest))


def assert_near(found: Tensor | float, wanted: Tensor | float, allowed: float) -> None:
    found, wanted = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (found, wanted))
    assert found.shape == wanted.shape
    away = float((found - wanted).abs().max())
    assert away <= allowed, f"{away:.1e} apart, allowed is {allowed:.1e}"
