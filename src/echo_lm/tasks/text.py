"""What the appendix's tasks share: sequences in ASCII, with one question at their end.

From the paper: 128 symbols, the format `Agent:Tool->Result`, bounds on length that give 9 to 26
tokens to each item, and a baseline that knows nothing at 10%. That is text read letter by letter,
with digits as answers. Ours: two digits, whose second one is asked for with the first one given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from echo_lm.model.loss import IGNORED_LABEL
from echo_lm.tasks.base import Batch
from echo_lm.tasks.symbols import Characters

Tier = Literal["easy", "hard"]

CHARACTERS = Characters()
BLANK = ord(" ")
ANSWER = 2
"""Digits of an answer."""


def letters(numbers: Int[Tensor, "*n"], first: str) -> Int[Tensor, "*n"]:
    """0, 1, 2 as a, b, c if `first` is "a"."""
    return numbers + ord(first)


def digits(numbers: Int[Tensor, "*n"]) -> Int[Tensor, "*n 2"]:
    """42 as "42", 7 as "07"."""
    return letters(torch.stack([numbers // 10, numbers % 10], dim=-1), "0")


def one_of(words: Sequence[str], number: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    """The word of that number, words being equally long; `[*n, w]` if they are longer than one."""
    table = torch.stack([CHARACTERS.tokens(word, number.device) for word in words])
    return table[number].squeeze(-1)


def blank(characters: Int[Tensor, "*n"], where: Bool[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    """Nothing written there."""
    return characters.masked_fill(where, BLANK)


def line(*parts: str | Tensor) -> Int[Tensor, "*n width"]:
    """Parts side by side: strings, characters `[*n]` and words `[*n, w]`, in this order.

    The first tensor among them must be characters: they say what the shape is.
    """
    shape = next(part for part in parts if isinstance(part, Tensor)).shape
    device = next(part for part in parts if isinstance(part, Tensor)).device
    columns = []
    for part in parts:
        if isinstance(part, str):
            columns.append(CHARACTERS.tokens(part, device).expand(*shape, -1))
        else:
            columns.append(part if part.dim() > len(shape) else part[..., None])
    return torch.cat(columns, dim=-1)


def pick(items: Int[Tensor, "b n"], chosen: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
    """One item of each row."""
    return items.gather(1, chosen[:, None]).squeeze(1)


def ask(
    body: Int[Tensor, "b room"],
    facts: Bool[Tensor, "b room"],
    used: Int[Tensor, " b"],
    question: Int[Tensor, "b ask"],
) -> Batch:
    """Each row's text as far as it is used, the question with its answer, then blanks."""
    room, width = body.shape[1], question.shape[1]
    tokens = body.new_full((len(body), room + width), BLANK)
    written = torch.arange(room, device=body.device) < used[:, None]
    tokens[:, :room] = torch.where(written, body, BLANK)
    places = used[:, None] + torch.arange(width, device=body.device)
    tokens.scatter_(1, places, question)
    labels = torch.full_like(tokens, IGNORED_LABEL)
    labels.scatter_(1, places[:, -ANSWER:], question[:, -ANSWER:])
    marked = torch.zeros_like(tokens, dtype=torch.bool)
    marked[:, :room] = facts & written
    return Batch(tokens, labels, marked)
