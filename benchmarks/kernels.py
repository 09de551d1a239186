"""The Triton kernels of SKA against flash attention, on a GPU, forward and backward together.

Nothing is timed before the kernels are shown to be the parallel form in fp64. Both sides run as
CUDA graphs, so that neither pays for Python.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.record import Findings, Row, Target
from echo_lm import ska
from echo_lm.ops.backends import SKABackend

SEED = 0
HEADS, RANK, WIDTH, ORDER = 12, 48, 64, 2
RIDGE = 0.03
"""Of the rank: the start of a learned ridge, and 3% of a random key's energy."""
SHAPES = ((16, 2048), (2, 16384))
MODES: dict[str, dict[str, Any]] = {
    "chunk": {"causal": "chunk", "chunk_size": 64},
    "exact": {"causal": "exact"},
}
ROUNDS = 30
AT_MOST = {("chunk", 2048): 1.0, ("chunk", 16384): 1 / 6}
AT_MOST |= {("exact", 2048): 2.0, ("exact", 16384): 1 / 3}
"""Time over that of flash attention."""
CHECKS: tuple[tuple[torch.dtype, int, int, int, str], ...] = (
    (torch.bfloat16, 500, 48, 64, "exact"),
    (torch.bfloat16, 500, 48, 64, "chunk"),
    (torch.bfloat16, 300, 24, 32, "exact"),
    (torch.bfloat16, 300, 56, 60, "chunk"),
    (torch.float32, 300, 48, 64, "exact"),
    (torch.float32, 300, 50, 64, "chunk"),
)
PARITY = {torch.bfloat16: 2e-2, torch.float32: 5e-5}
"""Largest error to the fp64 form, in the norm. fp32: the products are three of TF32, 5e-7 each, and
an inverse multiplies that by up to |k|^2 / ridge = 60. bf16: outputs are rounded to 4e-3, and sums
over keys of products rounded to bf16 make up the gradient of k."""


def measure() -> Findings:
    torch.manual_seed(SEED)
    checks = [check(*case) for case in CHECKS]
    times: list[Row] = []
    targets = []
    for batch, tokens in SHAPES:
        flash = timed(attention(batch, tokens))
        times.append({"what": "flash attention", "batch": batch, "tokens": tokens, **flash})
        for mode, options in MODES.items():
            ours = timed(recall(batch, tokens, "triton", **options))
            times.append({"what": f"SKA {mode}", "batch": batch, "tokens": tokens, **ours})
            name = f"SKA {mode} over flash attention, T={tokens}"
            limit = AT_MOST[mode, tokens]
            targets.append(Target(f"{name}, time", ours["ms"] / flash["ms"], at_most=limit))
            targets.append(Target(f"{name}, peak", ours["GiB"] / flash["GiB"], at_most=1.0))
    config = {
        "heads": HEADS,
        "rank": RANK,
        "value_width": WIDTH,
        "order": ORDER,
        "dtype": "bfloat16",
        "attention_width": WIDTH,
        "times": "ms forward and backward: median of CUDA graph replays",
        "GiB": "peak of allocated memory, inputs and gradients included",
        "errors": "to the parallel form in fp64, in the norm",
    }
    return Findings(config, SEED, {"errors": checks, "times": times}, targets, device="gpu")


def inputs(batch: int, tokens: int, rank: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, coef and ridge."""
    q, k = (torch.randn(batch, tokens, HEADS, rank, device="cuda") for _ in range(2))
    v = torch.randn(batch, tokens, HEADS, width, device="cuda")
    coef = torch.rand(HEADS, ORDER + 1, device="cuda")
    ridge = torch.full((HEADS,), RIDGE * rank, device="cuda")
    return [
        *(x.to(dtype).requires_grad_() for x in (q, k, v)),
        *(x.requires_grad_() for x in (coef, ridge)),
    ]


def gradients(given: list[Tensor], dy: Tensor, backend: SKABackend, **options: Any) -> list[Tensor]:
    """The answer and the gradient of every input."""
    q, k, v, coef, ridge = given
    y = ska(q, k, v, coef=coef, ridge=ridge, backend=backend, **options)
    return [y, *torch.autograd.grad(y, given, dy.to(y.dtype))]


def check(dtype: torch.dtype, tokens: int, rank: int, width: int, mode: str) -> Row:
    """Errors of one size; raises if one is too large, or if two runs differ by a bit."""
    given = inputs(1, tokens, rank, width, dtype)
    dy = torch.randn_like(given[2])
    found, again = (gradients(given, dy, "triton", **MODES[mode]) for _ in range(2))
    wide = [x.detach().double().requires_grad_() for x in given]
    truth = gradients(wide, dy, "chunk", **MODES[mode])
    size = f"{str(dtype)[6:]} {mode} T={tokens} r={rank} P={width}"
    if not all(torch.equal(a, b) for a, b in zip(found, again, strict=True)):
        raise RuntimeError(f"Two runs differ at {size}; no speed is reported.")
    names = ("y", "dq", "dk", "dv", "dcoef", "dridge")
    errors = {
        name: float(((a.double() - b).norm() / b.norm()).detach())
        for name, a, b in zip(names, found, truth, strict=True)
    }
    if not max(errors.values()) < PARITY[dtype]:
        raise RuntimeError(f"The kernels are off at {size}: {errors}; no speed is reported.")
    return {"size": size, **errors}


def recall(batch: int, tokens: int, backend: SKABackend, **options: Any) -> Callable[[], object]:
    given = inputs(batch, tokens, RANK, WIDTH, torch.bfloat16)
    dy = torch.randn_like(given[2])
    return lambda: gradients(given, dy, backend, **options)


def attention(batch: int, tokens: int) -> Callable[[], object]:
    q, k, v, dy = (
        torch.randn(batch, HEADS, tokens, WIDTH, device="cuda", dtype=torch.bfloat16)
        for _ in range(4)
    )
    given = [x.requires_grad_() for x in (q, k, v)]

    def work() -> list[Tensor]:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            y = F.scaled_dot_product_attention(*given, is_causal=True)
        return [y, *torch.autograd.grad(y, given, dy)]

    return work


def timed(work: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of a replay, and the peak of memory of a plain run."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() / 2**30
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS + 1)]
    for _ in range(3):
        graph.replay()
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    spans = [a.elapsed_time(b) for a, b in pairwise(marks)]
    return {"ms": median(spans), "fastest": min(spans), "GiB": peak}
