"""The price of the next token after 1,000 tokens and after 1,000,000: the same, in time and bytes.

The long context is really read, in pieces. Then both states take 64 steps in turn, each time from
where they were: exact mode rebuilds its inverse every 64 tokens, so each run holds one rebuild.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from echo_lm import EchoConfig, EchoLM, EchoState, SKAState, ska
from echo_lm.bench.record import Findings, Row, Target
from echo_lm.bench.timing import interleaved, ratio, threads
from echo_lm.info import state_bytes

SEED = 0
HEADS, RANK, WIDTH, ORDER = 4, 32, 32, 2
PRESET = "synthetic-ska"
SHORT, LONG = 1_000, 1_000_000
PIECE = 2048
STEPS = 64
ROUNDS = 61
SLOWER = 1.10


@dataclass(frozen=True)
class Subject:
    """Something that reads random tokens, many or one, and hands on its state."""

    name: str
    read: Callable[[int, Any], Any]
    expected_bytes: int


def operator() -> Subject:
    """SKA itself."""
    coef = torch.randn(HEADS, ORDER + 1)

    def read(tokens: int, state: SKAState | None) -> SKAState:
        q, k = torch.randn(2, 1, tokens, HEADS, RANK)
        v = torch.randn(1, tokens, HEADS, WIDTH)
        return ska(q, k, v, coef=coef, ridge=0.03 * RANK, state=state, return_state=True)[1]

    # Of each head G, M, C, the first and the last key, the largest energy, X and its ridge; the
    # count of the row.
    numbers = 2 * RANK**2 + WIDTH * RANK + 2 * RANK + 1 + RANK**2 + 1
    return Subject("ska", read, expected_bytes=4 * HEADS * numbers + 8)


def model() -> Subject:
    """A whole language model with random weights."""
    lm = untrained(PRESET)

    def read(tokens: int, state: EchoState | None) -> Any:
        text = torch.randint(lm.config.vocab_size, (1, tokens))
        return lm(text, state=state, return_state=True).state

    # What `echo-lm info` says of the layers, and the count of the row.
    return Subject(PRESET, read, sum(state_bytes(mixer) for mixer in lm.mixers()) + 8)


def untrained(preset: str) -> EchoLM:
    """A model whose SKA layers speak: they start silent, and random weights give them a voice."""
    lm = EchoLM(EchoConfig.preset(preset)).eval()
    for mixer in lm.mixers():
        nn.init.xavier_uniform_(mixer.out_proj.weight)
    return lm


def measure() -> Findings:
    torch.manual_seed(SEED)
    with torch.inference_mode():
        measured = [compare(operator()), compare(model())]
    return Findings(
        config={
            "operator": {"heads": HEADS, "rank": RANK, "value_width": WIDTH, "order": ORDER},
            "model": PRESET,
            "contexts": [SHORT, LONG],
            "prefill_pieces": PIECE,
            "steps_per_run": STEPS,
            "rounds": ROUNDS,
            "threads": 1,
            "times": "microseconds for one token: median and fastest over rounds that alternate "
            "the two contexts; the ratio is the median of the rounds' ratios",
        },
        seed=SEED,
        tables={"time and state": [row for rows, _ in measured for row in rows]},
        targets=[target for _, targets in measured for target in targets],
    )


def compare(subject: Subject) -> tuple[list[Row], list[Target]]:
    """Time and bytes at both contexts."""
    states = {context: read_up_to(subject, context) for context in (SHORT, LONG)}
    with threads(1):
        times = interleaved(
            {context: partial(steps, subject, state) for context, state in states.items()},
            ROUNDS,
            warmup=3,
        )
    rows: list[Row] = [
        {
            "what": subject.name,
            "context": context,
            "us/token": 1e6 * median(times[context]),
            "fastest": 1e6 * min(times[context]),
            "state bytes": state.nbytes,
            "formula bytes": subject.expected_bytes,
        }
        for context, state in states.items()
    ]
    return rows, [
        Target(
            f"{subject.name}: time at {LONG:,} over time at {SHORT:,}",
            ratio(times[LONG], times[SHORT]),
            at_most=SLOWER,
        ),
        Target(
            f"{subject.name}: bytes off the formula",
            max(abs(state.nbytes - subject.expected_bytes) for state in states.values()),
            at_most=0,
        ),
    ]


def read_up_to(subject: Subject, context: int) -> Any:
    """The state after that many tokens, read in pieces."""
    state = None
    for start in range(0, context, PIECE):
        state = subject.read(min(PIECE, context - start), state)
    return state


def steps(subject: Subject, state: Any) -> float:
    """Seconds for each of a few single tokens."""
    start = time.perf_counter()
    for _ in range(STEPS):
        state = subject.read(1, state)
    return (time.perf_counter() - start) / STEPS
