"""A folder of tokens, opened: nothing is read before it is asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt
from numpy import ndarray

from echo_lm.data.inputs import SPLITS, Split
from echo_lm.data.manifest import (
    TOKENIZER_FILE,
    document_file,
    file_hash,
    fingerprint,
    read_manifest,
    token_file,
)


class TokenShards:
    """What `echo-lm data prepare` wrote, as one long row of tokens for each split.

    >>> shards = TokenShards("data/wiki")
    >>> shards.tokens("train"), shards.documents("train"), shards.sources
    >>> shards.read("train", 1000, 2000)
    >>> shards.document("test", 7)
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        if not self.manifest["complete"]:
            raise ValueError(
                f"{self.folder} is not complete: run the echo-lm data prepare that began it again."
            )
        recipe = self.manifest["recipe"]
        self.vocab_size: int = recipe["tokenizer"]["vocab_size"]
        self.separator: int = recipe["separator"]["id"]
        self.sources: tuple[str, ...] = tuple(self.manifest["sources"])
        """Names of where documents are from, by number."""
        self.fingerprint = fingerprint(self.manifest)
        """The same for the same tokens, wherever they lie."""
        self._dtype = np.dtype(recipe["dtype"]).newbyteorder("<")
        self._shards = {split: self._open(split) for split in SPLITS}
        self._starts = {split: _starts(shards) for split, shards in self._shards.items()}
        self._indices: dict[Split, tuple[Int[ndarray, " n_plus_1"], Int[ndarray, " n"]]] = {}

    def tokens(self, split: Split) -> int:
        """How many, the separators among them."""
        return int(self.manifest["splits"][split]["tokens"])

    def documents(self, split: Split) -> int:
        return int(self.manifest["splits"][split]["documents"])

    def text_bytes(self, split: Split) -> int:
        """Of the text in UTF-8, as bits per byte are counted."""
        return int(self.manifest["splits"][split]["bytes"])

    @property
    def tokenizer(self) -> Path:
        """The tokenizer.json the tokens were made with."""
        return self.folder / TOKENIZER_FILE

    def check_tokenizer(self, path: str | Path) -> None:
        """Refuse another tokenizer than the one the tokens were made with."""
        if file_hash(Path(path)) != self.manifest["recipe"]["tokenizer"]["sha256"]:
            raise ValueError(
                f"{self.folder} was made with another tokenizer than {path}: use the one it was "
                "made with, or prepare the text again."
            )

    def read(self, split: Split, start: int, stop: int) -> UInt[ndarray, " t"]:
        """Tokens from `start` to before `stop`, or to the end."""
        stop = min(stop, self.tokens(split))
        starts = self._starts[split]
        parts = []
        shard = int(np.searchsorted(starts, start, side="right")) - 1
        while start < stop:
            end = min(stop, int(starts[shard + 1]))
            parts.append(self._shards[split][shard][start - starts[shard] : end - starts[shard]])
            start, shard = end, shard + 1
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, self._dtype)

    def document(self, split: Split, number: int) -> UInt[ndarray, " t"]:
        """The tokens of a document without its separator."""
        if not 0 <= number < self.documents(split):
            raise ValueError(
                f"document must lie between 0 and {self.documents(split) - 1}, got {number}."
            )
        ends = self.document_starts(split)
        return self.read(split, int(ends[number]) + 1, int(ends[number + 1]))

    def document_starts(self, split: Split) -> Int[ndarray, " n_plus_1"]:
        """Where each document's separator stands; the last entry is the number of tokens."""
        return self._index(split)[0]

    def document_sources(self, split: Split) -> Int[ndarray, " n"]:
        """The number in `sources` of each document."""
        return self._index(split)[1]

    def _index(self, split: Split) -> tuple[Int[ndarray, " n_plus_1"], Int[ndarray, " n"]]:
        """Read once: 16 bytes a document."""
        if split not in self._indices:
            shards = self.manifest["splits"][split]["shards"]
            tables = [
                _mapped(self.folder / document_file(shard["name"]), "<i8", (shard["documents"], 2))
                for shard in shards
            ]
            first = zip(tables, self._starts[split], strict=False)
            starts = [table[:, 0] + start for table, start in first]
            sources = [np.empty(0, np.int64), *(table[:, 1] for table in tables)]
            self._indices[split] = (
                np.concatenate([*starts, [self.tokens(split)]]).astype(np.int64),
                np.concatenate(sources),
            )
        return self._indices[split]

    def _open(self, split: Split) -> list[UInt[ndarray, " t"]]:
        shards = self.manifest["splits"][split]["shards"]
        return [
            _mapped(self.folder / token_file(shard["name"]), self._dtype, (shard["tokens"],))
            for shard in shards
        ]


def _mapped(path: Path, dtype: np.dtype | str, shape: tuple[int, ...]) -> ndarray:
    """A file as an array that the system reads as it is looked at."""
    try:
        # Mapped all the same, and cut faster than numpy's class for that.
        array = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} cannot be read: {error}; copy or prepare it again.") from None
    if array.dtype != dtype or array.shape != shape:
        raise ValueError(
            f"{path} holds {array.dtype} {list(array.shape)} and the manifest says {dtype} "
            f"{list(shape)}: copy or prepare it again."
        )
    return array


def _starts(shards: list[UInt[ndarray, " t"]]) -> Int[ndarray, " n_plus_1"]:
    """Where each shard begins, and at the end where the last one ends."""
    return np.cumsum([0, *(len(shard) for shard in shards)])
