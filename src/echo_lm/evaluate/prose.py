"""A number hidden in prose, at any depth and any length: is it found at the end?"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from echo_lm.data.tokenise import tokenizer_of
from echo_lm.evaluate.local import read_rows, read_text
from echo_lm.evaluate.recall import Recall, recall
from echo_lm.model.lm import EchoLM
from echo_lm.model.loss import IGNORED_LABEL
from echo_lm.ops.backends import pick_device, weights_dtype
from echo_lm.plots import figure
from echo_lm.results import circumstances, writable_folder, write_json
from echo_lm.tasks.base import Batch, Split

RECORD = "needle.json"
FIGURE = "needle.png"
AT_ONCE = 1 << 18
"""Tokens read side by side, at the most."""

OPENING = "A magic number is hidden in the following text. Remember it: it will be asked for.\n"
NEEDLE = " One of the special magic numbers for {key} is: {value}."
QUESTION = (
    "\nWhat is the special magic number for {key} mentioned in the provided text? The special "
    "magic number for {key} mentioned in the provided text is"
)
ANSWER = " {value}"
DIGITS = 7
KEY_WORD = re.compile(r"\b[a-z]{4,9}\b")


class Prose:
    """A text in tokens, which may be cut between its sentences."""

    def __init__(self, text: str, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.words = sorted(set(KEY_WORD.findall(text)))
        """What keys are made of."""
        if len(self.words) < 2:
            raise ValueError("The text has no words to make keys of; give one in small letters.")
        sentences = [f" {one}" for one in re.split(r"(?<=[.!?])\s+", text) if one]
        encoded = tokenizer.encode_batch_fast(sentences, add_special_tokens=False)
        self.tokens = np.concatenate([np.array(one.ids, dtype=np.int64) for one in encoded])
        self.starts = np.cumsum([0, *(len(one.ids) for one in encoded)])[:-1]
        """Where sentences begin."""

    @classmethod
    def of(cls, files: Sequence[Path], tokenizer: Any) -> Prose:
        """Of files; see `read_prose`."""
        return cls(read_prose(files), tokenizer)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)


def read_prose(files: Sequence[Path]) -> str:
    """What is in files, those in .jsonl with a `text` in each line."""
    texts = []
    for file in files:
        if ".jsonl" in file.name:
            texts += [str(row.get("text", "")) for row in read_rows(file)]
        else:
            texts.append(read_text(file))
    return "\n\n".join(texts)


@dataclass(frozen=True)
class Needle:
    """Examples with a number at one depth, 0 at the beginning and 1 at the end, or at any if None.

    All are `length` tokens long. A batch is a function of its arguments alone, so that a model may
    also be trained on them.
    """

    prose: Prose
    length: int
    depth: float | None = None

    def batch(
        self,
        rows: int,
        *,
        seed: int,
        step: int = 0,
        split: Split = "train",
        device: torch.device | str = "cpu",
    ) -> Batch:
        made = [self.example(random.Random(f"{seed} {step} {split} {row}")) for row in range(rows)]
        tokens, labels, facts = (
            torch.from_numpy(np.stack(part)) for part in zip(*made, strict=True)
        )
        return Batch(tokens, labels, facts).to(device)

    def example(self, draw: random.Random) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, labels and the tokens that matter."""
        prose = self.prose
        key = "-".join(draw.sample(prose.words, 2))
        value = str(draw.randrange(10 ** (DIGITS - 1), 10**DIGITS))
        opening = prose.encode(OPENING)
        needle = prose.encode(NEEDLE.format(key=key, value=value))
        question = prose.encode(QUESTION.format(key=key))
        answer = prose.encode(ANSWER.format(value=value))
        room = self.length - sum(map(len, (opening, needle, question, answer)))
        if room < 0 or room > len(prose.tokens):
            raise ValueError(
                f"length {self.length} leaves {room} tokens for a text of {len(prose.tokens)}; "
                "choose another length or give more text."
            )
        hay, cuts = self.haystack(room, draw)
        depth = draw.random() if self.depth is None else self.depth
        cut = int(min(cuts, key=lambda place: abs(place - depth * room)))
        before, after = [*opening, *hay[:cut]], hay[cut:]
        tokens = np.array([*before, *needle, *after, *question, *answer])
        labels = np.full_like(tokens, IGNORED_LABEL)
        labels[-len(answer) :] = answer
        facts = np.zeros_like(tokens, dtype=bool)
        facts[len(before) : len(before) + len(needle)] = True
        return tokens, labels, facts

    def haystack(self, room: int, draw: random.Random) -> tuple[np.ndarray, np.ndarray]:
        """So much text from the beginning of a sentence on, and where it may be cut."""
        starts = self.prose.starts
        possible = starts[starts <= len(self.prose.tokens) - room]
        begin = int(draw.choice(possible))
        inside = starts[(starts >= begin) & (starts <= begin + room)] - begin
        return self.prose.tokens[begin : begin + room], np.append(inside, room)


def run(
    checkpoint: Path,
    text: Sequence[Path],
    *,
    tokenizer: Path | None,
    lengths: Sequence[int],
    depths: int,
    rows: int,
    seed: int,
    out: Path,
    device: str,
    console: Console | None = None,
) -> None:
    """Read at every length and depth; show a table, draw a map, write all down."""
    if depths < 2 or rows < 1 or not text or not lengths:
        raise ValueError(
            f"Give a text, a length, at least 2 depths and 1 row; got {len(text)} files, "
            f"{len(lengths)} lengths, {depths} depths and {rows} rows."
        )
    writable_folder(out)
    console = console or Console()
    taken = circumstances()
    place = pick_device(device)
    model = EchoLM.from_pretrained(checkpoint, device=place, dtype=weights_dtype(place))
    coder = tokenizer_of(checkpoint, tokenizer, model.config.vocab_size)
    prose = Prose.of(text, coder)
    for length in lengths:
        # Whether it fits is said before hours of reading.
        Needle(prose, length).batch(rows, seed=seed, split="test")
    places = evenly(depths)
    cells = read_map(model, prose, lengths, places, rows=rows, seed=seed)
    console.print(table_of(cells, lengths, places))
    draw_map(cells, lengths, places, out / FIGURE)
    record = {
        "checkpoint": str(checkpoint),
        "text": [file.name for file in text],
        "rows": rows,
        "seed": seed,
        **taken,
        "cells": told(cells),
    }
    write_json(out / RECORD, record)
    console.print(f"Written to {out}: {RECORD} and {FIGURE}.")


Cells = dict[tuple[int, float], Recall]
"""By length and depth."""


def evenly(depths: int) -> list[float]:
    """So many depths, from the beginning to the end."""
    return [i / (depths - 1) for i in range(depths)]


def read_map(
    model: EchoLM,
    prose: Prose,
    lengths: Sequence[int],
    depths: Sequence[float],
    *,
    rows: int,
    seed: int,
) -> Cells:
    """How many numbers a model finds at every length and depth."""
    return {
        (length, depth): recall(
            model,
            Needle(prose, length, depth),
            rows=rows,
            batch=max(1, min(rows, AT_ONCE // length)),
            seed=seed,
        )
        for length in lengths
        for depth in depths
    }


def told(cells: Cells) -> list[dict[str, Any]]:
    """For a record."""
    return [
        {
            "length": length,
            "depth": depth,
            "found": cell.exact,
            "answer_tokens_right": cell.accuracy,
            "loss": cell.loss,
            "state_bytes": cell.state_bytes,
        }
        for (length, depth), cell in cells.items()
    ]


def table_of(cells: Cells, lengths: Sequence[int], depths: Sequence[float]) -> Table:
    """The share of numbers found."""
    table = Table("Depth", *(f"{length:,}" for length in lengths), title="Numbers found")
    for depth in depths:
        table.add_row(f"{depth:.0%}", *(f"{cells[length, depth].exact:.2f}" for length in lengths))
    return table


def draw_map(cells: Cells, lengths: Sequence[int], depths: Sequence[float], path: Path) -> None:
    """Depth over length."""
    found = [[cells[length, depth].exact for length in lengths] for depth in depths]
    with figure(path, size=size_of_map(lengths, depths)) as axes:
        show_map(axes[0, 0], found, lengths, depths)


def size_of_map(lengths: Sequence[int], depths: Sequence[float]) -> tuple[float, float]:
    return 1.5 + 0.6 * len(lengths), 1 + 0.25 * len(depths)


def show_map(
    ax: Any, found: Sequence[Sequence[float]], lengths: Sequence[int], depths: Sequence[float]
) -> None:
    """The shares found, a row for each depth."""
    image = ax.imshow(found, aspect="auto", cmap="cividis", vmin=0, vmax=1)
    ax.set(
        xticks=range(len(lengths)),
        xticklabels=[f"{length:,}" for length in lengths],
        yticks=range(len(depths)),
        yticklabels=[f"{depth:.0%}" for depth in depths],
        xlabel="tokens",
        ylabel="depth of the number",
    )
    ax.grid(visible=False)
    ax.figure.colorbar(image, ax=ax, label="share found")
