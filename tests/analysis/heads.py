"""A head that has read keys of some kind, with values of any width, and is asked, in fp64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from echo_lm.analysis.operator import Sums, conditioning, regularised, sums, whitened_operator

from .draws import EPS, KINDS, draw_keys

RIDGES = (1e-4, 1e-2, 1.0, 1e4)

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
    random = torch.Generator().manual_seed(seed + 1)  # not what the keys are drawn with

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    return Head(
        keys=draw_keys(kind, tokens, rank, seed),
        values=normal(tokens, width),
        queries=normal(7, rank),
        ridge=ridge,
    )


ridges = st.sampled_from(RIDGES)
sizes = st.integers(1, 7)
heads = st.builds(
    head,
    kind=st.sampled_from(sorted(KINDS)),
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
