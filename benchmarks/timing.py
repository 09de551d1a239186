"""Clocks for a machine that is never quite quiet: alternate what is compared, take medians."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import TypeVar

import torch

Name = TypeVar("Name")
Found = TypeVar("Found")


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def interleaved(
    works: Mapping[Name, Callable[[], Found]], rounds: int, warmup: int = 1
) -> dict[Name, list[Found]]:
    """What each piece of work returns, run A B A B ..., so that a disturbance hits all of them."""
    for work in works.values():
        for _ in range(warmup):
            work()
    found: dict[Name, list[Found]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            found[name].append(work())
    return found


def ratio(slow: list[float], fast: list[float]) -> float:
    """How many times longer: the median over rounds, both sides measured within a moment."""
    return median(a / b for a, b in zip(slow, fast, strict=True))


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
