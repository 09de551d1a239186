"""Models that come with the package speak, are small, and are what their cards say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.test_cli import echo_lm

from echo_lm import EchoLM, load_tokenizer
from echo_lm.data.tokenise import tokenizer_of
from echo_lm.model.boxed import BOX, DEFAULT, boxed, model_folder

LARGEST = 12 * 2**20
RESULTS = Path(__file__).parents[2] / "results" / "box"
WITH_DECIMALS = re.compile(r"(?<![\d.])\d+\.\d+(?![\d.])")


def test_there_is_one_to_begin_with() -> None:
    assert DEFAULT in boxed()


@pytest.mark.parametrize("name", boxed())
def test_it_is_whole_and_small(name: str) -> None:
    model = EchoLM.from_pretrained(name)
    assert (BOX / name / "model.safetensors").stat().st_size <= LARGEST
    assert tokenizer_of(Path(name), None, model.config.vocab_size).get_vocab_size() > 256
    assert f"{model.num_parameters():,} parameters" in (BOX / name / "README.md").read_text()


@pytest.mark.parametrize("name", boxed())
def test_it_has_learned_its_language(name: str) -> None:
    """Far better than guessing, on words that no training text has in this order."""
    model, tokenizer = EchoLM.from_pretrained(name, dtype=torch.float32), load_tokenizer(name)
    text = "The village lies on the river, and most of the people there work in the mines."
    tokens = torch.tensor([tokenizer.encode(text).ids])
    with torch.no_grad():
        loss = model(tokens, labels=tokens).loss
    assert loss is not None
    assert loss < 0.6 * torch.tensor(float(model.config.vocab_size)).log()


def test_it_speaks_at_once() -> None:
    done = echo_lm("generate", "The river", "--max-new-tokens", "12", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The river")
    assert len(done.stdout.split()) > 4


def test_a_folder_comes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / DEFAULT).mkdir()
    assert model_folder(DEFAULT) == BOX / DEFAULT
    monkeypatch.chdir(tmp_path)
    assert model_folder(DEFAULT) == Path(DEFAULT)


def test_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no model directory at echo-vast, .* box: echo-tiny"):
        EchoLM.from_pretrained("echo-vast")


@pytest.mark.parametrize("name", boxed())
def test_the_scores_on_the_card_were_measured(name: str) -> None:
    card = (BOX / name / "README.md").read_text(encoding="utf-8")
    known = {
        form.format(number)
        for record in RESULTS.glob("*.json")
        for number in numbers_in(json.loads(record.read_text(encoding="utf-8")))
        for form in ("{:.1f}", "{:.2f}", "{:.3f}", "{:.4f}")
    }
    scores = card.partition("## Scores")[2]
    assert len(WITH_DECIMALS.findall(scores)) > 5
    assert not set(WITH_DECIMALS.findall(scores)) - known


def numbers_in(entry: Any) -> Iterator[float]:
    """Numbers as they are, and shares as percent too."""
    if isinstance(entry, dict | list):
        for inner in entry.values() if isinstance(entry, dict) else entry:
            yield from numbers_in(inner)
    elif isinstance(entry, float):
        yield from (entry, 100 * entry)
