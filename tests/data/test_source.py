"""Batches of text: every window once an epoch, whoever asks, and nothing across documents."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from echo_lm import EchoConfig, EchoLM
from echo_lm.data import TextBatch, TextSource, TokenShards
from echo_lm.evaluate.recall import recall
from echo_lm.model.config import SKAConfig
from echo_lm.model.loss import IGNORED_LABEL
from echo_lm.train import TrainConfig, train

from .texts import prepared, some_texts

TEXTS = some_texts(150)
LENGTH = 32


@pytest.fixture(scope="module")
def shards(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    folder = tmp_path_factory.mktemp("text")
    return TokenShards(prepared(folder, tokenizer, TEXTS, shard_tokens=1000, held_out_share=0.1))


@pytest.fixture(scope="module")
def source(shards: TokenShards) -> TextSource:
    return TextSource(shards, LENGTH)


def same(a: TextBatch, b: TextBatch) -> bool:
    return all(torch.equal(vars(a)[name], vars(b)[name]) for name in vars(a))


def joined(batches: list[TextBatch]) -> TextBatch:
    names = vars(batches[0])
    return TextBatch(**{name: torch.cat([vars(b)[name] for b in batches]) for name in names})


def test_running_windows_are_the_text(source: TextSource, shards: TokenShards) -> None:
    """All of it, in order, with every token to be predicted but the first of a window."""
    batch = source.take(torch.arange(source.count("train")))
    total = shards.tokens("train")
    text = torch.from_numpy(shards.read("train", 0, total).astype("int64"))
    assert batch.tokens.flatten()[:total].equal(text)
    assert batch.labels.flatten()[:total].equal(text)
    assert (batch.labels.flatten()[total:] == IGNORED_LABEL).all()
    assert (batch.tokens.flatten()[total:] == shards.separator).all()
    assert batch.facts.flatten().tolist() == [i < total for i in range(batch.tokens.numel())]
    assert source.filled("train") == total / batch.tokens.numel()


def test_running_windows_know_their_documents(source: TextSource, shards: TokenShards) -> None:
    batch = source.take(torch.arange(source.count("train")))
    total = shards.tokens("train")
    sizes = torch.from_numpy(shards.document_starts("train")).diff()
    expected = torch.arange(shards.documents("train")).repeat_interleave(sizes)
    assert batch.documents.flatten()[:total].tolist() == expected.tolist()
    assert (batch.documents.flatten()[total:] == -1).all()


def test_windows_apart_have_one_document_and_its_end(shards: TokenShards) -> None:
    source = TextSource(shards, LENGTH, windows="apart")
    batch = source.take(torch.arange(source.count("train")))
    found: dict[int, list[int]] = {}
    for tokens, labels, documents in zip(
        batch.tokens.tolist(), batch.labels.tolist(), batch.documents.tolist(), strict=True
    ):
        size = sum(label != IGNORED_LABEL for label in labels)
        assert labels[:size] == tokens[:size]
        assert documents == [documents[0]] * size + [-1] * (LENGTH - size)
        found.setdefault(documents[0], []).extend(tokens[:size])
    assert sorted(found) == list(range(shards.documents("train")))
    end = shards.separator
    for number, tokens in found.items():
        document = [end, *shards.document("train", number).tolist(), end]
        # A window of one token asks for nothing, and is left out.
        assert tokens == (document[:-1] if len(document) % LENGTH == 1 else document)
    assert 0.3 < source.filled("train") < 1


def test_nothing_leaks_between_windows_apart(shards: TokenShards) -> None:
    """What a model says of a document is what it says of it alone, padding or not."""
    source = TextSource(shards, 64, windows="apart")
    model = small_model(shards).eval()
    batch = source.batch(8, seed=0)
    with torch.no_grad():
        logits = model(batch.tokens).logits
        for row, real in enumerate(batch.facts):
            alone = model(batch.tokens[row : row + 1, real]).logits
            torch.testing.assert_close(logits[row : row + 1, real], alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("windows", ["running", "apart"])
def test_every_window_once_an_epoch(
    windows: Literal["running", "apart"], shards: TokenShards
) -> None:
    source = TextSource(shards, LENGTH, windows=windows)
    size = source.count("train")
    rows = 7
    steps = -(-2 * size // rows)
    everything = torch.cat([source.batch(rows, seed=3, step=s).tokens for s in range(steps)])
    in_order = source.take(torch.arange(size)).tokens
    for epoch in everything[: 2 * size].split(size):
        assert sorted(epoch.tolist()) == sorted(in_order.tolist())
    assert not everything[:size].equal(everything[size : 2 * size])
    assert not everything[:size].equal(in_order)


def test_pieces_know_their_documents_too(source: TextSource) -> None:
    batch = source.batch(8, seed=0)
    assert same(joined(batch.pieces(4)), batch.to("cpu"))


def test_a_batch_is_a_function_of_seed_and_step(shards: TokenShards, source: TextSource) -> None:
    again = TextSource(TokenShards(shards.folder), LENGTH)
    steps = list(range(20))
    expected = [source.batch(4, seed=5, step=step) for step in steps]
    random.Random(0).shuffle(steps)
    assert all(same(again.batch(4, seed=5, step=step), expected[step]) for step in steps)
    assert not same(source.batch(4, seed=6), expected[0])
    assert not same(source.batch(4, seed=5, split="test"), expected[0])


def test_what_is_wrong_is_said(shards: TokenShards, source: TextSource, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="length must be a whole number at least 2, got 1"):
        TextSource(shards, 1)
    with pytest.raises(ValueError, match="windows must be one of running, apart, got 'packed'"):
        TextSource(shards, 8, windows="packed")
    with pytest.raises(ValueError, match="step must be a whole number at least 0, got -1"):
        source.batch(4, seed=0, step=-1)


def test_nothing_held_out_is_said(tokenizer: Path, tmp_path: Path) -> None:
    source = TextSource(TokenShards(prepared(tmp_path, tokenizer, TEXTS)), LENGTH)
    with pytest.raises(ValueError, match="holds no text to test: prepare some with --held-out"):
        source.batch(4, seed=0, split="test")


def small_model(shards: TokenShards) -> EchoLM:
    torch.manual_seed(0)
    settings = {"dim": 32, "mixers": ("ska",), "heads": 2, "mlp": "swiglu", "mlp_hidden": 32}
    return EchoLM(EchoConfig(vocab_size=shards.vocab_size, ska=SKAConfig(rank=8), **settings))


CONFIG = TrainConfig(
    steps=30,
    batch=8,
    lr=1e-2,
    warmup=3,
    evaluate_every=15,
    evaluate_rows=8,
    read_every=5,
    checkpoint_every=10,
)


def test_trains(shards: TokenShards, source: TextSource) -> None:
    history = train(small_model(shards), source, CONFIG)
    losses = [loss for _, loss in history.curve("loss")]
    assert losses[-1] < losses[0] - 1
    asked = source.batch(4, seed=0, split="test").labels[:, 1:] != IGNORED_LABEL
    assert recall(small_model(shards), source, rows=4).answers == asked.sum()


def test_a_run_goes_on_but_not_with_other_text(
    shards: TokenShards, source: TextSource, tokenizer: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train(small_model(shards), source, CONFIG, folder=run)
    train(small_model(shards), TextSource(shards, LENGTH), CONFIG, folder=run)
    other = TextSource(TokenShards(prepared(tmp_path, tokenizer, TEXTS[1:])), LENGTH)
    with pytest.raises(ValueError, match=r"was trained with source\.text='[0-9a-f]{16}', this"):
        train(small_model(shards), other, CONFIG, folder=run, test=source)
    with pytest.raises(ValueError, match=r"was trained with source\.length=32, this call has 16"):
        train(small_model(shards), TextSource(shards, 16), replace(CONFIG), folder=run)
