"""Documents as tokens, in as many processes as there are. Free of torch: each imports this."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, UInt
from numpy import ndarray

from echo_lm.data.inputs import Fields, Piece
from echo_lm.data.manifest import TOKENIZER_FILE
from echo_lm.model.boxed import boxed, model_folder


def load_tokenizer(place: str | Path) -> Any:
    """A `tokenizers.Tokenizer` as it is to be used on text: nothing added, nothing cut off.

    `place` is a tokenizer.json, or the model it lies beside, by its folder or its name.
    """
    from tokenizers import Tokenizer

    path = Path(place)
    if path.is_dir() or str(place) in boxed():
        path = model_folder(place) / TOKENIZER_FILE
    if not path.is_file():
        raise ValueError(f"There is no tokenizer at {path}.")
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    # tokenizers raises nothing more special.
    except Exception as error:
        raise ValueError(f"{path} is not a tokenizer.json: {error}.") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # A text that spells a special token is about it, and ends nothing.
    tokenizer.encode_special_tokens = True
    return tokenizer


def tokenizer_of(checkpoint: Path, given: Path | None, vocab_size: int) -> Any:
    """That of a model: the one given, or the one beside its weights."""
    place = given or checkpoint
    tokenizer = load_tokenizer(place)
    size = tokenizer.get_vocab_size()
    if size > vocab_size:
        raise ValueError(
            f"{place} has {size:,} tokens, this model {vocab_size:,}: it is the tokenizer of "
            "another model."
        )
    return tokenizer


@dataclass(frozen=True)
class Settings:
    """What decides the tokens of a document and its side."""

    tokenizer: Path
    separator: int
    dtype: str
    fields: Fields
    held_out_share: float


@dataclass(frozen=True)
class Tokens:
    """The tokens of a piece, and where each of its documents belongs."""

    piece: Piece
    tokens: UInt[ndarray, " t"]
    """One document after the other, each behind a separator."""
    ends: Int[ndarray, " n"]
    sizes: Int[ndarray, " n"]
    """Bytes of text; a document without any has no token either."""
    sources: list[str]
    test: Bool[ndarray, " n"]


class Tokeniser:
    """Turns pieces into tokens."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.tokenizer = load_tokenizer(settings.tokenizer)

    def __call__(self, piece: Piece) -> Tokens:
        fields = self.settings.fields
        read = [fields.read(value, where) for where, value in piece.documents]
        texts = [text.decode() for text, _ in read]
        encoded = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        separator = [self.settings.separator]
        ids = [
            separator + one.ids if text else [] for one, text in zip(encoded, texts, strict=True)
        ]
        return Tokens(
            piece=piece,
            tokens=np.concatenate([np.array(one, dtype=self.settings.dtype) for one in ids]),
            ends=np.cumsum([len(one) for one in ids]),
            sizes=np.array([len(text) for text, _ in read]),
            sources=[piece.source if source is None else source for _, source in read],
            test=np.array([piece.split == "test" or self.held_out(text) for text, _ in read]),
        )

    def held_out(self, text: bytes) -> bool:
        """By the text alone, so that copies of a document are on one side."""
        share = self.settings.held_out_share
        drawn = int.from_bytes(blake2b(text, digest_size=8).digest(), "big")
        return share > 0 and drawn < share * 2**64


def tokenise(pieces: Iterator[Piece], settings: Settings, processes: int) -> Generator[Tokens]:
    """The tokens of each piece in order."""
    if processes == 1:
        yield from map(Tokeniser(settings), pieces)
        return
    pool = ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(settings,),
    )
    try:
        waiting: deque[Future[Tokens]] = deque()
        for piece in pieces:
            waiting.append(pool.submit(_work, piece))
            if len(waiting) > 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise ValueError(
            "A process that made tokens was ended from outside, perhaps for want of memory: run "
            "the same again to go on, with fewer --processes."
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_tokeniser: Tokeniser


def _begin(settings: Settings) -> None:
    """Set up a process: Ctrl-C is its parent's business, and it does not outlive that one."""
    global _tokeniser
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # One process, one core.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokeniser = Tokeniser(settings)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(piece: Piece) -> Tokens:
    return _tokeniser(piece)
