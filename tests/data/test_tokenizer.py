"""Byte-level BPE: the same for the same text, and nothing it cannot spell."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tokenizers

from echo_lm.data import train_tokenizer

from .texts import some_texts, write_lines

draw = random.Random(0)
# Random letters: many pairs are equally frequent, and which is first must not be left to chance.
TEXTS = some_texts(100) + [
    " ".join("".join(draw.choices("abcdefgh", k=6)) for _ in range(10)) for _ in range(100)
]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "text.jsonl.zst", TEXTS)


def test_the_same_every_time(text: Path, tmp_path: Path) -> None:
    sizes = {train_tokenizer([text], out=tmp_path / f"{i}.json", vocab_size=320) for i in range(3)}
    assert sizes == {320}
    assert len({(tmp_path / f"{i}.json").read_bytes() for i in range(3)}) == 1


def test_spells_everything_and_knows_the_separator(text: Path, tmp_path: Path) -> None:
    train_tokenizer([text], out=tmp_path / "t.json", vocab_size=320)
    found = tokenizers.Tokenizer.from_file(str(tmp_path / "t.json"))
    assert found.token_to_id("<|endoftext|>") == 0
    for text in ("Ωμέγα \U0001f30a\x00\n\ttabs  ", " river"):
        assert found.decode(found.encode(text).ids) == text
    assert len(found.encode(" river")) < len(" river")


def test_reads_no_further_than_told(text: Path, tmp_path: Path) -> None:
    first = write_lines(tmp_path / "first.jsonl", TEXTS[:20])
    size = sum(len(text.encode()) for text in TEXTS[:20])
    train_tokenizer([text], out=tmp_path / "a.json", vocab_size=300, max_bytes=size)
    train_tokenizer([first], out=tmp_path / "b.json", vocab_size=300)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_little_text_makes_a_small_one(tmp_path: Path) -> None:
    text = write_lines(tmp_path / "text.jsonl", ["ab"])
    assert train_tokenizer([text], out=tmp_path / "t.json", vocab_size=1000) < 300


def test_wrong_settings(text: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocab_size must be at least 257, got 256"):
        train_tokenizer([text], out=tmp_path / "t.json", vocab_size=256)
    with pytest.raises(ValueError, match="There is nothing to learn from"):
        train_tokenizer([], out=tmp_path / "t.json")
    (tmp_path / "t.json").touch()
    with pytest.raises(ValueError, match=r"t\.json exists, and shards may be made with it"):
        train_tokenizer([text], out=tmp_path / "t.json")
