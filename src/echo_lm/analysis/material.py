"""What a model is to read for its analysis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from echo_lm.evaluate.local import read_text
from echo_lm.tasks import find


@dataclass(frozen=True)
class Material:
    """Tokens, and which of them one may want to tell apart."""

    told: str
    tokens: Int[Tensor, "b t"]
    kinds: Mapping[str, Bool[Tensor, "b t"]]
    """What the tokens are; those of no kind are not looked at on their own."""


def of_task(
    name: str, settings: Mapping[str, Any], *, rows: int, seed: int, vocab_size: int
) -> Material:
    """Test examples of a task: facts, and filler, which is neither a fact nor asked for."""
    task = find(name, **settings)
    if task.vocab_size > vocab_size:
        raise ValueError(
            f"The task {name!r} has {task.vocab_size} symbols, this model only {vocab_size}; was "
            "it trained on another one?"
        )
    batch = task.batch(rows, seed=seed, split="test")
    told = f"{rows} test examples of {task}, {task.length:,} tokens each"
    kinds = {"facts": batch.facts, "filler": ~batch.facts & ~batch.answers}
    return Material(told, batch.tokens, {name: kind for name, kind in kinds.items() if kind.any()})


def of_text(path: Path, encoder: Any, *, length: int) -> Material:
    """The beginning of a text, in the tokens of the model."""
    tokens = torch.tensor([encoder.encode(read_text(path), add_special_tokens=False).ids[:length]])
    if tokens.numel() == 0:
        raise ValueError(f"{path} holds no text.")
    told = f"the first {tokens.shape[1]:,} tokens of {path.name}"
    return Material(told, tokens, {"tokens": torch.ones_like(tokens, dtype=torch.bool)})


def at_random(*, rows: int, length: int, seed: int, vocab_size: int) -> Material:
    """Independent tokens, all as likely."""
    source = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (rows, length), generator=source)
    told = f"{rows} sequences of {length:,} random tokens"
    return Material(told, tokens, {"tokens": torch.ones_like(tokens, dtype=torch.bool)})
