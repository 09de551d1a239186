"""Batches of text for the training loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from numpy import ndarray
from torch import Tensor

from echo_lm.data.order import shuffled
from echo_lm.data.shards import TokenShards
from echo_lm.model.loss import IGNORED_LABEL
from echo_lm.tasks.base import SPLITS, Batch, Split, check, check_option

Windows = Literal["running", "packed", "apart"]


@dataclass(frozen=True)
class TextBatch(Batch):
    """Windows of text. `facts` is all that is text and not padding."""

    documents: Int[Tensor, "b t"]
    """The number of each token's document in its split; -1 is padding. A separator is the first
    token of the document it opens; that which closes a window "apart" is that document's."""


class PackedBatch(TextBatch):
    """Windows whose documents must not know of each other. A separator opens the memory of its
    document; that it comes is still for the document before it to tell, as its end."""

    @property
    def starts(self) -> Bool[Tensor, "b t"]:
        before, here = self.documents[:, :-1], self.documents[:, 1:]
        return F.pad((here != before) & (here >= 0), (1, 0))


class TextSource:
    """Windows of prepared text in random order, each once an epoch.

    A batch is a function of the seed and the step alone: nothing has to be kept to go on, and it
    is the same however many processes will share it.

    Args:
        shards: The text.
        length: Tokens of a window.
        windows: "running": one after the other through all the text, so that one may hold the end
            of a document and the next one behind its separator. "packed": the same windows, for
            a model that empties its memory at every separator, see `PackedBatch`. "apart": a
            window has one document, or a part of one, and then padding, so that nothing leaks
            from one to another in any model; `filled` tells what share of it is text.
    """

    def __init__(self, shards: TokenShards, length: int, *, windows: Windows = "running") -> None:
        check("length", length, at_least=2)
        check_option("windows", windows, get_args(Windows))
        self.shards, self.length, self.windows = shards, length, windows
        self._tables = {split: self._table(split) for split in SPLITS}

    @property
    def vocab_size(self) -> int:
        return self.shards.vocab_size

    def count(self, split: Split) -> int:
        """How many windows there are: the batches of an epoch times their rows."""
        return len(self._tables[split][0])

    def filled(self, split: Split) -> float:
        """The share of tokens that are not padding."""
        starts, stops = self._tables[split]
        return float((stops - starts).mean()) / self.length

    def describe(self) -> dict[str, Any]:
        """What must be the same for a run to go on."""
        return {
            "text": self.shards.fingerprint,
            "length": self.length,
            "windows": self.windows,
        }

    def batch(
        self,
        rows: int,
        *,
        seed: int,
        step: int = 0,
        split: Split = "train",
        device: torch.device | str = "cpu",
    ) -> TextBatch:
        """Batch number `step`."""
        check("rows", rows, at_least=1)
        check("step", step, at_least=0)
        check_option("split", split, SPLITS)
        places = torch.arange(step * rows, (step + 1) * rows)
        return self.take(self.order(places, seed=seed, split=split), split=split, device=device)

    def order(self, places: Int[Tensor, " b"], *, seed: int, split: Split) -> Int[Tensor, " b"]:
        """Which windows stand at these places of the order of a seed."""
        self.check_any(split)
        return shuffled(places, self.count(split), seed, split)

    def take(
        self,
        numbers: Int[Tensor, " b"],
        *,
        split: Split = "train",
        device: torch.device | str = "cpu",
    ) -> TextBatch:
        """The windows with these numbers, in the order of the text."""
        self.check_any(split)
        starts, stops = (table[numbers.numpy()] for table in self._tables[split])
        tokens = np.full((len(starts), self.length), self.shards.separator, np.int32)
        for row, start, stop in zip(tokens, starts.tolist(), stops.tolist(), strict=True):
            some = self.shards.read(split, start, stop)
            row[: len(some)] = some
        documents = self._documents(split, starts, stops)
        kind = PackedBatch if self.windows == "packed" else TextBatch
        return kind(*_on_device(tokens, documents, torch.device(device)))

    def _documents(
        self, split: Split, starts: Int[ndarray, " b"], stops: Int[ndarray, " b"]
    ) -> Int[ndarray, "b t"]:
        """The document of each token: that of the first, and one more at each separator."""
        begins = self.shards.document_starts(split)[:-1]
        lows = np.searchsorted(begins, starts, side="right")
        highs = lows if self.windows == "apart" else np.searchsorted(begins, stops, side="left")
        steps = np.zeros((len(starts), self.length), np.int32)
        steps[:, 0] = lows - 1
        for row, start, low, high in zip(steps, starts, lows, highs, strict=True):
            row[begins[low:high] - start] = 1
        documents = steps.cumsum(axis=1, dtype=np.int32)
        for row, size in zip(documents, (stops - starts).tolist(), strict=True):
            row[size:] = -1
        return documents

    def _table(self, split: Split) -> tuple[Int[ndarray, " n"], Int[ndarray, " n"]]:
        """Where each window starts and ends."""
        bounds = np.array([0, self.shards.tokens(split)])
        if self.windows == "apart":
            bounds = self.shards.document_starts(split)
        # A document apart ends with the next separator, to be known as the end. The last one has
        # none there, but padding is made of separators.
        lengths = np.diff(bounds) + (self.windows == "apart")
        parts = -(-lengths // self.length)
        whole = np.repeat(np.arange(len(parts)), parts)
        part = np.arange(len(whole)) - (parts.cumsum() - parts)[whole]
        sizes = np.minimum(lengths[whole] - part * self.length, self.length)
        starts = bounds[whole] + part * self.length
        asks = sizes > 1  # A first token is not predicted, and a window of one asks for nothing.
        return starts[asks], (starts + sizes)[asks]

    def check_any(self, split: Split) -> None:
        """Refuse a split without text."""
        if not self.count(split):
            raise ValueError(
                f"{self.shards.folder} holds no text to {split}: prepare some"
                + (" with --held-out or --held-out-share." if split == "test" else ".")
            )


def _on_device(
    tokens: Int[ndarray, "b t"], documents: Int[ndarray, "b t"], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of a `TextBatch`.

    A GPU gets four bytes a token from pinned memory, without the host waiting for it.
    """
    padded = bool((documents[:, -1] < 0).any())
    moved = []
    for array in (tokens, documents):
        tensor = torch.from_numpy(array)
        if device.type == "cuda":
            tensor = tensor.pin_memory()
        moved.append(tensor.to(device, non_blocking=True))
    ids, numbers = moved[0].long(), moved[1]
    real = numbers >= 0
    labels = ids.masked_fill(~real, IGNORED_LABEL) if padded else ids
    return ids, labels, real, numbers
