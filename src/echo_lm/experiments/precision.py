"""What is left of the statistics after a million tokens, in fp32, TF32 and bf16."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from echo_lm.analysis.operator import Sums, regularised
from echo_lm.experiments.base import (
    Experiment,
    Finished,
    Scale,
    Settings,
    Table,
    Workbench,
    distinct,
    over_seeds,
    select,
)
from echo_lm.ops.ska.linalg import spd_inverse
from echo_lm.plots import band, figure, line

REPEATED = 32
FACTS, FAINT = 0.05, 0.03
SHOWN_RIDGE = 3e-2
HOPELESS = 10.0
"""Relative errors above this, and what is not finite, are drawn here."""


def as_is(x: Tensor) -> Tensor:
    return x


def to_bf16(x: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    return x.bfloat16().float()


def to_tf32(x: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Ten bits of mantissa, to nearest, ties to even; infinities and NaN stay what they are."""
    bits = x.view(torch.int32)
    even = (bits >> 13) & 1
    rounded = ((bits + (0xFFF + even)) & ~0x1FFF).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x)


@dataclass(frozen=True)
class Arithmetic:
    """How numbers are rounded on their way into a product, and where sums and X are kept."""

    product: Callable[[Tensor], Tensor]
    kept: Callable[[Tensor], Tensor] = as_is
    by_chunk: bool = False
    """A chunk is summed on its own before it is added to what was read before, as in parallel."""


ARITHMETIC = {
    "fp32": Arithmetic(as_is),
    "fp32 summed by chunk": Arithmetic(as_is, by_chunk=True),
    "TF32 products": Arithmetic(to_tf32),
    "bf16 products": Arithmetic(to_bf16),
    "bf16 sums": Arithmetic(to_bf16, to_bf16),
}


class Precision(Experiment):
    """Token after token as exact mode decodes, against the same sums and inverse in fp64."""

    name = "precision"
    title = "Error of fp32, TF32 and bf16 statistics over a million tokens"
    source = "ours"

    def protocol(self, scale: Scale) -> dict[str, Any]:
        full = scale == "full"
        return {
            "rank": 48 if full else 8,
            "value width": 16 if full else 4,
            "chunk": 64,
            "measured after": [4**i for i in range(4, 11)] if full else [256, 1024],
            "ridges": [1e-3, 3e-2],
            "ridge": "absolute, where the largest |k|^2 is 1: the paper's share, and about ours at "
            "the start",
            "keys": f"random: of length 1; facts: one in {1 / FACTS:g} random and of length 1, the "
            f"others of length {FAINT:g}; repeated: {REPEATED} random ones of length 1 in turn, "
            "for ever",
            "values": "a fixed linear map of the keys",
            "arithmetic": "products: operands are rounded, sums and X kept in fp32; bf16 sums: "
            "these are kept in bf16 too",
            "rebuilt": "X follows the keys by Sherman-Morrison; where a chunk begins it is made "
            "anew from G, in fp32, or never. Measured after a chunk's last token, before that",
            "error of G, M, C, X": "in the Frobenius norm, relative",
            "error of answers": "worst over largest entry, all orders up to 2 weighing the same, "
            f"{REPEATED} keys of length 1 of the stream asked for, the reading itself in fp64",
        }

    def cells(self, scale: Scale) -> list[Settings]:
        return [{"arithmetic": name} for name in ARITHMETIC]

    def run(
        self, protocol: Mapping[str, Any], settings: Settings, seed: int, bench: Workbench
    ) -> dict[str, Any]:
        counts, size = protocol["measured after"], protocol["chunk"]
        streams = Streams(seed, protocol["rank"], protocol["value width"])
        memory = Memory(ARITHMETIC[settings["arithmetic"]], protocol)
        truth = Truth(protocol)
        found = []
        with Complaints() as complaints:
            for read, chunk in enumerate(streams.chunks(size, counts[-1]), start=1):
                memory.read(*chunk)
                truth.read(*chunk)
                if read * size in counts:
                    found.append(compare(memory, truth.sums, streams.asked.double()))
                memory.rebuild()
        return {
            "tokens": counts,
            "ridges": protocol["ridges"],
            "found": found,
            "rebuilds that needed jitter": complaints.heard / (counts[-1] // size),
        }

    def tables(self, done: Sequence[Finished]) -> list[Table]:
        return [table_of_sums(done), *(table_of_answers(done, kind) for kind in KINDS)]

    def remarks(self, done: Sequence[Finished]) -> list[str]:
        return [remark(select(done, arithmetic=name)) for name in distinct(done, "arithmetic")]

    def draw(self, done: Sequence[Finished], path: Path) -> None:
        with figure(path, rows=2, columns=2, size=(3.8, 3.0)) as axes:
            panels = axes.flatten()
            for ax, kind in zip(panels, KINDS, strict=False):
                draw_answers(done, kind, ax)
            draw_sums(done, panels[-1])
            panels[2].legend(loc="lower right", fontsize=7)


class Complaints(logging.Filter):
    """Counts, and keeps to itself, what the factorisation says of matrices it had to help."""

    heard = 0

    def filter(self, record: logging.LogRecord) -> bool:
        self.heard += 1
        return False

    def __enter__(self) -> Complaints:
        LOG.addFilter(self)
        return self

    def __exit__(self, *exception: object) -> None:
        LOG.removeFilter(self)


LOG = logging.getLogger("echo_lm")
KINDS = ("random keys", "facts in faint noise", "repeated keys")


class Streams:
    """Keys and values of every kind, side by side, a chunk at a time."""

    def __init__(self, seed: int, rank: int, width: int) -> None:
        self.source = torch.Generator().manual_seed(seed)
        self.rank = rank
        self.map = torch.randn(width, rank, generator=self.source)
        self.repeated = self.directions(REPEATED)
        facts = self.directions(REPEATED)
        self.asked = torch.stack([self.directions(REPEATED), facts, self.repeated])
        """Keys to ask for, of each kind."""

    def directions(self, n: int) -> Float[Tensor, "n r"]:
        drawn = torch.randn(n, self.rank, generator=self.source)
        return torch.nn.functional.normalize(drawn, dim=-1)

    def chunks(
        self, size: int, tokens: int
    ) -> Iterator[tuple[Float[Tensor, "kinds t r"], Float[Tensor, "kinds t p"]]]:
        """The first has the keys that are asked for."""
        first = self.asked[:, :size]
        for _ in range(tokens // size):
            fact = torch.rand(size, 1, generator=self.source) < FACTS
            length = torch.where(fact, 1.0, FAINT)
            again = self.repeated.repeat(math.ceil(size / REPEATED), 1)[:size]
            keys = torch.stack([self.directions(size), length * self.directions(size), again])
            keys[:, : first.shape[1]] = first
            first = keys[:, :0]
            yield keys, keys @ self.map.mT


class Memory:
    """Sums of each kind of keys, and for each ridge an X that is rebuilt and one that is not."""

    def __init__(self, arithmetic: Arithmetic, protocol: Mapping[str, Any]) -> None:
        self.arithmetic = arithmetic
        kinds, rank, width = len(KINDS), protocol["rank"], protocol["value width"]
        self.gram, self.lag = (torch.zeros(kinds, rank, rank) for _ in range(2))
        self.value = torch.zeros(kinds, width, rank)
        self.last_key = torch.zeros(kinds, rank)
        self.ridge = torch.tensor(protocol["ridges"])[:, None]
        start = torch.eye(rank) / self.ridge[..., None, None]
        self.inverse = start.expand(2, -1, kinds, -1, -1).clone()
        """X, [rebuilt or never, ridge, kind, r, r]"""

    def read(self, keys: Float[Tensor, "kinds t r"], values: Float[Tensor, "kinds t p"]) -> None:
        """Token after token."""
        product, kept = self.arithmetic.product, self.arithmetic.kept
        before = (self.gram, self.lag, self.value)
        if self.arithmetic.by_chunk:
            self.gram, self.lag, self.value = map(torch.zeros_like, before)
        for k, v in zip(product(keys).unbind(1), product(values).unbind(1), strict=True):
            row = k[:, None]
            self.gram = kept(self.gram.addcmul_(k[..., None], row))
            self.lag = kept(self.lag.addcmul_(k[..., None], self.last_key[:, None]))
            self.value = kept(self.value.addcmul_(v[..., None], row))
            Xk = product(product(self.inverse) @ k[..., None])
            gain = 1 / (1 + row @ Xk)
            self.inverse = kept(self.inverse.addcmul_(gain * Xk, Xk.mT, value=-1))
            self.last_key = k
        if self.arithmetic.by_chunk:
            now = (self.gram, self.lag, self.value)
            self.gram, self.lag, self.value = map(torch.add, before, now)

    def rebuild(self) -> None:
        """Make the first half of the inverses anew from the sums."""
        gram = self.gram.expand(len(self.ridge), -1, -1, -1)
        self.inverse[0] = self.arithmetic.kept(spd_inverse(regularised(gram, self.ridge)))


class Truth:
    """The sums of the same keys and values in fp64."""

    def __init__(self, protocol: Mapping[str, Any]) -> None:
        kinds, rank, width = len(KINDS), protocol["rank"], protocol["value width"]
        gram, lag, value = (
            torch.zeros(kinds, rows, rank, dtype=torch.float64) for rows in (rank, rank, width)
        )
        self.sums = Sums(gram, lag, value)
        self.last_key = torch.zeros(kinds, 1, rank, dtype=torch.float64)

    def read(self, keys: Float[Tensor, "kinds t r"], values: Float[Tensor, "kinds t p"]) -> None:
        k, v = keys.double(), values.double()
        before = torch.cat([self.last_key, k[:, :-1]], 1)
        new = (k.mT @ k, k.mT @ before, v.mT @ k)
        self.sums = Sums(*(old + more for old, more in zip(self.sums, new, strict=True)))
        self.last_key = k[:, -1:]


def compare(memory: Memory, truth: Sums, asked: Float[Tensor, "kinds n r"]) -> dict[str, list[Any]]:
    """Relative errors; of X and of answers for the rebuilt X and the other, each ridge and kind."""
    got = Sums(*(x.double() for x in (memory.gram, memory.lag, memory.value)))
    of_sums = [
        (a - b).norm(dim=(-2, -1)) / b.norm(dim=(-2, -1)) for a, b in zip(got, truth, strict=True)
    ]
    gram = truth.gram.expand(len(memory.ridge), -1, -1, -1)
    X, wanted = memory.inverse.double(), torch.linalg.inv(regularised(gram, memory.ridge))
    answers, right = answers_of(got, X, asked), answers_of(truth, wanted, asked)
    off = (answers - right).abs().amax((-2, -1)) / right.abs().amax((-2, -1))
    return {
        **dict(zip(("G", "M", "C"), map(numbers, of_sums), strict=True)),
        "X": numbers(frobenius(X - wanted) / frobenius(wanted)),
        "answers": numbers(off),
    }


def answers_of(
    known: Sums, X: Float[Tensor, "*n kinds r r"], asked: Float[Tensor, "kinds n r"]
) -> Float[Tensor, "*n kinds p n"]:
    """sum_j C X (M X)^j q / 3, j = 0, 1, 2."""
    u = X @ asked.mT
    mixed = u
    for _ in range(2):
        u = X @ (known.lag @ u)
        mixed = mixed + u
    return known.value @ mixed / 3


def frobenius(a: Float[Tensor, "*b m n"]) -> Float[Tensor, "*b"]:
    return torch.linalg.matrix_norm(a)


def numbers(x: Float[Tensor, "*n"]) -> Any:
    """Nested lists, with None for what is not finite."""
    if x.dim():
        return [numbers(each) for each in x]
    return float(x) if bool(x.isfinite()) else None


def error(i: int, *place: Any) -> Callable[[Mapping[str, Any]], float]:
    """Reads an error after the i-th number of tokens; one that is not finite counts as infinite."""

    def value(cell: Mapping[str, Any]) -> float:
        found: Any = cell["found"][i]
        for part in place:
            found = found[part]
        return math.inf if found is None else float(found)

    return value


def shown(cells: Sequence[Finished], i: int, *place: Any) -> str:
    """Mean and deviation over seeds; in words where there is no number."""
    found = [error(i, *place)(cell.numbers) for cell in cells]
    if all(map(math.isfinite, found)):
        return over_seeds(cells, error(i, *place), "{:.1e}".format)
    return "not finite"


def table_of_sums(done: Sequence[Finished]) -> Table:
    counts = done[0].numbers["tokens"]
    rows = [
        [kind, name, *(shown(select(done, arithmetic=name), i, part, place) for i, part in columns)]
        for columns in [[(i, part) for part in ("G", "M", "C") for i in (0, -1)]]
        for place, kind in enumerate(KINDS)
        for name in distinct(done, "arithmetic")
    ]
    header = [f"{part} after {counts[i]:,}" for part in ("G", "M", "C") for i in (0, -1)]
    return Table("Relative error of the sums", ["keys", "arithmetic", *header], rows)


def table_of_answers(done: Sequence[Finished], kind: str) -> Table:
    counts, ridges = done[0].numbers["tokens"], done[0].numbers["ridges"]
    columns = [
        (what, i, rebuilt) for what in ("X", "answers") for i in (0, -1) for rebuilt in (0, 1)
    ]
    rows = [
        [
            f"{ridge:g}",
            name,
            *(
                shown(select(done, arithmetic=name), i, what, rebuilt, j, KINDS.index(kind))
                for what, i, rebuilt in columns
            ),
        ]
        for j, ridge in enumerate(ridges)
        for name in distinct(done, "arithmetic")
    ]
    header = [
        f"{what} after {counts[i]:,}, {'never rebuilt' if rebuilt else 'rebuilt'}"
        for what, i, rebuilt in columns
    ]
    title = f"Relative error of X and of answers, {kind}"
    return Table(title, ["ridge / max |k|²", "arithmetic", *header], rows)


def remark(cells: Sequence[Finished]) -> str:
    """The worst answers after the most tokens at the ridge that is shown."""
    j = cells[0].numbers["ridges"].index(SHOWN_RIDGE)
    told = []
    for place, kind in enumerate(KINDS):
        both = (shown(cells, -1, "answers", rebuilt, j, place) for rebuilt in (0, 1))
        told.append(f"{kind} {' and '.join(both)}")
    jittered = over_seeds(
        cells, lambda found: found["rebuilds that needed jitter"], "{:.0%}".format
    )
    return (
        f"{cells[0].settings['arithmetic']}, ridge {SHOWN_RIDGE:g}, after "
        f"{cells[0].numbers['tokens'][-1]:,} tokens, answers with X rebuilt and never rebuilt: "
        f"{'; '.join(told)}. In {jittered} of the rebuilds some Gram matrix needed jitter."
    )


def draw_answers(done: Sequence[Finished], kind: str, ax: Any) -> None:
    """Filled: rebuilt. Hollow: never."""
    j = done[0].numbers["ridges"].index(SHOWN_RIDGE)
    for rebuilt in (0, 1):
        place = ("answers", rebuilt, j, KINDS.index(kind))
        draw_lines(done, place, ax, hollow=bool(rebuilt))
    ax.set(
        ylabel=f"error of answers, λ = {SHOWN_RIDGE:g} (cut at {HOPELESS:g})",
        title=f"{kind} (hollow: X never rebuilt)",
    )


def draw_sums(done: Sequence[Finished], ax: Any) -> None:
    draw_lines(done, ("G", KINDS.index("repeated keys")), ax, hollow=False)
    ax.set(ylabel="relative error of G", title="the sum G itself, repeated keys")


def draw_lines(done: Sequence[Finished], place: Sequence[Any], ax: Any, *, hollow: bool) -> None:
    counts = done[0].numbers["tokens"]
    for name in distinct(done, "arithmetic"):
        curves = [
            [min(error(n, *place)(cell.numbers), HOPELESS) for n in range(len(counts))]
            for cell in select(done, arithmetic=name)
        ]
        look = line(list(ARITHMETIC).index(name), None if hollow else name)
        band(ax, counts, curves, **look | ({"markerfacecolor": "white"} if hollow else {}))
    ax.set(xscale="log", yscale="log", xlabel="tokens read", ylim=(1e-8, 2 * HOPELESS))
