"""How much a memory of fixed size holds, and where it breaks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

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
from echo_lm.ops import SKAState, delta_rule, ska
from echo_lm.plots import band, figure, line

Keys = Float[Tensor, "b n r"]
Values = Float[Tensor, "b n p"]
Memory = Callable[[Keys, Values, float], Values]
"""Read the pairs, then answer every key; the number is what there is to set."""

KEPT = 0.99
"""A memory has broken where it recalls a smaller share of its pairs."""


class Capacity(Experiment):
    """Pairs of a key and one of many values are read once; then every key is asked for."""

    name = "capacity"
    title = "Bits recalled against bytes of state, as pairs pass the rank"
    source = "section 3.1 and Proposition I.14, measured"

    def protocol(self, scale: Scale) -> dict[str, Any]:
        full = scale == "full"
        return {
            "value width": 64 if full else 8,
            "codebook": 256 if full else 16,
            "draws": 16 if full else 2,
            "pairs / rank": [0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 1, 1.25, 1.5, 2, 3, 4, 6, 8]
            if full
            else [0.5, 1, 2],
            "keys": "of length 1; random directions, or cosine 0.5 between any two on average",
            "settings": {name: list(memory.settings) for name, memory in MEMORIES.items()},
            "choice": "of the settings of a memory, the one that recalls most of its pairs in as "
            "many other draws",
            "bits": "pairs times log2(codebook) - h(e) - e log2(codebook - 1), with e the share of "
            "answers to which another value of the codebook is nearer in direction: what Fano's "
            "inequality guarantees of the mutual information; 0 at chance and below",
        }

    def cells(self, scale: Scale) -> list[Settings]:
        ranks = (16, 32, 64) if scale == "full" else (8,)
        return [{"rank": rank, "keys": keys} for rank in ranks for keys in ("random", "correlated")]

    def run(
        self, protocol: Mapping[str, Any], settings: Settings, seed: int, bench: Workbench
    ) -> dict[str, Any]:
        torch.manual_seed(seed)
        width, rank = protocol["value width"], settings["rank"]
        book = torch.nn.functional.normalize(torch.randn(protocol["codebook"], width), dim=-1)
        pairs = [max(1, round(share * rank)) for share in protocol["pairs / rank"]]
        accuracy: dict[str, list[float]] = {name: [] for name in MEMORIES}
        chosen: dict[str, list[float]] = {name: [] for name in MEMORIES}
        for n in pairs:
            shape = (protocol["draws"], n, rank)
            choose, test = (draw_pairs(*shape, settings["keys"], book) for _ in range(2))
            for name, memory in MEMORIES.items():
                best = max(memory.settings, key=lambda s: share_recalled(memory, s, *choose, book))
                chosen[name].append(best)
                accuracy[name].append(share_recalled(memory, best, *test, book))
        bits = {
            name: [
                n * bits_of_a_pair(a, len(book)) for n, a in zip(pairs, accuracy[name], strict=True)
            ]
            for name in MEMORIES
        }
        size = {
            name: [memory.bytes(rank, width, n) for n in pairs] for name, memory in MEMORIES.items()
        }
        shipped = SKAState.bytes_per_row(1, rank, width, "exact")
        return {
            "pairs": pairs,
            "pairs / rank": [n / rank for n in pairs],
            "accuracy": accuracy,
            "setting": chosen,
            "bits": bits,
            "bytes": size,
            "SKAState.bytes_per_row": shipped,
        }

    def tables(self, done: Sequence[Finished]) -> list[Table]:
        return [table_of_limits(done), table_of_peaks(done), table_of_sizes(done)]

    def remarks(self, done: Sequence[Finished]) -> list[str]:
        rank = max(distinct(done, "rank"))
        best = {
            kind: {
                name: mean(
                    peak_per_byte(name)(c.numbers) for c in select(done, keys=kind, rank=rank)
                )
                for name in MEMORIES
            }
            for kind in distinct(done, "keys")
        }
        return [
            f"Most bits recalled per byte of the leanest state, rank {rank}, {kind} keys: "
            + ", ".join(
                f"{name} {bits:.3f}" for name, bits in sorted(found.items(), key=lambda x: -x[1])
            )
            + "."
            for kind, found in best.items()
        ]

    def draw(self, done: Sequence[Finished], path: Path) -> None:
        kinds = distinct(done, "keys")
        ranks = distinct(done, "rank")
        with figure(path, rows=len(kinds), columns=2, size=(3.9, 3.0)) as axes:
            for row, kind in zip(axes, kinds, strict=True):
                middle = ranks[len(ranks) // 2]
                draw_bits(select(done, keys=kind, rank=middle), row[0])
                draw_frontier(select(done, keys=kind), row[1])
            axes[0, 1].legend(fontsize=7, loc="lower right")


def draw_pairs(
    draws: int, pairs: int, rank: int, kind: str, book: Float[Tensor, "codes p"]
) -> tuple[Keys, Int[Tensor, "b n"]]:
    """Keys of length 1, and which of the codebook's values each comes with."""
    k = torch.nn.functional.normalize(torch.randn(draws, pairs, rank), dim=-1)
    if kind == "correlated":
        shared = torch.nn.functional.normalize(torch.randn(draws, 1, rank), dim=-1)
        k = torch.nn.functional.normalize(k + shared, dim=-1)
    return k, torch.randint(len(book), (draws, pairs))


@dataclass(frozen=True)
class Kind:
    """A memory, what there is to set, and what it takes after n pairs, in fp32."""

    answer: Memory
    settings: tuple[float, ...]
    bytes: Callable[[int, int, int], int]


def linear_attention(k: Keys, v: Values, setting: float) -> Values:
    return k @ (k.mT @ v)


def delta_net(k: Keys, v: Values, beta: float) -> Values:
    """DeltaNet's update, the same beta for every pair."""
    keys, values = (x.unsqueeze(2) for x in (k, v))
    share = torch.full(keys.shape[:3], beta)
    _, state = delta_rule(keys, keys, values, share, return_state=True)
    return k @ state.S[:, 0].mT


def ska_by_key(k: Keys, v: Values, ridge: float) -> Values:
    """Order 0: a token holds a pair."""
    q, k, v = (x.unsqueeze(2) for x in (k, k, v))
    return ska(q, k, v, coef=torch.ones(1, 1), ridge=ridge, causal=False).squeeze(2)


def ska_by_step(k: Keys, v: Values, ridge: float) -> Values:
    """Order 1: a token with the key, then one with the value; asked for what came after the key."""
    name_of_content = torch.nn.functional.normalize(torch.randn_like(k), dim=-1)
    keys = torch.stack([k, name_of_content], 2).flatten(1, 2).unsqueeze(2)
    values = torch.stack([torch.zeros_like(v), v], 2).flatten(1, 2).unsqueeze(2)
    coef = torch.tensor([[0.0, 1.0]])
    answers = ska(keys, keys, values, coef=coef, ridge=ridge, causal=False)
    return answers[:, ::2].squeeze(2)


def softmax_attention(k: Keys, v: Values, sharpness: float) -> Values:
    return (sharpness * k @ k.mT).softmax(-1) @ v


def matrix_bytes(rank: int, width: int, pairs: int) -> int:
    return 4 * rank * width


def ridge_bytes(rank: int, width: int, pairs: int) -> int:
    """The value sum and half of the Gram matrix, which is symmetric."""
    return 4 * (rank * width + rank * (rank + 1) // 2)


def step_bytes(rank: int, width: int, pairs: int) -> int:
    """Also the lag sum and the last key."""
    return ridge_bytes(rank, width, pairs) + 4 * (rank * rank + rank)


def cache_bytes(rank: int, width: int, pairs: int) -> int:
    return 4 * pairs * (rank + width)


RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)

MEMORIES = {
    "SKA order 0": Kind(ska_by_key, RIDGES, ridge_bytes),
    "SKA order 1": Kind(ska_by_step, RIDGES, step_bytes),
    "delta rule, best β": Kind(delta_net, (0.1, 0.2, 0.4, 0.6, 0.8, 1.0), matrix_bytes),
    "delta rule, β = 1": Kind(delta_net, (1.0,), matrix_bytes),
    "linear attention": Kind(linear_attention, (1.0,), matrix_bytes),
    "KV cache (softmax)": Kind(softmax_attention, (8.0, 32.0, 128.0), cache_bytes),
}


def share_recalled(
    memory: Kind,
    setting: float,
    k: Keys,
    ids: Int[Tensor, "b n"],
    book: Float[Tensor, "codes p"],
) -> float:
    """Share of the answers that are nearest, in direction, to the value that was stored."""
    answers = memory.answer(k, book[ids], setting)
    return float(((answers @ book.mT).argmax(-1) == ids).float().mean())


def bits_of_a_pair(accuracy: float, codes: int) -> float:
    """What an answer is worth by Fano's inequality, at least."""
    if accuracy <= 1 / codes:
        return 0.0
    wrong = 1 - accuracy
    entropy = -sum(p * math.log2(p) for p in (accuracy, wrong) if p > 0)
    return math.log2(codes) - entropy - wrong * math.log2(codes - 1)


def limit(memory: str) -> Callable[[Mapping[str, Any]], float]:
    """The largest pairs / rank of the grid up to which the memory recalls what it should."""

    def value(numbers: Mapping[str, Any]) -> float:
        kept = 0.0
        for n, accuracy in zip(numbers["pairs / rank"], numbers["accuracy"][memory], strict=True):
            if accuracy < KEPT:
                break
            kept = n
        return kept

    return value


def peak(memory: str) -> Callable[[Mapping[str, Any]], float]:
    return lambda numbers: float(max(numbers["bits"][memory]))


def peak_per_byte(memory: str) -> Callable[[Mapping[str, Any]], float]:
    def value(numbers: Mapping[str, Any]) -> float:
        both = zip(numbers["bits"][memory], numbers["bytes"][memory], strict=True)
        return max(bits / size for bits, size in both)

    return value


def table_of_limits(done: Sequence[Finished]) -> Table:
    rows = [
        [*names(cell), *(over_seeds(cell, limit(name)) for name in MEMORIES)]
        for cell in by_settings(done)
    ]
    title = f"Largest pairs / rank of the grid up to which {KEPT:.0%} are recalled"
    return Table(title, ["rank", "keys", *MEMORIES], rows)


def table_of_peaks(done: Sequence[Finished]) -> Table:
    rows = [
        [*names(cell), *(over_seeds(cell, peak(name), "{:.0f}".format) for name in MEMORIES)]
        for cell in by_settings(done)
    ]
    title = "Most bits recalled, whatever the number of pairs (a cache has no most)"
    return Table(title, ["rank", "keys", *MEMORIES], rows)


def table_of_sizes(done: Sequence[Finished]) -> Table:
    rows = []
    for rank in distinct(done, "rank"):
        numbers = select(done, rank=rank)[0].numbers
        sizes = [f"{numbers['bytes'][name][-1]:,}" for name in MEMORIES]
        rows.append([str(rank), *sizes, f"{numbers['SKAState.bytes_per_row']:,}"])
    header = ["rank", *MEMORIES, "SKA as shipped, exact mode"]
    return Table("Bytes in the leanest form (a cache's after the most pairs), fp32", header, rows)


def by_settings(done: Sequence[Finished]) -> list[list[Finished]]:
    """The seeds of each cell together."""
    return [
        select(done, rank=rank, keys=kind)
        for kind in distinct(done, "keys")
        for rank in distinct(done, "rank")
    ]


def names(cell: Sequence[Finished]) -> tuple[str, str]:
    return str(cell[0].settings["rank"]), str(cell[0].settings["keys"])


def draw_bits(cells: Sequence[Finished], ax: Any) -> None:
    shares = cells[0].numbers["pairs / rank"]
    for i, name in enumerate(MEMORIES):
        band(ax, shares, [cell.numbers["bits"][name] for cell in cells], **line(i, name))
    ax.set(
        xlabel="pairs / rank",
        ylabel="bits recalled",
        title=f"rank {cells[0].settings['rank']}, {cells[0].settings['keys']} keys",
        ylim=(0, 1.2 * max(peak("SKA order 0")(cell.numbers) for cell in cells)),
    )


def draw_frontier(cells: Sequence[Finished], ax: Any) -> None:
    """Most bits against bytes, a point for each rank; a cache grows with what it holds."""
    ranks = distinct(cells, "rank")
    by_rank = [select(cells, rank=rank) for rank in ranks]
    for i, name in enumerate(MEMORIES):
        if name == "KV cache (softmax)":
            middle = by_rank[len(by_rank) // 2]
            size = middle[0].numbers["bytes"][name]
            bits = [cell.numbers["bits"][name] for cell in middle]
        else:
            size = [same[0].numbers["bytes"][name][0] for same in by_rank]
            seeds = zip(*by_rank, strict=True)
            bits = [[peak(name)(cell.numbers) for cell in one] for one in seeds]
        band(ax, [n / 1024 for n in size], bits, **line(i, name))
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="state in its leanest form, fp32 [KiB]",
        ylabel="most bits recalled",
        title=f"{cells[0].settings['keys']} keys, ranks {', '.join(str(r) for r in ranks)}",
    )
    ticks = [1, 2, 5, 10, 20, 50, 100]
    ax.set_xticks(ticks, [str(n) for n in ticks])
    ax.set_xticks([], minor=True)
    ax.set_xlim(1, 100)
