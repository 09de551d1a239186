"""One thread, so that runs in parallel do not fight for cores, and the same numbers every time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

# Read when a kernel is defined: without a GPU, Triton's interpreter runs them.
os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json of 300 tokens."""
    from tests.data.texts import some_texts, write_plain

    from echo_lm.data import train_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    text = write_plain(folder / "text.txt", some_texts(50))
    train_tokenizer([text], out=folder / "tokenizer.json", vocab_size=300)
    return folder / "tokenizer.json"
