"""Table 2: trained on 64 tokens, read at up to a million."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from echo_lm.experiments.base import (
    Experiment,
    Finished,
    Scale,
    Settings,
    Table,
    Workbench,
    distinct,
    over_seeds,
    percent,
    select,
)
from echo_lm.experiments.training import TOKENS_AT_ONCE, fit, found_at, preset, read_over
from echo_lm.plots import band, figure, line
from echo_lm.tasks import NIAH, Mixture

FAR_TOKENS_AT_ONCE = 1 << 23
"""Whole haystacks are drawn before they are read in pieces: this many tokens take half a GiB."""

OURS = "SSM+SKA (ours)"
TIED = "SSM+SKA (ours, tied start)"
MODELS = {
    "SSM": preset("synthetic-ssm"),
    "SSM+Attn": preset("synthetic-attention"),
    "SSM+SKA (paper)": preset("synthetic-ska-paper"),
    "SSM+SKA (paper, S = 16)": preset("synthetic-ska-paper", chunk_size=16),
    OURS: preset("synthetic-ska"),
    TIED: preset("synthetic-ska", tied_start=True),
}
"""The paper's operator twice: a chunk does not see itself, so that at S = 64 it has nothing to
read in training."""

PAPER_MODELS = {"SSM": "SSM", "SSM+Attn": "SSM+Attn", "SSM+SKA (paper)": "SSM+SKA"}
PAPER = {
    "SSM": {64: 88.6, 128: 82.1, 256: 75.8, 512: 66.9, 1024: 37.3, 2048: 2.0, 4096: 2.0},
    "SSM+Attn": {64: 88.5, 128: 97.4, 256: 92.9, 512: 78.1, 1024: 64.8, 2048: 42.5, 4096: 5.0},
    "SSM+SKA": {64: 94.5, 128: 89.4, 256: 93.3, 512: 95.6, 1024: 86.4, 2048: 81.2, 4096: 65.1},
}
"""Table 2, one needle, in percent."""


class Length(Experiment):
    """Needles in 64 tokens of haystack, then in more and more of it."""

    name = "length"
    title = "Needles in a haystack: trained on 64 tokens, read at up to a million"
    source = "Table 2"

    def protocol(self, scale: Scale) -> dict[str, Any]:
        full = scale == "full"
        return {
            "steps": 1500 if full else 20,
            "batch": 16 if full else 4,
            "lr": 2e-3,
            "warmup": 100 if full else 5,
            "evaluate_every": 250 if full else 10,
            "evaluate_rows": 128 if full else 16,
            "trained on needles": [1, 2, 4, 8],
            "trained on lengths": [32, 64],
            "asked": "all needles",
            "needles": [1, 4],
            "lengths": [2**n for n in range(6, 13)] if full else [64, 128, 256],
            "lengths for ours": [16_384] if full else [512],
            "rows": 64 if full else 8,
            "rows for ours": 32 if full else 2,
            "far lengths": [131_072, 1_048_576] if full else [4096],
            "rows far away": 8 if full else 1,
        }

    def cells(self, scale: Scale) -> list[Settings]:
        """What is read far away is trained again, so that it can be left to a faster machine."""
        near = [{"model": model, "read": "near"} for model in MODELS]
        return [*near, {"model": TIED, "read": "far"}]

    def run(
        self, protocol: Mapping[str, Any], settings: Settings, seed: int, bench: Workbench
    ) -> dict[str, Any]:
        haystacks = Mixture(
            tuple(
                NIAH(needles, length, queries=needles)
                for needles in protocol["trained on needles"]
                for length in protocol["trained on lengths"]
            )
        )
        test = NIAH(4, max(protocol["trained on lengths"]), queries=4)
        fitted = fit(MODELS[settings["model"]], haystacks, protocol, seed, bench, test=test)
        readings = []
        for lengths, rows, at_once in to_read(protocol, settings):
            grid = grid_of(protocol["needles"], lengths)
            readings += read_over(fitted, grid, rows=rows, seed=seed, tokens_at_once=at_once)
        return {**fitted.numbers(), "readings": readings}

    def tables(self, done: Sequence[Finished]) -> list[Table]:
        return [table_of(done, needles) for needles in needles_read(done)]

    def remarks(self, done: Sequence[Finished]) -> list[str]:
        ours = select(done, model=TIED)
        said = [
            "One model reads both tables. The paper has one needle, and says neither how many "
            "its models were trained on nor for how long. Its operator reads no chunk before it "
            "ends: with S = 64 a model trained on 64 tokens has never seen it do anything, so "
            "that S = 16 is to be tried too."
        ]
        if ours:
            sizes = {point["state bytes"] for cell in ours for point in cell.numbers["readings"]}
            said.append(
                f"What ours remembers at {max(lengths_read(ours)):,} tokens takes "
                f"{max(sizes):,} bytes, as at {min(lengths_read(ours)):,}."
                if len(sizes) == 1
                else f"What ours remembers takes {min(sizes):,} to {max(sizes):,} bytes."
            )
        return said

    def draw(self, done: Sequence[Finished], path: Path) -> None:
        panels = needles_read(done)
        with figure(path, columns=len(panels), size=(3.6, 2.8)) as axes:
            for ax, needles in zip(axes[0], panels, strict=True):
                draw_needles(done, needles, ax)
            axes[0, 0].set_ylabel("accuracy")
            axes[0, 0].legend(fontsize=6, loc="lower left")


def to_read(protocol: Mapping[str, Any], settings: Settings) -> list[tuple[list[int], int, int]]:
    """Lengths of haystacks, how many of each, and how many tokens are drawn at once."""
    if settings["read"] == "far":
        return [(protocol["far lengths"], protocol["rows far away"], FAR_TOKENS_AT_ONCE)]
    near = [(protocol["lengths"], protocol["rows"], TOKENS_AT_ONCE)]
    if settings["model"] in (OURS, TIED):
        near.append((protocol["lengths for ours"], protocol["rows for ours"], TOKENS_AT_ONCE))
    return near


def grid_of(needles: Sequence[int], lengths: Sequence[int]) -> list[tuple[Settings, NIAH]]:
    return [
        ({"needles": n, "length": length}, NIAH(n, length, queries=n))
        for n, length in product(needles, lengths)
    ]


def needles_read(done: Sequence[Finished]) -> list[int]:
    return sorted({point["needles"] for cell in done for point in cell.numbers["readings"]})


def lengths_read(done: Sequence[Finished]) -> list[int]:
    return sorted({point["length"] for cell in done for point in cell.numbers["readings"]})


def reads(cell: Finished, length: int) -> bool:
    return length in lengths_read([cell])


def table_of(done: Sequence[Finished], needles: int) -> Table:
    """Measured, and the paper's beside it where it has one needle, whether or not ours has run."""
    kept = [
        model
        for model in MODELS
        if select(done, model=model) or (needles == 1 and model in PAPER_MODELS)
    ]
    header = ["tokens"]
    for model in kept:
        header += [model, "paper's"] if needles == 1 and model in PAPER_MODELS else [model]
    rows = []
    for length in lengths_read(done):
        row = [f"{length:,}"]
        for model in kept:
            cells = [cell for cell in select(done, model=model) if reads(cell, length)]
            value = found_at(needles=needles, length=length)
            row.append(over_seeds(cells, value, percent))
            if needles == 1 and model in PAPER_MODELS:
                said = PAPER[PAPER_MODELS[model]].get(length)
                row.append("–" if said is None else f"{said:.1f}")
        rows.append(row)
    return Table(f"KV = {needles}: accuracy in percent", header, rows)


def draw_needles(done: Sequence[Finished], needles: int, ax: Any) -> None:
    """Measured in full colour; the paper's, of one needle, faint behind it."""
    for i, model in enumerate(MODELS):
        look = line(i, model)
        for read in distinct(select(done, model=model), "read"):
            cells = select(done, model=model, read=read)
            lengths = lengths_read(cells)
            values = [found_at(needles=needles, length=length) for length in lengths]
            curves = [[value(cell.numbers) for value in values] for cell in cells]
            band(ax, lengths, curves, **look)
            look = look | {"label": None}
        if needles == 1 and model in PAPER_MODELS:
            said = PAPER[PAPER_MODELS[model]]
            alone = None if select(done, model=model) else f"{model}, the paper's"
            faint = line(i, alone) | {"alpha": 0.35, "marker": ""}
            ax.plot(list(said), [share / 100 for share in said.values()], **faint)
    faint_is = " (faint: the paper's)" if needles == 1 else ""
    ax.set_xscale("log", base=2)
    ax.set(xlabel="tokens", ylim=(0, 1.02), title=f"KV = {needles}{faint_is}")
