"""What held-out text costs, against sums made by hand."""

from __future__ import annotations

import io
import json
import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.data.texts import prepared, some_texts, write_lines

from echo_lm import EchoConfig, EchoLM
from echo_lm.data import TextSource, TokenShards
from echo_lm.evaluate import text as measured
from echo_lm.evaluate.command import run
from echo_lm.evaluate.text import rare_pairs, rare_tokens, seen_before, text_loss
from echo_lm.model.config import SKAConfig

LENGTH = 24


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> TokenShards:
    folder = tmp_path_factory.mktemp("held-out")
    held_out = [
        write_lines(folder / f"{source}.jsonl", some_texts(8, seed), source=source)
        for seed, source in enumerate(("news", "books"), start=1)
    ]
    return TokenShards(prepared(folder, tokenizer, some_texts(60), held_out=held_out))


@pytest.fixture(scope="module")
def model(shards: TokenShards) -> EchoLM:
    torch.manual_seed(0)
    config = EchoConfig(
        dim=16,
        mixers=("attention", "ska"),
        heads=2,
        vocab_size=shards.vocab_size,
        mlp="swiglu",
        mlp_hidden=32,
        ska=SKAConfig(rank=4),
    )
    return EchoLM(config)


def by_hand(model: EchoLM, source: TextSource) -> list[tuple[float, int, int, int, bool]]:
    """Of every token that is asked for: its loss, how many told it, source and id, and whether it
    is again."""
    found = []
    batch = source.take(torch.arange(source.count("test")), split="test")
    with torch.no_grad():
        log_p = model(batch.tokens, document_starts=batch.starts).logits.log_softmax(-1)
    of = source.shards.document_sources("test")
    for b, row in enumerate(batch.tokens.tolist()):
        had: set[tuple[int, int]] = set()
        before = 0
        for t, token in enumerate(row):
            document = int(batch.documents[b, t])
            if t and document >= 0:
                loss = -float(log_p[b, t - 1, token])
                found.append((loss, before, int(of[document]), token, (document, token) in had))
            had.add((document, token))
            opens = batch.starts is not None and bool(batch.starts[b, t])
            before = 1 if opens else before + 1
    return found


def mean(losses: list[float]) -> float:
    return sum(losses) / len(losses)


@pytest.mark.parametrize("windows", ["running", "packed", "apart"])
def test_every_token_counts_once_where_it_belongs(
    windows: Any, shards: TokenShards, model: EchoLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "LOGITS_AT_ONCE", 7 * shards.vocab_size * 5)
    source = TextSource(shards, LENGTH, windows=windows)
    wanted = by_hand(model, source)
    found = text_loss(model, source, batch=7)
    assert found.tokens == len(wanted)
    assert found.loss == pytest.approx(mean([w[0] for w in wanted]), rel=1e-5)
    per_byte = shards.tokens("test") / shards.text_bytes("test")
    assert found.bits_per_byte == pytest.approx(found.loss / math.log(2) * per_byte)

    for share in found.by_source:
        number = shards.sources.index(share.name)
        losses = [w[0] for w in wanted if w[2] == number]
        assert (share.tokens, share.loss) == (len(losses), pytest.approx(mean(losses), rel=1e-5))
    assert {share.name for share in found.by_source} == {"news", "books"}

    for share in found.by_place:
        low, _, high = share.name.partition("-")
        losses = [w[0] for w in wanted if int(low) <= w[1] <= int(high or low)]
        assert (share.tokens, share.loss) == (len(losses), pytest.approx(mean(losses), rel=1e-5))
    assert [share.name for share in found.by_place] == ["1", "2-3", "4-7", "8-15", "16-23"]
    assert sum(share.tokens for share in found.by_place) == found.tokens


def test_rare_tokens_first_and_again(
    shards: TokenShards, model: EchoLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "RARE", 0.085)
    source = TextSource(shards, LENGTH)
    rare = rare_tokens(shards, shards.vocab_size)
    train = shards.read("train", 0, shards.tokens("train")).tolist()
    for token in range(shards.vocab_size):
        assert rare[token] == (train.count(token) < 0.085 * len(train))
    wanted = [w for w in by_hand(model, source) if rare[w[3]]]
    found = {share.name: share for share in text_loss(model, source).rare}
    for name, again in (("first", False), ("again", True)):
        losses = [w[0] for w in wanted if w[4] == again]
        assert losses
        assert found[name].tokens == len(losses)
        assert found[name].loss == pytest.approx(mean(losses), rel=1e-5)


def test_rare_pairs_first_and_again(
    shards: TokenShards, model: EchoLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "RARE_PAIR", 0.004)
    source = TextSource(shards, LENGTH)
    train = shards.read("train", 0, shards.tokens("train")).tolist()
    counts = Counter(pairwise(train))
    batch = source.take(torch.arange(source.count("test")), split="test")
    losses = iter(by_hand(model, source))
    wanted: dict[str, list[float]] = {"first": [], "again": []}
    for row, documents in zip(batch.tokens.tolist(), batch.documents.tolist(), strict=True):
        had: set[tuple[int, int, int]] = set()
        for pair, document in zip(pairwise(row), documents[1:], strict=True):
            if document < 0:
                continue
            loss = next(losses)[0]
            if counts[pair] < 0.004 * len(train):
                wanted["again" if (document, *pair) in had else "first"].append(loss)
            had.add((document, *pair))
    found = {share.name: share for share in text_loss(model, source).rare_pairs}
    for name, of in wanted.items():
        assert of
        assert found[name].tokens == len(of)
        assert found[name].loss == pytest.approx(mean(of), rel=1e-5)


def test_a_pair_across_two_readings_of_the_training_text_is_counted(
    shards: TokenShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "AT_ONCE", 7)
    monkeypatch.setattr(measured, "RARE_PAIR", 0.004)
    train = shards.read("train", 0, shards.tokens("train")).tolist()
    counts = Counter(pairwise(train))
    pairs = torch.tensor([[a * 300 + b for a, b in counts]])
    rare = rare_pairs(shards, pairs.numpy(), 300)[0].tolist()
    assert rare == [count < 0.004 * len(train) for count in counts.values()]
    assert len(set(rare)) == 2


def test_nothing_is_dropped_out(shards: TokenShards, model: EchoLM) -> None:
    """As a model is after loading, it is in training."""
    droopy = EchoLM(replace(model.config, embedding_dropout=0.5))
    droopy.load_state_dict(model.state_dict())
    source = TextSource(shards, LENGTH)
    assert text_loss(droopy, source) == text_loss(model, source)
    assert droopy.training


def test_a_folder_without_held_out_text_is_named(
    model: EchoLM, tokenizer: Path, tmp_path: Path
) -> None:
    source = TextSource(TokenShards(prepared(tmp_path, tokenizer, some_texts(20))), LENGTH)
    with pytest.raises(ValueError, match="holds no text to test: prepare some with --held-out"):
        text_loss(model, source)


def test_what_a_document_has_had() -> None:
    tokens = torch.tensor([[5, 5, 6, 5, 5, 6]])
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]])
    assert seen_before(tokens, documents).tolist() == [[False, True, False, False, True, False]]


def test_the_command_shows_and_writes(shards: TokenShards, model: EchoLM, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    console = Console(file=io.StringIO(), width=100)
    found = run(
        tmp_path / "model",
        shards.folder,
        length=LENGTH,
        windows="running",
        first=3,
        out=tmp_path / "record.json",
        device="cpu",
        console=console,
    )
    shown = console.file.getvalue()
    for part in (f"{found.loss:.4f} nats a token", "By source", "news", "Rare tokens"):
        assert part in shown
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["numbers"]["loss"] == found.loss
    assert record["settings"]["first"] == 3
    assert found.tokens == 3 * (LENGTH - 1)


def test_another_tokenizer_is_noticed(shards: TokenShards, model: EchoLM) -> None:
    small = EchoLM(EchoConfig(dim=16, mixers=("attention",), heads=2, vocab_size=50))
    with pytest.raises(ValueError, match="it was made with another tokenizer"):
        text_loss(small, TextSource(shards, LENGTH))
    with pytest.raises(ValueError, match="first must be at least 1, got 0"):
        text_loss(model, TextSource(shards, LENGTH), first=0)


def test_where_nothing_can_be_written_is_said_first(
    shards: TokenShards, model: EchoLM, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path)
    how: dict[str, Any] = dict(length=LENGTH, windows="running", first=None, device="cpu")
    console = Console(file=io.StringIO())
    with pytest.raises(ValueError, match="out must be a file to write, got the folder"):
        run(tmp_path, shards.folder, out=tmp_path, console=console, **how)
    inside = tmp_path / "config.json" / "found.json"
    with pytest.raises(ValueError, match="out must be a folder to write to"):
        run(tmp_path, shards.folder, out=inside, console=console, **how)
    assert not console.file.getvalue()
