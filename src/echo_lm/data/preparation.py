"""`echo-lm data prepare`: text becomes shards of tokens, in steps that are never done twice."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console

from echo_lm.data.folder import Folder
from echo_lm.data.inputs import SEPARATOR, Dataset, Fields, Input, Split, open_inputs, pieces
from echo_lm.data.manifest import file_hash
from echo_lm.data.progress import Progress
from echo_lm.data.tokenise import Settings, load_tokenizer, tokenise
from echo_lm.interrupt import deferred_interrupt

SHARD_TOKENS = 1 << 24
"""32 MiB of 16 bits."""


def prepare(
    files: Sequence[Path],
    *,
    tokenizer: Path,
    out: Path,
    held_out: Sequence[Path] = (),
    held_out_share: float = 0.0,
    dataset: Dataset | None = None,
    fields: Fields | None = None,
    separator: str = SEPARATOR,
    shard_tokens: int = SHARD_TOKENS,
    max_tokens: int | None = None,
    processes: int | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Tokenise documents into `out`, or go on where an earlier call stopped; gives the manifest.

    Args:
        files: Texts, or folders of them: .jsonl, .parquet, .txt, also with .xz, .zst, .gz.
        tokenizer: A tokenizer.json.
        out: The folder to fill.
        held_out: Texts for the test split; left out of `files`.
        held_out_share: The share of the other documents that goes there too, by a hash of the text.
        dataset: More documents to train on.
        fields: What the text and the source of a document are called.
        separator: The token of the tokenizer that is put before every document.
        shard_tokens: A shard ends with the document that fills it.
        max_tokens: Stop with the document that makes it so many to train on.
        processes: How many make tokens; as many as there are cores if None.
        console: Where to show progress.

    The outcome is the same whatever the number of processes and of interruptions. Ctrl-C keeps
    what is done. More than one process begins by importing the script that calls this, which
    must do so under `if __name__ == "__main__":`.
    """
    _check(held_out_share, shard_tokens, max_tokens, processes)
    inputs: list[tuple[Input, Split]] = [(one, "test") for one in open_inputs(held_out)]
    inputs += [(one, "train") for one in open_inputs(files, without=held_out)]
    inputs += [(dataset, "train")] if dataset else []
    if all(split == "test" for _, split in inputs):
        raise ValueError("There is nothing to train on: name files, or a dataset.")
    fields = fields or Fields()
    vocab_size, separator_id = _measure(tokenizer, separator)
    dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
    recipe = {
        "tokenizer": {"sha256": file_hash(tokenizer), "vocab_size": vocab_size},
        "separator": {"token": separator, "id": separator_id},
        "dtype": dtype,
        "text_field": fields.text,
        "source_field": fields.source,
        "held_out_share": held_out_share,
        "shard_tokens": shard_tokens,
        "max_tokens": max_tokens,
        "inputs": _identities(inputs),
    }
    folder = Folder(out, recipe, tokenizer)
    if folder.complete:
        return folder.manifest
    settings = Settings(tokenizer, separator_id, dtype, fields, held_out_share)
    processes = processes or _cores()
    work = tokenise(pieces(inputs, fields, folder.next), settings, processes)
    progress = Progress(console, [one for one, _ in inputs], folder.next[0], folder.tokens)
    with progress, deferred_interrupt() as interrupted, closing(work):
        for some in work:
            wanted_more = folder.take(some)
            progress.show(some.piece.input, folder.tokens)
            if not wanted_more:
                break
            if interrupted():
                folder.keep()
                progress.say(f"Stopped. What is done is in {out}: run the same again to go on.")
                raise KeyboardInterrupt
        folder.keep(complete=True)
    return folder.manifest


def _check(
    held_out_share: float, shard_tokens: int, max_tokens: int | None, processes: int | None
) -> None:
    if not 0 <= held_out_share < 1:
        raise ValueError(
            f"held_out_share must be at least 0 and less than 1, got {held_out_share}."
        )
    counts = {"shard_tokens": shard_tokens, "max_tokens": max_tokens, "processes": processes}
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}.")


def _cores() -> int:
    """Those this process may use; not every system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _measure(tokenizer: Path, separator: str) -> tuple[int, int]:
    """How many tokens there are, and which one separates documents."""
    loaded = load_tokenizer(tokenizer)
    separator_id = loaded.token_to_id(separator)
    if separator_id is None:
        raise ValueError(f"{tokenizer} has no token {separator!r}: name one with --separator.")
    vocabulary = loaded.get_vocab(with_added_tokens=True)
    return max(vocabulary.values()) + 1, separator_id


def _identities(inputs: Sequence[tuple[Input, Split]]) -> list[dict[str, Any]]:
    """What the inputs are; large files take a while to be read for that."""
    with ThreadPoolExecutor() as pool:
        told = pool.map(lambda one: one[0].identity(), inputs)
        return [{**one, "split": split} for one, (_, split) in zip(told, inputs, strict=True)]
