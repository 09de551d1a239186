"""A folder of tokens that is being filled, and how far that has come."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt
from numpy import ndarray

from echo_lm.data.inputs import SPLITS, Split
from echo_lm.data.manifest import (
    FORMAT,
    MANIFEST_FILE,
    TOKENIZER_FILE,
    VERSION,
    document_file,
    read_manifest,
    token_file,
)
from echo_lm.data.tokenise import Tokens
from echo_lm.data.whole import write_whole

KEEP_EVERY = 30.0
"""Seconds of work that a killed run may lose."""


class Folder:
    """A folder that is being filled. Its manifest tells what counts, and is replaced at once."""

    def __init__(self, path: Path, recipe: dict[str, Any], tokenizer: Path) -> None:
        self.path, self.recipe = path, recipe
        self.next = (0, 0)
        self.complete = False
        self.sources: dict[str, int] = {}
        shards: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
        if (path / MANIFEST_FILE).exists():
            before = read_manifest(path)
            _refuse_other_recipe(path, before["recipe"], recipe)
            self.next = (before["next"][0], before["next"][1])
            self.complete = before["complete"]
            self.sources = {name: i for i, name in enumerate(before["sources"])}
            shards = {split: before["splits"][split]["shards"] for split in SPLITS}
        elif path.exists() and (not path.is_dir() or _foreign(path)):
            raise ValueError(f"{path} holds other things: choose a new folder.")
        room = recipe["shard_tokens"]
        self.writers = {
            split: Writer(path, split, recipe["dtype"], room, shards[split]) for split in SPLITS
        }
        if not (path / TOKENIZER_FILE).exists():
            self.keep()
            write_whole(path / TOKENIZER_FILE, tokenizer.read_bytes())
        self.kept = time.monotonic()

    @property
    def tokens(self) -> int:
        return sum(writer.totals["tokens"] for writer in self.writers.values())

    def take(self, some: Tokens) -> bool:
        """Add documents in order; False when there are enough of them."""
        start = 0
        for i, end in enumerate(some.ends.tolist()):
            if self.enough:
                return False
            self.next = (some.piece.input, some.piece.first + i + 1)
            if end > start:
                split: Split = "test" if some.test[i] else "train"
                self.add(split, some.tokens[start:end], some.sources[i], int(some.sizes[i]))
            start = end
        if time.monotonic() - self.kept > KEEP_EVERY:
            self.keep()
        return True

    @property
    def enough(self) -> bool:
        most = self.recipe["max_tokens"]
        return most is not None and self.writers["train"].totals["tokens"] >= most

    def add(self, split: Split, tokens: UInt[ndarray, " t"], source: str, size: int) -> None:
        writer = self.writers[split]
        writer.add(tokens, self.sources.setdefault(source, len(self.sources)), size)
        if writer.full:
            self.keep()
            writer.begin_shard()

    def keep(self, complete: bool = False) -> None:
        """Put all that was taken on disk; only with the manifest, the last to come, it counts."""
        self.complete = complete
        for writer in self.writers.values():
            writer.write()
        told = json.dumps(self.manifest, indent=2) + "\n"
        write_whole(self.path / MANIFEST_FILE, told.encode())
        self.kept = time.monotonic()

    @property
    def manifest(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "complete": self.complete,
            "next": list(self.next),
            "recipe": self.recipe,
            "sources": list(self.sources),
            "splits": {split: writer.entry() for split, writer in self.writers.items()},
        }


class Writer:
    """The shards of one split. The last one grows until it is full.

    A file may hold more than the manifest says, of a run that was killed in between: the rest is
    made again, and is the same.
    """

    def __init__(
        self, folder: Path, split: str, dtype: str, room: int, shards: list[dict[str, Any]]
    ) -> None:
        self.folder, self.split, self.dtype, self.room = folder, split, dtype, room
        self.shards = shards
        self.totals = {
            name: sum(shard[name] for shard in shards) for name in ("tokens", "documents", "bytes")
        }
        self.pieces: list[UInt[ndarray, " t"]] = []
        self.documents: list[tuple[int, int]] = []
        self.unwritten = False
        if shards and not self.full:
            last = self.shards[-1]
            self.pieces = [_load(folder / token_file(last["name"]), last["tokens"])]
            rows = _load(folder / document_file(last["name"]), last["documents"])
            self.documents = [(start, source) for start, source in rows.tolist()]

    @property
    def full(self) -> bool:
        return bool(self.shards) and self.shards[-1]["tokens"] >= self.room

    def begin_shard(self) -> None:
        """Of the next one; what was in the last one is on disk."""
        self.pieces, self.documents = [], []

    def add(self, tokens: UInt[ndarray, " t"], source: int, size: int) -> None:
        """One document."""
        if not self.documents:
            name = f"{self.split}-{len(self.shards):05d}"
            self.shards.append({"name": name, "tokens": 0, "documents": 0, "bytes": 0})
        last = self.shards[-1]
        self.pieces.append(tokens)
        self.documents.append((last["tokens"], source))
        for entry in (last, self.totals):
            entry["tokens"] += len(tokens)
            entry["documents"] += 1
            entry["bytes"] += size
        self.unwritten = True

    def write(self) -> None:
        """The last shard, as far as it goes."""
        if not self.unwritten:
            return
        name = self.shards[-1]["name"]
        self.pieces = [np.concatenate(self.pieces)]
        write_whole(self.folder / token_file(name), _as_npy(self.pieces[0]))
        documents = np.array(self.documents, np.int64)
        write_whole(self.folder / document_file(name), _as_npy(documents))
        self.unwritten = False

    def entry(self) -> dict[str, Any]:
        return {**self.totals, "shards": self.shards}


def _as_npy(array: ndarray) -> memoryview:
    """Little-endian, with a header that says so."""
    buffer = io.BytesIO()
    np.save(buffer, array.astype(array.dtype.newbyteorder("<"), copy=False), allow_pickle=False)
    return buffer.getbuffer()


def _load(path: Path, rows: int) -> ndarray:
    """The first rows of a file."""
    try:
        array: ndarray = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} cannot be read ({error}): prepare in another folder.") from None
    if len(array) < rows:
        raise ValueError(
            f"{path} holds {len(array):,} entries and the manifest says {rows:,}: prepare in "
            "another folder."
        )
    return array[:rows]


def _foreign(folder: Path) -> bool:
    """Whether there is anything but what a run leaves that was killed at once."""
    return any(path.name != f"{MANIFEST_FILE}.unfinished" for path in folder.iterdir())


UNSPOKEN = {"inputs": "other inputs", "tokenizer": "another tokenizer"}


def _refuse_other_recipe(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Name the first thing in which two runs differ."""
    for name, new in now.items():
        old = before.get(name)
        if old != new:
            told = UNSPOKEN.get(name, f"{name}={old!r}, this call has {new!r}")
            raise ValueError(
                f"{folder} was begun with {told}: go on with the former, or choose another folder."
            )
