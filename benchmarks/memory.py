"""How much memory a piece of work takes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def saved_bytes(forward: Callable[[], Tensor]) -> int:
    """What autograd keeps for the backward pass, inputs included, each storage counted once."""
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        result = forward()  # holds the graph, so that no address is used twice
    total = sum(storages.values())
    del result
    return total


def peak_bytes(work: Callable[[int], object], size: int, *, warmup: int, runs: int) -> float:
    """By how much `work(size)` raises the resident memory of a fresh process (Linux).

    The median of several: one alone differs from the next by up to a fifth, as the allocator
    happens to reuse what was freed.
    """
    return median(_in_fresh_process(work, size, warmup) for _ in range(runs))


def _in_fresh_process(work: Callable[[int], object], size: int, warmup: int) -> int:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(_growth, work, size, warmup).result()


def _growth(work: Callable[[int], object], size: int, warmup: int) -> int:
    work(warmup)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
    before = _status("VmRSS")
    work(size)
    return _status("VmHWM") - before


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; peak memory is measured on Linux only.")
