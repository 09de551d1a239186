"""Exact SKA in parallel against the naive loop, and its growth with the length of the sequence.

Nothing is timed before the two are shown to be the same map at the very size that is timed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor

from benchmarks.memory import peak_bytes, saved_bytes
from echo_lm import ska
from echo_lm.bench.record import Findings, Row, Target
from echo_lm.bench.timing import interleaved, ratio, threads
from echo_lm.ops.backends import SKABackend

SEED = 0
BATCH, HEADS, RANK, WIDTH, ORDER = 1, 4, 32, 32, 2
RIDGE = 0.03 * RANK
TOKENS = 2048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
ROUNDS = 5
PEAK_RUNS = 7
SPEEDUP = 30
SLOWER = 1.5
LARGER = {"saved MiB": 1.01, "peak MiB": 1.25}
"""How much more a token may cost in the longest sequence than in the shortest."""
LONGEST_OVER_SHORTEST = f"T={LENGTHS[-1]} over T={LENGTHS[0]}"
PARITY = {torch.float64: 1e-10, torch.float32: 2e-4}
"""Largest difference to the naive loop in fp64, relative to the largest entry.

In fp32 an inverse loses up to |k|^2 / ridge = 60 times 1e-7 in each of its three applications,
which makes 2e-5, and a gradient up to ten times that.
"""


def inputs(tokens: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random q, k, v, coef and ridge."""
    random = torch.Generator().manual_seed(SEED)

    def normal(*shape: int) -> Tensor:
        x = torch.randn(*shape, generator=random, dtype=torch.float64)
        return x.to(dtype).requires_grad_()

    q, k = normal(BATCH, tokens, HEADS, RANK), normal(BATCH, tokens, HEADS, RANK)
    v, coef = normal(BATCH, tokens, HEADS, WIDTH), normal(HEADS, ORDER + 1)
    ridge = torch.full((HEADS,), RIDGE, dtype=dtype, requires_grad=True)
    return {"q": q, "k": k, "v": v, "coef": coef, "ridge": ridge}


def both_passes(backend: SKABackend, given: dict[str, Tensor]) -> tuple[float, float]:
    """Seconds forward and backward."""
    for x in given.values():
        x.grad = None
    start = time.perf_counter()
    y = ska(**given, backend=backend)
    middle = time.perf_counter()
    y.backward(torch.ones_like(y))
    return middle - start, time.perf_counter() - middle


def train_on(tokens: int) -> None:
    with threads(1):
        both_passes("chunk", inputs(tokens))


def measure() -> Findings:
    parity = check_parity()
    cores = os.cpu_count() or 1
    speed = [row for count in sorted({1, cores}) for row in compare(count)]
    growth, slower = over_lengths()
    return Findings(
        config={
            "operator": "ska, causal exact, float32",
            "batch": BATCH,
            "heads": HEADS,
            "rank": RANK,
            "value_width": WIDTH,
            "order": ORDER,
            "ridge": RIDGE,
            "chunk_size": 64,
            "rounds": ROUNDS,
            "parity": "largest difference to naive in float64, relative to the largest entry",
            "speed": "medians over rounds that alternate the two sides in one process",
            "growth": "one thread; times are medians over rounds that alternate the lengths",
            "saved": "what autograd keeps for the backward pass, inputs included",
            "peak": f"growth of resident memory, median of {PEAK_RUNS} fresh processes",
        },
        seed=SEED,
        tables={"parity": parity, f"speed at T={TOKENS}": speed, "growth": growth},
        targets=[
            *(
                Target(
                    f"times faster than naive, {row['pass']}, {cores} threads",
                    float(row["times faster"]),
                    at_least=SPEEDUP,
                )
                for row in speed
                if row["threads"] == cores
            ),
            Target(f"time per token, {LONGEST_OVER_SHORTEST}", slower, at_most=SLOWER),
            *(
                Target(
                    f"{column} per token, {LONGEST_OVER_SHORTEST}",
                    per_token(growth[-1], column) / per_token(growth[0], column),
                    at_most=limit,
                )
                for column, limit in LARGER.items()
            ),
        ],
    )


def per_token(row: Row, column: str) -> float:
    return float(row[column]) / float(row["T"])


def check_parity() -> list[Row]:
    """Output and gradients of the parallel form against the naive loop in fp64."""
    truth = output_and_gradients("naive", torch.float64)
    rows: list[Row] = []
    for dtype, tolerance in PARITY.items():
        row: Row = {"chunk in": str(dtype).removeprefix("torch.")}
        for name, got in output_and_gradients("chunk", dtype).items():
            error = float((got - truth[name]).abs().max() / truth[name].abs().max())
            if not error < tolerance:
                raise SystemExit(
                    f"No speed without parity: {name} of the parallel form is {error:.1e} from "
                    f"the naive loop in {dtype}, more than {tolerance:.0e}."
                )
            row[name] = error
        rows.append(row)
    return rows


def output_and_gradients(backend: SKABackend, dtype: torch.dtype) -> dict[str, Tensor]:
    given = inputs(TOKENS, dtype)
    y = ska(**given, backend=backend)
    y.backward(torch.ones_like(y))
    gradients = {f"d{name}": x.grad.double() for name, x in given.items() if x.grad is not None}
    return {"y": y.detach().double(), **gradients}


def compare(thread_count: int) -> list[Row]:
    """Naive and parallel, forward and backward."""
    given = inputs(TOKENS)
    sides: dict[str, Callable[[], tuple[float, float]]] = {
        "naive": lambda: both_passes("naive", given),
        "chunk": lambda: both_passes("chunk", given),
    }
    with threads(thread_count):
        times = interleaved(sides, ROUNDS)
    naive, chunk = (
        {
            "forward": [forward for forward, _ in times[side]],
            "backward": [backward for _, backward in times[side]],
            "both": [forward + backward for forward, backward in times[side]],
        }
        for side in sides
    )
    return [
        {
            "threads": thread_count,
            "pass": part,
            "naive ms": 1e3 * median(naive[part]),
            "chunk ms": 1e3 * median(chunk[part]),
            "times faster": ratio(naive[part], chunk[part]),
        }
        for part in naive
    ]


def over_lengths() -> tuple[list[Row], float]:
    """Time and memory of the parallel form; how much more time a token takes in the longest."""
    given = {tokens: inputs(tokens) for tokens in LENGTHS}
    works = {tokens: partial(both_passes, "chunk", given[tokens]) for tokens in LENGTHS}
    with threads(1):
        times = interleaved(works, ROUNDS)
    rows: list[Row] = []
    for tokens in LENGTHS:
        forward, backward = (median(part) for part in zip(*times[tokens], strict=True))
        saved = saved_bytes(partial(ska, **given[tokens], backend="chunk"))
        peak = peak_bytes(train_on, tokens, warmup=64, runs=PEAK_RUNS)
        rows.append(
            {
                "T": tokens,
                "forward ms": 1e3 * forward,
                "backward ms": 1e3 * backward,
                "both ms": 1e3 * (forward + backward),
                "saved MiB": saved / 2**20,
                "peak MiB": peak / 2**20,
            }
        )
    a_token = [[sum(both) / tokens for both in times[tokens]] for tokens in LENGTHS]
    return rows, ratio(a_token[-1], a_token[0])
