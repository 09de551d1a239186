"""What held-out text costs a model, by source, by place, and where rare tokens come again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor

from echo_lm.data.shards import TokenShards
from echo_lm.data.source import TextBatch, TextSource
from echo_lm.evaluate.recall import LOGITS_AT_ONCE
from echo_lm.layers.documents import Documents
from echo_lm.model.lm import EchoLM
from echo_lm.model.loss import IGNORED_LABEL
from echo_lm.ops.backends import Precision, autocast

RARE = 1e-5
"""A token is rare if fewer than this share of the training text are it."""
RARE_PAIR = 1e-6
"""The same of two tokens in a row, such as the parts of a name."""
AT_ONCE = 1 << 20
"""Tokens of the training text that are counted together."""


@dataclass(frozen=True)
class Share:
    """Some of the tokens, and their mean loss in nats."""

    name: str
    tokens: int
    loss: float


@dataclass(frozen=True)
class TextLoss:
    """Mean loss in nats a token, and what it is made of."""

    loss: float
    tokens: int
    bits_per_byte: float
    """The same as a file's size: what it does not matter to how text is cut into tokens."""
    by_source: tuple[Share, ...]
    by_place: tuple[Share, ...]
    """Of tokens with 1, 2-3, 4-7, ... read before them, in the window or, where documents are
    packed, in the document that told them: with more context a token should cost less."""
    rare: tuple[Share, ...]
    """Rare tokens where a document has them first, and where it has had them in this window."""
    rare_pairs: tuple[Share, ...]
    """The same of the second token of rare pairs: with a small vocabulary no token is rare, and
    a name is one of several. Who recalls pays less the second time."""


@torch.inference_mode()
def text_loss(
    model: EchoLM,
    source: TextSource,
    *,
    first: int | None = None,
    batch: int = 16,
    precision: Precision = "auto",
) -> TextLoss:
    """Read the held-out text window by window in order, or the `first` so many windows of it."""
    source.check_any("test")
    count = source.count("test")
    count = count if first is None else min(first, count)
    if count < 1:
        raise ValueError(f"first must be at least 1, got {first}.")
    if source.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"The text has {source.vocab_size} different tokens and the model knows "
            f"{model.config.vocab_size}: it was made with another tokenizer."
        )
    rare = torch.from_numpy(rare_tokens(source.shards, model.config.vocab_size))
    device, losses, tables = model.embedding.weight.device, [], []
    was_training = model.training
    model.eval()
    with autocast(device, precision):
        for start in range(0, count, batch):
            numbers = torch.arange(start, min(start + batch, count))
            some = source.take(numbers, split="test", device=device)
            losses.append(token_losses(model, some).cpu())
            tables.append(describe(some.to("cpu"), rare))
    model.train(was_training)
    loss = torch.cat(losses).double()
    table = {name: torch.cat([table[name] for table in tables]) for name in tables[0]}
    asked, pairs = table["asked"], table["pairs"]
    vocab_size = model.config.vocab_size
    rare_pair = torch.from_numpy(rare_pairs(source.shards, pairs.numpy(), vocab_size))
    mean = float(loss[asked].mean())
    return TextLoss(
        loss=mean,
        tokens=int(asked.sum()),
        bits_per_byte=mean / math.log(2) * tokens_per_byte(source.shards),
        by_source=shares_by_source(loss, table, source.shards),
        by_place=shares_by_place(loss, asked, table["before"]),
        rare=shares_of_rare(loss, asked & table["rare"], table["again"]),
        rare_pairs=shares_of_rare(loss, asked & rare_pair, table["pairs_again"]),
    )


def token_losses(model: EchoLM, batch: TextBatch) -> Float[Tensor, "b t"]:
    """Of each token under what was read before it; 0 where nothing is asked."""
    rows, length = batch.tokens.shape
    losses = torch.zeros(rows, length, device=batch.tokens.device)
    piece = max(1, LOGITS_AT_ONCE // (rows * model.config.vocab_size))
    state = None
    for start in range(0, length - 1, piece):
        stop = min(start + piece, length - 1)
        out = model(
            batch.tokens[:, start:stop],
            state=state,
            return_state=True,
            document_starts=None if batch.starts is None else batch.starts[:, start:stop],
        )
        state = out.state
        wanted = batch.labels[:, start + 1 : stop + 1]
        losses[:, start + 1 : stop + 1] = F.cross_entropy(
            out.logits.float().mT, wanted, ignore_index=IGNORED_LABEL, reduction="none"
        )
    return losses


def describe(batch: TextBatch, rare: Bool[Tensor, " vocab"]) -> dict[str, Tensor]:
    """What each token of a batch is."""
    asked = batch.labels != IGNORED_LABEL
    asked[:, 0] = False
    # What stands before a window's first token is not seen: its pair is one by itself.
    vocab_size = len(rare)
    before = F.pad(batch.tokens[:, :-1], (1, 0), value=vocab_size)
    pairs = before * vocab_size + batch.tokens
    return {
        "asked": asked,
        "documents": batch.documents,
        "rare": rare[batch.tokens],
        "again": seen_before(batch.tokens, batch.documents),
        "before": read_before(batch),
        "pairs": pairs,
        "pairs_again": seen_before(pairs, batch.documents),
    }


def read_before(batch: TextBatch) -> Int[Tensor, "b t"]:
    """How many tokens tell each one. A packed document's first is told by the document before."""
    starts = torch.zeros_like(batch.facts) if batch.starts is None else batch.starts
    place = Documents.of(starts).place
    return F.pad(place[:, :-1] + 1, (1, 0))


def seen_before(tokens: Int[Tensor, "b t"], documents: Int[Tensor, "b t"]) -> Bool[Tensor, "b t"]:
    """True where the same document had the same token further left in the window."""
    named = documents.long() * (int(tokens.max()) + 1) + tokens
    ordered, order = named.sort(dim=1, stable=True)
    again = torch.zeros_like(named, dtype=torch.bool)
    return again.scatter_(1, order[:, 1:], ordered[:, 1:] == ordered[:, :-1])


def rare_tokens(shards: TokenShards, vocab_size: int) -> Bool[ndarray, " vocab"]:
    """By their share of the training text."""
    counts, total = np.zeros(vocab_size, np.int64), shards.tokens("train")
    for start in range(0, total, AT_ONCE):
        counts += np.bincount(shards.read("train", start, start + AT_ONCE), minlength=vocab_size)
    rare: Bool[ndarray, " vocab"] = counts < RARE * total
    return rare


def rare_pairs(
    shards: TokenShards, pairs: Int[ndarray, "b t"], vocab_size: int
) -> Bool[ndarray, "b t"]:
    """By their share of the training text; a pair is `first * vocab_size + second`."""
    wanted, where = np.unique(pairs, return_inverse=True)
    counts, total = np.zeros(len(wanted), np.int64), shards.tokens("train")
    for start in range(0, total, AT_ONCE):
        tokens = shards.read("train", start, start + AT_ONCE + 1).astype(np.int64)
        here = tokens[:-1] * vocab_size + tokens[1:]
        places = np.searchsorted(wanted, here).clip(max=len(wanted) - 1)
        counts += np.bincount(places[wanted[places] == here], minlength=len(wanted))
    rare: Bool[ndarray, "b t"] = (counts < RARE_PAIR * total)[where].reshape(pairs.shape)
    return rare


def tokens_per_byte(shards: TokenShards) -> float:
    """Of the held-out text; separators are paid for, as ends of documents."""
    return shards.tokens("test") / shards.text_bytes("test")


def shares_by_source(
    loss: Float[Tensor, "b t"], table: dict[str, Tensor], shards: TokenShards
) -> tuple[Share, ...]:
    sources = torch.from_numpy(shards.document_sources("test"))
    of = sources[table["documents"].long().clamp_min(0)]
    found = (
        share(name, loss, table["asked"] & (of == number))
        for number, name in enumerate(shards.sources)
    )
    return tuple(one for one in found if one.tokens)


def shares_of_rare(
    loss: Float[Tensor, "b t"], rare: Bool[Tensor, "b t"], again: Bool[Tensor, "b t"]
) -> tuple[Share, ...]:
    found = share("first", loss, rare & ~again), share("again", loss, rare & again)
    return tuple(one for one in found if one.tokens)


def shares_by_place(
    loss: Float[Tensor, "b t"], asked: Bool[Tensor, "b t"], places: Int[Tensor, "b t"]
) -> tuple[Share, ...]:
    edges = [2**n for n in range(math.ceil(math.log2(loss.shape[1])) + 1)]
    shares = []
    for low, high in pairwise(edges):
        here = asked & (places >= low) & (places < high)
        name = f"{low:,}" if high - low == 1 else f"{low:,}-{min(high, loss.shape[1]) - 1:,}"
        shares.append(share(name, loss, here))
    return tuple(one for one in shares if one.tokens)


def share(name: str, loss: Float[Tensor, "b t"], which: Bool[Tensor, "b t"]) -> Share:
    """The tokens marked; without any, a loss that is not a number."""
    count = int(which.sum())
    return Share(name, count, float(loss[which].mean()) if count else math.nan)
