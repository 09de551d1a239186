"""`echo-lm export`: a checkpoint as a model to pass on, without what only training needs."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from rich.console import Console

from echo_lm.data.manifest import TOKENIZER_FILE
from echo_lm.model.boxed import model_folder
from echo_lm.model.lm import EchoLM
from echo_lm.results import writable_folder


def run(
    checkpoint: Path,
    out: Path,
    *,
    dtype: torch.dtype | None,
    console: Console | None = None,
) -> None:
    """Write configuration, weights and tokenizer to an empty folder."""
    folder = model_folder(checkpoint)
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty: choose another folder to export to.")
    model = EchoLM.from_pretrained(folder, dtype=dtype)
    writable_folder(out)
    model.save_pretrained(out)
    tokenizer = folder / TOKENIZER_FILE
    if tokenizer.is_file():
        shutil.copyfile(tokenizer, out / TOKENIZER_FILE)
    size = sum(file.stat().st_size for file in out.iterdir())
    (console or Console()).print(
        f"{model.num_parameters():,} parameters, {size:,} bytes in {out}.", highlight=False
    )
