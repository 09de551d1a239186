"""Clocks for a machine that is never quite quiet: alternate what is compared, take medians."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import TypeVar

import torch

Name = TypeVar("Name")
Found = TypeVar("Found")

WARMUP = 3
"""Runs before one is captured: kernels are compiled and tuned, and libraries take their room."""
COPIED = {"cuda": 2**30, "cpu": 2**27}
"""Bytes: far more than any cache holds."""


def on_gpu(device: torch.device | str) -> bool:
    return torch.device(device).type == "cuda"


def seconds(work: Callable[[], object], device: torch.device | str = "cpu") -> float:
    """Of one run. On a GPU that of the second of two, which is launched behind the first."""
    if not on_gpu(device):
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    work()
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def finish(device: torch.device | str) -> None:
    """Wait until the device has done what it was given."""
    if on_gpu(device):
        torch.cuda.synchronize(device)


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


def warm(work: Callable[[], object], device: torch.device | str) -> Callable[[], object]:
    """The same; on a GPU after a few runs beside the usual stream, as a capture wants it."""
    if on_gpu(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARMUP):
                work()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
    return work


def replayable(
    work: Callable[[], object], device: torch.device | str
) -> tuple[Callable[[], object], str | None]:
    """On a GPU the same launches as a CUDA graph, which does not pay for Python; if they cannot be
    one, `work` itself and why. `work` must be warm."""
    if not on_gpu(device):
        return work, None
    try:
        run_without_waiting(work)
        return capture(work).replay, None
    except RuntimeError as error:
        torch.cuda.synchronize()
        # A capture that fails leaves the random numbers to itself; one that succeeds frees them.
        capture(lambda: torch.zeros((), device=device))
        return work, f"launched from Python: {str(error).splitlines()[0]}"


def capture(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def run_without_waiting(work: Callable[[], object]) -> None:
    """Raises where the host would wait for the device, which no graph can hold."""
    usual = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    finally:
        torch.cuda.set_sync_debug_mode(usual)


class PeakMemory:
    """By how much allocated memory on a GPU rises above what it was when this was made."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = device
        if on_gpu(device):
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            self.before = torch.cuda.memory_allocated(self.device)

    def of(self, work: Callable[[], object]) -> float | None:
        """GiB while `work` runs, with what was made before it; None on a CPU, which keeps no
        account."""
        if not on_gpu(self.device):
            work()
            return None
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        torch.cuda.synchronize(self.device)
        return (torch.cuda.max_memory_allocated(self.device) - self.before) / 2**30


def copy_rate(device: torch.device | str) -> float:
    """Bytes a second that a large copy reads and writes, the best of a few."""
    device = torch.device(device)
    source = torch.ones(COPIED.get(device.type, COPIED["cpu"]), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = min(seconds(lambda: target.copy_(source), device) for _ in range(1 + WARMUP))
    return 2 * source.nbytes / best
