"""What each precision of the kernels' products costs in error, and what it saves in time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from statistics import median
from typing import Any

import torch

from echo_lm.bench.contenders import Contender, Inputs, Size, leaves
from echo_lm.bench.parity import both_passes, error, in_fp64, weights
from echo_lm.bench.record import Row
from echo_lm.bench.runner import Cell, Tell
from echo_lm.bench.timing import interleaved, replayable, seconds, warm

CHOICES = ("tf32x3", "bf16x3", "tf32", "bf16")
AS_IT_IS = "as it is"
REPEATED = 32
"""Keys that come again and again: the hardest for an inverse."""


def cells(modes: Sequence[Contender], size: Size, device: str, rounds: int) -> list[Cell]:
    """A table for each of these modes of SKA."""
    return [
        Cell(
            f"precision of {one.name}, {size.batch} x {size.tokens:,} tokens",
            partial(cost, one, size, torch.bfloat16, device, rounds),
        )
        for one in modes
    ]


def cost(
    one: Contender, size: Size, dtype: torch.dtype, device: str, rounds: int, tell: Tell
) -> list[Row]:
    """As it is, then with one kind of product computed otherwise: time of both passes, and errors
    to fp64 in the norm, the largest of the answer and the gradients."""
    from echo_lm.ops.ska.triton import PRECISION  # only here: importing triton takes a while

    usual = PRECISION[dtype]
    variants = {(AS_IT_IS, described(usual)): usual} | {
        (product, choice): replace(usual, **{product: choice})
        for product, now in asdict(usual).items()
        for choice in CHOICES
        if choice != now
    }
    given = one.draw(size, dtype)
    texts = {"random keys": given, f"{REPEATED} keys again and again": with_few_keys(given)}
    dy = weights(one.answer(given).detach())
    assert one.truth is not None
    truths = {text: both_passes(one.truth.answer, in_fp64(x), dy) for text, x in texts.items()}

    def both(chosen: Any, text: Inputs) -> Inputs:
        with computed_in(PRECISION, dtype, chosen):
            return both_passes(one.answer, text, dy)

    rows: list[Row] = []
    works: dict[tuple[str, str], Callable[[], object]] = {}
    for (product, choice), chosen in variants.items():
        tell(f"{product} {choice}")
        row: Row = {"what": product, "in": choice}
        for text, wanted in truths.items():
            row[f"error, {text}"] = worst(both(chosen, texts[text]), wanted)
        rows.append(row)
        work = partial(both, chosen, given)
        works[product, choice] = replayable(warm(work, device), device)[0]
    tell("timing")
    timed = {key: partial(seconds, work, device) for key, work in works.items()}
    for row, taken in zip(rows, interleaved(timed, rounds).values(), strict=True):
        row["ms"] = 1e3 * median(taken)
    return rows


def described(precision: Any) -> str:
    return ", ".join(f"{product} {choice}" for product, choice in asdict(precision).items())


def with_few_keys(given: Inputs) -> Inputs:
    """The same, its first keys in turn for ever."""
    k = given["k"].detach()
    again = -(-k.shape[1] // REPEATED)
    few = k[:, :REPEATED].repeat(1, again, 1, 1)[:, : k.shape[1]]
    return leaves(**given | {"k": few})


@contextmanager
def computed_in(table: dict[Any, Any], dtype: torch.dtype, chosen: Any) -> Iterator[None]:
    """Within it the kernels split their products so."""
    usual = table[dtype]
    table[dtype] = chosen
    try:
        yield
    finally:
        table[dtype] = usual


def worst(found: Inputs, wanted: Inputs) -> float | str:
    errors = [error(x, wanted[name]) for name, x in found.items()]
    return max(errors) if all(map(math.isfinite, errors)) else "not finite"
