"""A tokenizer for all tests of text."""

from __future__ import annotations

from pathlib import Path

import pytest

from echo_lm.data import train_tokenizer

from .texts import some_texts, write_plain


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    text = write_plain(folder / "text.txt", some_texts(50))
    train_tokenizer([text], out=folder / "tokenizer.json", vocab_size=300)
    return folder / "tokenizer.json"
