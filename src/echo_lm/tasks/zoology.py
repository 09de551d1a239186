"""MQAR as Zoology publishes it (Arora et al. 2024, HazyResearch/zoology)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from echo_lm.model.loss import IGNORED_LABEL
from echo_lm.tasks.base import Batch, Family, check, check_option
from echo_lm.tasks.draws import Draws
from echo_lm.tasks.mixture import Mixture, Repeated
from echo_lm.tasks.symbols import Symbols

VOCABULARY = 8192
KEYS = VOCABULARY // 2 - 1
VALUES = VOCABULARY // 2
FIRST_KEY, FIRST_VALUE = 1, VOCABULARY // 2
POWER = 0.01

Filler = Literal["random", "zero"]
FILLERS: tuple[Filler, ...] = get_args(Filler)


@dataclass(frozen=True)
class Zoology(Family):
    """Pairs at the start, then each key once, early places being the likelier ones by far.

    The answer is asked for at a query but does not follow it: other places hold filler, random
    tokens of the whole vocabulary or zeros. Filler may look like a key; pairs stand before it.
    """

    pairs: int = 8
    length: int = 64
    filler: Filler = "random"

    symbols: ClassVar = Symbols((("_", 1), ("k", KEYS), ("v", VALUES)))

    def __post_init__(self) -> None:
        check("pairs", self.pairs, at_least=1, at_most=KEYS)
        check("length", self.length, at_least=4 * self.pairs, why=", four for each pair")
        if self.length % 2:
            raise ValueError(f"length must be even, as queries stand two apart, got {self.length}.")
        check_option("filler", self.filler, FILLERS)

    def examples(self, draws: Draws) -> Batch:
        keys = FIRST_KEY + draws.choose(KEYS, self.pairs)
        values = FIRST_VALUE + draws.choose(VALUES, self.pairs)
        context = 2 * self.pairs
        queries = context + 2 * self.gaps(draws)
        if self.filler == "random":
            tokens = draws.below(VOCABULARY, self.length)
        else:
            tokens = keys.new_zeros(draws.rows, self.length)
        tokens[:, :context] = torch.stack([keys, values], dim=2).flatten(1)
        tokens.scatter_(1, queries, keys)
        labels = torch.full_like(tokens, IGNORED_LABEL).scatter_(1, queries + 1, values)
        facts = torch.zeros_like(tokens, dtype=torch.bool)
        facts[:, :context] = True
        return Batch(tokens, labels, facts)

    def gaps(self, draws: Draws) -> Tensor:
        """Query slots in the order of the keys: a race in which earlier slots are faster.

        The logarithm may differ between devices in its last bit, and with it, once in a long
        while, who comes first.
        """
        slots = (self.length - 2 * self.pairs) // 2
        times = -draws.uniform(slots).log() / power_law(slots).to(draws.device)
        return times.sort(dim=1, stable=True).indices[:, : self.pairs]


def power_law(slots: int) -> Float[Tensor, " slots"]:
    """How likely a slot is to be drawn, up to a factor."""
    return torch.arange(1, slots + 1, dtype=torch.float64).pow(POWER - 1)


@dataclass(frozen=True)
class Size:
    """Sequences of one length and number of pairs, and how many of them."""

    length: int
    pairs: int
    examples: int


PROTOCOL_1 = tuple(
    Size(length, pairs, 100_000) for length, pairs in ((64, 4), (128, 8), (256, 16), (512, 64))
)
"""Trained and tested one by one, zeros between queries, 3,000 test examples each."""

PROTOCOL_2 = (
    Size(64, 4, 100_000),
    Size(128, 8, 20_000),
    Size(256, 16, 20_000),
    Size(256, 32, 20_000),
    Size(256, 64, 20_000),
)
"""Trained on together, tested on `PROTOCOL_2_TEST`."""

PROTOCOL_2_TEST = tuple(
    Size(length, pairs, 1_000)
    for length, pairs in ((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256))
)


def protocol_1(size: Size) -> Repeated:
    """One of the settings of protocol 1, its training examples coming back every epoch."""
    return Repeated(Zoology(size.pairs, size.length, "zero"), size.examples)


def mixed(sizes: Sequence[Size], filler: Filler = "random") -> Mixture:
    """Sizes trained on together, their examples coming back every epoch."""
    parts = [Repeated(Zoology(s.pairs, s.length, filler), s.examples) for s in sizes]
    turn = math.gcd(*(s.examples for s in sizes))
    return Mixture(tuple(parts), tuple(s.examples // turn for s in sizes))


def protocol_2(filler: Filler = "random") -> Mixture:
    """The training set of protocol 2."""
    return mixed(PROTOCOL_2, filler)


def protocol_2_tests(filler: Filler = "random") -> list[Zoology]:
    return [Zoology(s.pairs, s.length, filler) for s in PROTOCOL_2_TEST]
