"""Keys that put a statement to the test, and what rounding may take from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from echo_lm.analysis.operator import Sums, sums

EPS = torch.finfo(torch.float64).eps


def _turning(k: Tensor) -> Tensor:
    """Pairs that turn by nearly the same angle: clustered eigenvalues, near the unit circle."""
    steps = torch.arange(k.shape[-2], dtype=k.dtype)[:, None]
    pairs = torch.arange(k.shape[-1]) // 2
    phase = torch.arange(k.shape[-1]) % 2 * (torch.pi / 2)
    return torch.cos(steps * (0.3 + 1e-3 * pairs) - phase).expand_as(k).contiguous()


def _chain(k: Tensor) -> Tensor:
    """The axes, one after the other, once: A_w is nilpotent, and has no basis of eigenvectors."""
    return torch.eye(k.shape[-2], k.shape[-1], dtype=k.dtype).expand_as(k).contiguous()


def _one_huge(k: Tensor) -> Tensor:
    k[..., k.shape[-2] // 2, :] *= 1e3
    return k


def _weak_direction(k: Tensor) -> Tensor:
    k[..., -1] *= 1e-3
    return k


def _masked(k: Tensor) -> Tensor:
    return k * (torch.arange(k.shape[-2]) % 3 > 0)[:, None]


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda k: k,
    "repeated": lambda k: k[..., torch.arange(k.shape[-2]) % min(3, k.shape[-2]), :],
    "constant": lambda k: k[..., :1, :].expand_as(k).contiguous(),
    "few directions": lambda k: k[..., :1] * k[..., :1, :],
    "spread": lambda k: k * 10 ** (2 * torch.sin(1e3 * k[..., :1])),
    "one huge": _one_huge,
    "weak direction": _weak_direction,
    "zero": torch.zeros_like,
    "masked": _masked,
    "chain": _chain,
    "turning": _turning,
}


def draw_keys(kind: str, count: int, rank: int, seed: int = 0, batch: Sequence[int] = ()) -> Tensor:
    """Keys [*batch, count, rank] in fp64."""
    random = torch.Generator().manual_seed(seed)
    k = torch.randn(*batch, count, rank, generator=random, dtype=torch.float64)
    return KINDS[kind](k)


class Tokens(NamedTuple):
    """What one head has read, and its ridge."""

    keys: Tensor
    values: Tensor
    ridge: float

    @property
    def sums(self) -> Sums:
        return sums(self.keys, self.values)

    @property
    def rounding(self) -> float:
        """eps (1 + tr G / ridge): what is lost where the regularised G is inverted, a few times."""
        return EPS * (1 + float(self.keys.square().sum()) / self.ridge)

    @property
    def slack(self) -> float:
        """By what a bound may be missed: inverses, decompositions and norms of small matrices."""
        return 1 + 64 * self.rounding


@st.composite
def tokens(draw: st.DrawFn, max_count: int = 24, max_rank: int = 7) -> Tokens:
    """Keys of every kind, in all shapes, under ridges from faint to strong."""
    kind = draw(st.sampled_from(sorted(KINDS)))
    count, rank = draw(st.integers(1, max_count)), draw(st.integers(1, max_rank))
    seed = draw(st.integers(0, 2**16))
    torch.manual_seed(seed)  # for what the test itself draws, too
    values = torch.randn(count, 3, dtype=torch.float64)
    ridge = draw(st.sampled_from([1e-4, 1e-2, 1.0]))
    return Tokens(draw_keys(kind, count, rank, seed), values, ridge)
