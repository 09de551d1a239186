"""How many of a task's questions a model answers, at any length and in memory of one size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from echo_lm.model.lm import EchoLM
from echo_lm.model.loss import IGNORED_LABEL
from echo_lm.model.state import EchoState
from echo_lm.ops.backends import autocast
from echo_lm.tasks.base import Batch, Split

LOGITS_AT_ONCE = 2**27
"""Numbers: 512 MiB in fp32. Large vocabularies are read in shorter pieces."""


class Source(Protocol):
    """Whatever gives batches: every `Task` is one. A batch is a function of its arguments alone."""

    def batch(
        self,
        rows: int,
        *,
        seed: int,
        step: int = 0,
        split: Split = "train",
        device: torch.device | str = "cpu",
    ) -> Batch: ...


@dataclass(frozen=True)
class Recall:
    """What came out over some rows."""

    accuracy: float
    """Share of the answers that were right."""
    exact: float
    """Share of the rows whose answers were all right."""
    loss: float
    """Mean cross-entropy of the answers."""
    by_position: tuple[float, ...]
    """Accuracy of the first answer of a row, of the second, and so on."""
    rows: int
    answers: int
    state_bytes: int
    """What the model remembers of one row at its end."""


@dataclass(frozen=True)
class _Reading:
    """What a model said of one batch."""

    right: Bool[Tensor, "b t"]
    asked: Bool[Tensor, "b t"]
    loss: float
    """Summed over the answers."""
    state_bytes: int


@torch.inference_mode()
def recall(
    model: EchoLM,
    source: Source,
    *,
    rows: int = 128,
    batch: int = 64,
    seed: int = 0,
    split: Split = "test",
    piece: int = 1024,
    facts_only: bool = False,
    precision: Literal["auto", "fp32", "bf16"] = "auto",
) -> Recall:
    """Read `rows` sequences, `batch` at a time, and compare the answers.

    Sequences are read `piece` tokens at a time through the state, so that a million tokens take
    no more memory than a thousand; `piece=1` is decoding. `facts_only` keeps in SKA's memory only
    what the source marks as facts.
    """
    if rows < 1 or batch < 1 or piece < 1:
        raise ValueError(
            f"rows, batch and piece must be at least 1, got {rows}, {batch} and {piece}."
        )
    device = model.embedding.weight.device
    was_training = model.training
    model.eval()
    readings = []
    with autocast(device, precision):
        for step, start in enumerate(range(0, rows, batch)):
            some = source.batch(
                min(batch, rows - start), seed=seed, step=step, split=split, device=device
            )
            readings.append(_read(model, some, piece, facts_only))
    model.train(was_training)
    return _count(readings)


def _read(model: EchoLM, batch: Batch, piece: int, facts_only: bool) -> _Reading:
    """Read one batch in pieces. What is said at a place is about the token after it."""
    targets = F.pad(batch.labels[:, 1:], (0, 1), value=IGNORED_LABEL)
    right = torch.zeros_like(targets, dtype=torch.bool)
    loss = torch.zeros((), device=targets.device)
    state: EchoState | None = None
    piece = min(piece, max(1, LOGITS_AT_ONCE // (len(targets) * model.config.vocab_size)))
    for start in range(0, targets.shape[1], piece):
        here = slice(start, start + piece)
        out = model(
            batch.tokens[:, here],
            state=state,
            return_state=True,
            statistics_mask=batch.facts[:, here] if facts_only else None,
            document_starts=None if batch.starts is None else batch.starts[:, here],
        )
        state = out.state
        asked = targets[:, here] != IGNORED_LABEL
        logits, wanted = out.logits[asked].float(), targets[:, here][asked]
        loss += F.cross_entropy(logits, wanted, reduction="sum")
        right[:, here][asked] = logits.argmax(-1) == wanted
    assert state is not None
    return _Reading(right, targets != IGNORED_LABEL, float(loss), state.nbytes // len(batch.tokens))


def _count(readings: list[_Reading]) -> Recall:
    """Sum up. Rows may have different numbers of answers."""
    rows = sum(len(reading.asked) for reading in readings)
    answers = sum(int(reading.asked.sum()) for reading in readings)
    if answers == 0:
        raise ValueError("The source asks for nothing: all labels are -100.")
    right = sum(int(reading.right.sum()) for reading in readings)
    exact = sum(int((reading.right == reading.asked).all(1).sum()) for reading in readings)
    return Recall(
        accuracy=right / answers,
        exact=exact / rows,
        loss=sum(reading.loss for reading in readings) / answers,
        by_position=tuple(_by_position(readings).tolist()),
        rows=rows,
        answers=answers,
        state_bytes=max(reading.state_bytes for reading in readings),
    )


def _by_position(readings: list[_Reading]) -> Float[Tensor, " n"]:
    """Accuracy of the n-th answer over the rows that have so many."""
    places: list[Int[Tensor, " n"]] = []
    right: list[Tensor] = []
    for reading in readings:
        nth = reading.asked.cumsum(1) - 1
        places.append(nth[reading.asked].cpu())
        right.append(reading.right[reading.asked].double().cpu())
    nth = torch.cat(places)
    return torch.bincount(nth, weights=torch.cat(right)) / torch.bincount(nth)
