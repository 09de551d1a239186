"""`echo-lm data train-tokenizer`: byte-level BPE."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from echo_lm.data.inputs import SEPARATOR, Dataset, Fields, Input, open_inputs
from echo_lm.data.whole import write_whole

LEAST = 257
"""Every byte, and the separator."""


def train_tokenizer(
    files: Sequence[Path],
    *,
    out: Path,
    vocab_size: int = 32_000,
    dataset: Dataset | None = None,
    fields: Fields | None = None,
    max_bytes: int | None = None,
    console: Console | None = None,
) -> int:
    """Write a tokenizer.json for text like this, the same for the same text; gives its size.

    Args:
        files: As of `prepare`.
        out: The file to write.
        vocab_size: How many tokens; fewer where the text has not so many pairs.
        dataset: More text.
        fields: What the text of a document is called.
        max_bytes: Read no further than this.
        console: Where progress is wanted.
    """
    if vocab_size < LEAST:
        raise ValueError(f"vocab_size must be at least {LEAST}, got {vocab_size}.")
    if out.exists():
        raise ValueError(f"{out} exists, and shards may be made with it: choose another name.")
    inputs = open_inputs(files) + ([dataset] if dataset else [])
    if not inputs:
        raise ValueError("There is nothing to learn from: name files, or a dataset.")
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=console is not None and console.is_terminal,
    )
    tokenizer.train_from_iterator(_texts(inputs, fields or Fields(), max_bytes), trainer)
    write_whole(out, tokenizer.to_str(pretty=True).encode())
    return int(tokenizer.get_vocab_size())


def _texts(inputs: Sequence[Input], fields: Fields, max_bytes: int | None) -> Iterator[str]:
    read = 0
    for one in inputs:
        for number, value in one.records(fields):
            if max_bytes is not None and read >= max_bytes:
                return
            text, _ = fields.read(value, one.where(number))
            read += len(text)
            yield text.decode()
