"""A number in prose: where it lies, that it can be found, and what is reported."""

from __future__ import annotations

import io
import json
import lzma
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from echo_lm.evaluate.prose import Needle, Prose, run
from echo_lm.model import EchoLM

from ..model.families import small_config

WORDS = ["river", "stone", "winter", "letter", "garden", "window", "silver", "morning"]
TEXT = " ".join(
    f"The {WORDS[i % 8]} was a {WORDS[i * 3 % 8]} of the {WORDS[i * 5 % 7]}." for i in range(120)
)


def coder() -> Tokenizer:
    """Bytes."""
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture(scope="module")
def prose() -> Prose:
    return Prose(TEXT, coder())


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0, None])
def test_the_text_alone_says_the_number(prose: Prose, depth: float | None) -> None:
    batch = Needle(prose, 900, depth).batch(8, seed=1)
    assert batch.tokens.shape == (8, 900)
    texts = prose.tokenizer.decode_batch(batch.tokens.tolist())
    for row, text in enumerate(texts):
        ((key, value),) = re.findall(r"magic numbers for (\S+) is: (\d{7})\.", text)
        assert text.endswith(f"for {key} mentioned in the provided text is {value}")
        asked = batch.answers[row]
        assert torch.equal(batch.labels[row][asked], batch.tokens[row][asked])
        assert prose.tokenizer.decode(batch.labels[row][asked].tolist()) == f" {value}"
        fact = prose.tokenizer.decode(batch.tokens[row][batch.facts[row]].tolist())
        assert fact == f" One of the special magic numbers for {key} is: {value}."
    assert len(set(texts)) == 8


def test_depth_is_where_it_says_and_between_sentences(prose: Prose) -> None:
    """To within half a sentence of 40 letters."""
    room = []
    for depth in (0.0, 0.25, 0.5, 1.0):
        batch = Needle(prose, 2000, depth).batch(6, seed=2)
        for row in range(6):
            text = prose.tokenizer.decode(batch.tokens[row].tolist())
            _, rest = text.split("asked for.\n")
            hay, _ = rest.split("\nWhat is")
            before, after = re.split(r" One of the special .*?: \d{7}\.", hay)
            assert before.endswith(".") or before == "" or after == ""
            assert abs(len(before) - depth * len(before + after)) <= 30
            assert before + after in f" {TEXT}"
            room.append(len(before + after))
    assert min(room) > 1600


def test_a_batch_is_a_function_of_its_arguments(prose: Prose) -> None:
    needle = Needle(prose, 700)
    first = needle.batch(3, seed=5)
    assert torch.equal(needle.batch(3, seed=5).tokens, first.tokens)
    assert torch.equal(needle.batch(2, seed=5).tokens, first.tokens[:2])
    for other in (dict(seed=6), dict(seed=5, step=1), dict(seed=5, split="test")):
        assert not torch.equal(needle.batch(3, **other).tokens, first.tokens)


def test_what_cannot_be_is_said(prose: Prose) -> None:
    for length in (100, 20_000):
        with pytest.raises(ValueError, match=f"length {length} leaves"):
            Needle(prose, length).batch(1, seed=0)
    with pytest.raises(ValueError, match="no words to make keys of"):
        Prose("12. 34.", coder())
    with pytest.raises(ValueError, match="no words to make keys of"):
        Prose("", coder())


def test_a_table_a_map_and_a_record(tmp_path: Path) -> None:
    torch.manual_seed(0)
    EchoLM(replace(small_config("echo-50m"), vocab_size=256)).save_pretrained(tmp_path)
    coder().save(str(tmp_path / "tokenizer.json"))
    with lzma.open(tmp_path / "text.jsonl.xz", "wt") as file:
        file.write(json.dumps({"text": TEXT}) + "\n")
    console = Console(file=io.StringIO(), width=80)
    how = dict(tokenizer=None, depths=3, rows=2, seed=0, device="cpu", console=console)
    text = [tmp_path / "text.jsonl.xz"]
    run(tmp_path, text, lengths=(500, 1200), out=tmp_path / "out", **how)
    assert "1,200" in console.file.getvalue()
    record = json.loads((tmp_path / "out" / "needle.json").read_text())
    assert [(cell["length"], cell["depth"]) for cell in record["cells"]] == [
        (length, depth) for length in (500, 1200) for depth in (0.0, 0.5, 1.0)
    ]
    assert len({cell["state_bytes"] for cell in record["cells"]}) == 1
    assert all(cell["loss"] > 0 for cell in record["cells"])
    assert (tmp_path / "out" / "needle.png").stat().st_size > 1000
    for bad in (0, 9000):
        with pytest.raises(ValueError, match=f"length {bad} leaves"):
            run(tmp_path, text, lengths=(500, bad), out=tmp_path / "none", **how)
    with pytest.raises(ValueError, match="out must be a folder to write to"):
        run(tmp_path, text, lengths=(500,), out=text[0], **how)
    with pytest.raises(ValueError, match="at least 2 depths"):
        run(tmp_path, text, lengths=(500,), out=tmp_path, **(how | {"depths": 1}))
    EchoLM(small_config("echo-50m")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has 256 tokens, this model 61"):
        run(tmp_path, text, lengths=(500,), out=tmp_path, **how)
