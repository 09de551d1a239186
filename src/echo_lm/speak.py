"""`echo-lm generate`: a text goes on, as it is written, and its memory may be kept in a file."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from jaxtyping import Int
from torch import Tensor

from echo_lm.data.tokenise import tokenizer_of
from echo_lm.model.boxed import BOX, DEFAULT, boxed, is_folder, model_folder
from echo_lm.model.generate import GenerationOptions, read
from echo_lm.model.lm import EchoLM
from echo_lm.model.pretrained import WEIGHTS_FILE
from echo_lm.model.state import EchoState
from echo_lm.ops.backends import pick_device, weights_dtype

AT_ONCE = 4096
"""Tokens of a prompt that are read at once, so that a long one takes no more memory."""


def run(
    checkpoint: Path,
    prompt: str,
    *,
    tokenizer: Path | None,
    separator: str,
    state: Path | None,
    seed: int,
    device: str,
    temperature: float,
    options: GenerationOptions,
    out: TextIO | None = None,
) -> None:
    """Show the prompt and what follows it, and keep the memory in `state`."""
    if not temperature >= 0:
        raise ValueError(f"temperature must be 0 or more, got {temperature}.")
    out = sys.stdout if out is None else out
    place = pick_device(device)
    model = EchoLM.from_pretrained(checkpoint, device=place, dtype=weights_dtype(place)).eval()
    coder = Coder(tokenizer_of(checkpoint, tokenizer, model.config.vocab_size), separator)
    digest, memory = "", None
    if state is not None:
        digest = digest_of(model_folder(checkpoint) / WEIGHTS_FILE)
        memory = recollect(state, model, digest)
    ids = coder.encode(prompt, new=memory is None)
    if not ids:
        raise ValueError("There is nothing to go on from: give a prompt.")
    source = torch.Generator(model.embedding.weight.device).manual_seed(seed)
    how = GenerationOptions(generator=source, do_sample=temperature > 0, **options)
    if temperature > 0:
        how["temperature"] = temperature
    writing = Writing(model, torch.tensor([ids]), memory, coder.stop, how)
    out.write(prompt)
    for text in coder.decode(ids, writing):
        out.write(text)
        out.flush()
    out.write("\n")
    if state is not None:
        writing.memory().save(state, of=digest)


def split_words(words: Sequence[str]) -> tuple[Path, str]:
    """`[CHECKPOINT] PROMPT`; without the former a model from the box goes on."""
    if len(words) == 2:
        return Path(words[0]), words[1]
    if len(words) == 1 and looks_like_a_place(words[0]):
        raise ValueError(
            f'{words[0]!r} looks like a model: give it a prompt too, or "" for none; if it is the '
            f"prompt, write {DEFAULT} before it."
        )
    if len(words) == 1:
        return BOX / DEFAULT, words[0]
    raise ValueError(
        f"Give a prompt, or the folder of a model and a prompt in quotes; got {len(words)} words."
    )


def looks_like_a_place(word: str) -> bool:
    """A folder, a model of the box, or a path that may be mistyped."""
    return is_folder(word) or word in boxed() or ("/" in word and not re.search(r"\s", word))


class Coder:
    """Text to tokens and back."""

    def __init__(self, tokenizer: Any, separator: str) -> None:
        self.tokenizer = tokenizer
        stop = tokenizer.token_to_id(separator)
        if stop is None:
            raise ValueError(
                f"The tokenizer has no token {separator!r} to stand before a text; give "
                "--separator TOKEN."
            )
        self.stop = int(stop)
        """What stands before every text, and so behind its end."""

    def encode(self, text: str, new: bool) -> list[int]:
        """A new text begins behind the separator, as in training."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return [self.stop, *ids] if new else ids

    def decode(self, before: list[int], ids: Iterator[int]) -> Iterator[str]:
        """What each token adds, once its characters are whole."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=True)
        for known in before:
            stream.step(self.tokenizer, known)
        for token in ids:
            yield stream.step(self.tokenizer, token) or ""


class Writing(Iterator[int]):
    """New tokens as they come, up to the stop token."""

    def __init__(
        self,
        model: EchoLM,
        prompt: Int[Tensor, "1 t"],
        memory: EchoState | None,
        stop: int,
        how: GenerationOptions,
    ) -> None:
        prompt = prompt.to(model.embedding.weight.device)
        *early, last = prompt.split(AT_ONCE, dim=1)
        for piece in early:
            memory = read(model, piece, memory).state
        self.model, self.stop = model, stop
        options: GenerationOptions = {**how, "state": memory}
        self.tokens = model.stream(last, **options)
        self.unread: Any = None

    def __next__(self) -> int:
        token = next(self.tokens)
        if int(token) == self.stop:
            self.unread = None
            raise StopIteration
        self.unread = token[:, None]
        return int(token)

    def memory(self) -> EchoState:
        """Of the prompt and of all that was written."""
        state = self.tokens.state
        return state if self.unread is None else read(self.model, self.unread, state).state


def recollect(path: Path, model: EchoLM, digest: str) -> EchoState | None:
    """The memory in a file, if there is one; else a file that can be written."""
    if not path.parent.is_dir():
        raise ValueError(f"There is no folder {path.parent} to keep a state in.")
    if not path.exists():
        return None
    memory = EchoState.load(path, model.embedding.weight.device, of=digest)
    if len(memory.count) != 1:
        raise ValueError(f"{path} holds {len(memory.count)} memories, where one can go on.")
    return memory


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]
