"""`echo-lm analyze` from end to end, on models from disk."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from rich.console import Console

from echo_lm import EchoConfig, EchoLM
from echo_lm.analysis.command import run
from echo_lm.model.config import Mamba2Config, SKAConfig
from echo_lm.tasks import find
from echo_lm.train import TrainConfig, train

TEXT = "the cat sat on the mat and the dog sat on the log " * 8


def a_model(
    mixers: tuple[str, ...] = ("mamba2", "ska"), vocab_size: int = 128, **ska: Any
) -> EchoLM:
    torch.manual_seed(0)
    config: Any = {"mixers": mixers, "vocab_size": vocab_size, "heads": 2, "mlp": "none"}
    mamba2 = Mamba2Config(state_dim=8, head_dim=16)
    return EchoLM(EchoConfig(dim=32, ska=SKAConfig(rank=8, **ska), mamba2=mamba2, **config))


def saved(folder: Path, model: EchoLM) -> Path:
    model.save_pretrained(folder / "model")
    return folder / "model"


def a_tokenizer(path: Path, vocab_size: int) -> Path:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(path))
    return path


def analysed(checkpoint: Path, out: Path, **options: Any) -> tuple[str, dict[str, Any]]:
    """What was said, and what was written."""
    console = Console(file=io.StringIO(), width=300)
    given: dict[str, Any] = {
        "task": (),
        "text": None,
        "tokenizer": None,
        "tokens": 64,
        "rows": 3,
        "seed": 0,
        "device": "cpu",
    }
    run(checkpoint, out=out, console=console, **given | options)
    record = (out / "analysis.json").read_text()
    written = json.loads(record, parse_constant=pytest.fail)  # NaN is no JSON
    for layer in written["layers"]:
        for name in (f"block-{layer['block']}.png", f"block-{layer['block']}-spectra.png"):
            assert (out / name).read_bytes().startswith(b"\x89PNG")
    return console.file.getvalue(), written  # type: ignore[attr-defined]


def test_a_trained_model_and_its_task(tmp_path: Path) -> None:
    model, task = a_model(), find("mqar", pairs=2, gap=12)
    config = TrainConfig(steps=30, batch=8, warmup=5, lr=5e-3, evaluate_rows=8)
    train(model, task, config, folder=tmp_path / "run")
    (checkpoint,) = (tmp_path / "run").glob("step-*")
    shown, written = analysed(checkpoint, tmp_path / "out", task=("mqar", "pairs=2", "gap=12"))
    assert "reads 3 test examples of MQAR(pairs=2, gap=12, queries=None), 20 tokens each" in shown
    assert "silent" not in shown
    (layer,) = written["layers"]
    assert layer["block"] == 1
    assert layer["tokens read"][-1] == 20
    for head in layer["heads"]:
        assert set(head["key norms"]) == {"facts", "filler"}
        assert head["operator norm"] <= 1
        assert math.isclose(sum(head["order shares"]), 1)
        assert len(head["eigenvalues"]) == 3
        assert len(head["eigenvalues"][0]) == 8
        assert len(head["along"]["condition"][0]) == len(layer["tokens read"])
        assert f"{head['condition']:.2g}" in shown
    assert {"git", "hardware", "versions", "date"} <= set(written)


def test_facts_are_told_from_filler(tmp_path: Path) -> None:
    """Keys that are louder for words than for noise."""
    model = a_model(("ska",))
    with torch.no_grad():
        model.embedding.weight.zero_()
        model.embedding.weight[:, 0] = 1
        model.embedding.weight[:64, 1] = 3
        proj = model.mixers()[0].k_proj.weight
        proj.zero_()
        proj[::8, 1] = 1
    _, written = analysed(saved(tmp_path, model), tmp_path / "out", task=("mqar", "pairs=2"))
    for head in written["layers"][0]["heads"]:
        assert max(head["key norms"]["filler"]) == 0 < min(head["key norms"]["facts"])


def test_a_text_through_its_tokenizer(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    tokenizer = a_tokenizer(tmp_path / "tokenizer.json", 25)
    checkpoint = saved(tmp_path, a_model(vocab_size=25, causal="chunk", chunk_size=16))
    shown, written = analysed(
        checkpoint, tmp_path / "out", text=text, tokenizer=tokenizer, tokens=50
    )
    assert "the first 50 tokens of text.txt" in shown
    beside = checkpoint / "tokenizer.json"
    tokenizer.rename(beside)
    _, again = analysed(checkpoint, tmp_path / "out", text=text, tokens=50)
    assert again["layers"] == written["layers"]
    assert "It is silent" in shown
    (layer,) = written["layers"]
    assert layer["tokens read"] == [16, 32, 48]
    assert set(layer["heads"][0]["key norms"]) == {"tokens"}


def test_random_tokens_and_many_heads(tmp_path: Path) -> None:
    model = EchoLM(
        EchoConfig(dim=32, mixers=("ska",), vocab_size=9, heads=8, ska=SKAConfig(rank=4))
    )
    shown, written = analysed(saved(tmp_path, model), tmp_path / "out")
    assert "3 sequences of 64 random tokens" in shown
    assert len(written["layers"][0]["heads"]) == 8


def test_too_few_tokens_for_a_chunk(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, a_model(("ska",), causal="chunk"))
    shown, _ = analysed(checkpoint, tmp_path / "out", tokens=20)
    assert "No query has seen any of this: 20 tokens do not fill a chunk of 64." in shown


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"task": ("mqar",), "text": "text.txt"}, "Give --text or --task, not both."),
        ({"task": ("recall",)}, "There is no task 'recall'"),
        ({"task": ("mqar", "pairs")}, "A setting is written like"),
        ({"task": ("mqar",)}, "The task 'mqar' has 128 symbols, this model only 25"),
        ({"text": "text.txt"}, "There is no tokenizer at "),
        ({"tokenizer": "good.json"}, "--tokenizer is for a text"),
        ({"text": "text.txt", "tokenizer": "none.json"}, "There is no tokenizer "),
        ({"text": "text.txt", "tokenizer": "text.txt"}, "text.txt is not a tokenizer.json"),
        ({"text": "text.txt", "tokenizer": "big.json"}, "has 30 tokens, this model 25"),
        ({"text": "none.txt", "tokenizer": "good.json"}, "none.txt cannot be read as text"),
        ({"text": "empty.txt", "tokenizer": "good.json"}, "empty.txt holds no text."),
        ({"tokens": 0}, "tokens and rows must be at least 1, got 0 and 3"),
        ({"device": "moon"}, "There is no device 'moon' here"),
    ],
)
def test_bad_input_is_named(options: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "empty.txt").write_text("")
    for name, size in (("good.json", 20), ("big.json", 30)):
        a_tokenizer(tmp_path / name, size)
    given = {
        name: tmp_path / value if name in ("text", "tokenizer") else value
        for name, value in options.items()
    }
    with pytest.raises(ValueError, match=re.escape(sentence)):
        analysed(saved(tmp_path, a_model(("ska",), vocab_size=25)), tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


def test_a_model_without_ska_is_told_in_one_sentence(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, a_model(("mamba2", "attention")))
    with pytest.raises(ValueError, match="has no SKA layer to look at; its blocks are 2: mamba2, "):
        analysed(checkpoint, tmp_path / "out")
    with pytest.raises(ValueError, match="There is no model directory at "):
        analysed(tmp_path / "nowhere", tmp_path / "out")
