"""Batches of text: every window once an epoch, whoever asks, and nothing across documents."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from echo_lm import EchoConfig, EchoLM
from echo_lm.data import TextBatch, TextSource, TokenShards
from echo_lm.data.source import Windows
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


def test_windows_packed_are_the_running_ones_and_know_where_documents_start(
    shards: TokenShards, source: TextSource
) -> None:
    """A separator opens its document, and is still to be told by the one before it."""
    packed = TextSource(shards, LENGTH, windows="packed")
    numbers = torch.arange(source.count("train") - 1, -1, -1)[: source.count("train") // 4 * 4]
    batch, running = packed.take(numbers), source.take(numbers)
    assert same(batch, running)
    assert packed.filled("train") == source.filled("train")
    assert running.starts is None
    assert batch.starts is not None
    separators = (batch.tokens == shards.separator) & batch.facts
    separators[:, 0] = False
    assert batch.starts.equal(separators)
    assert batch.starts.any()
    assert (batch.labels[batch.starts] == shards.separator).all()
    shared = [batch.rows(slice(rank, None, 2)).pieces(2) for rank in range(2)]
    found = torch.stack([piece.starts for both in zip(*shared, strict=True) for piece in both])
    assert found.view(2, 2, -1, LENGTH).transpose(1, 2).flatten(0, 2).equal(batch.starts)


def test_what_is_asked_of_a_packed_document_is_what_is_asked_of_it_apart(
    shards: TokenShards,
) -> None:
    """Every token of it and its end, at the same price, in one pass over fewer windows."""
    model = small_model(shards).double().eval()
    length = 4000

    def prices(windows: Windows) -> list[tuple[int, int, float]]:
        source = TextSource(shards, length, windows=windows)
        batch = source.take(torch.arange(source.count("test")), split="test")
        with torch.no_grad():
            logits = model(batch.tokens, document_starts=batch.starts).logits
        told = logits[:, :-1].log_softmax(-1).gather(2, batch.tokens[:, 1:, None])[..., 0]
        asked = batch.labels[:, 1:] != IGNORED_LABEL
        which = batch.documents[:, :-1][asked].tolist()
        return list(
            zip(which, batch.tokens[:, 1:][asked].tolist(), told[asked].tolist(), strict=True)
        )

    packed, apart = sorted(prices("packed")), sorted(prices("apart"))
    # The end of the text is no separator, which windows apart add to the last document.
    missing = [at for at, token, _ in apart if token == shards.separator][-1:]
    assert missing == [shards.documents("test") - 1]
    apart = [one for one in apart if one[:2] != (missing[0], shards.separator)]
    assert [one[:2] for one in packed] == [one[:2] for one in apart]
    got, wanted = (torch.tensor([one[2] for one in some]) for some in (packed, apart))
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("windows", ["running", "packed", "apart"])
def test_every_window_once_an_epoch(windows: Windows, shards: TokenShards) -> None:
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
    with pytest.raises(
        ValueError, match="windows must be one of running, packed, apart, got 'alone'"
    ):
        TextSource(shards, 8, windows="alone")
    with pytest.raises(ValueError, match="step must be a whole number at least 0, got -1"):
        source.batch(4, seed=0, step=-1)


def test_nothing_held_out_is_said(tokenizer: Path, tmp_path: Path) -> None:
    source = TextSource(TokenShards(prepared(tmp_path, tokenizer, TEXTS)), LENGTH)
    with pytest.raises(ValueError, match="holds no text to test: prepare some with --held-out"):
        source.batch(4, seed=0, split="test")


def small_model(shards: TokenShards) -> EchoLM:
    torch.manual_seed(0)
    settings = {"dim": 32, "mixers": ("ska",), "heads": 2, "mlp": "swiglu", "mlp_hidden": 32}
    model = EchoLM(EchoConfig(vocab_size=shards.vocab_size, ska=SKAConfig(rank=8), **settings))
    # Zero at the start, it would let nothing leak in any case.
    torch.nn.init.normal_(model.mixers()[0].out_proj.weight, std=0.1)
    return model


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


def test_a_run_on_packed_windows_reads_each_document_alone(
    shards: TokenShards, source: TextSource, tmp_path: Path
) -> None:
    """Its losses are those of documents apart, in pieces too, and it goes on with such alone."""
    packed = TextSource(shards, LENGTH, windows="packed")
    run = tmp_path / "run"
    config = replace(CONFIG, steps=4, warmup=1, read_every=1, evaluate_every=2, evaluate_rows=4)
    found = [
        train(small_model(shards), packed, replace(config, accumulate=pieces), folder=folder)
        for pieces, folder in ((1, run), (2, None))
    ]
    losses = [[loss for _, loss in history.curve("loss")] for history in found]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    model, batch = small_model(shards), packed.batch(8, seed=0)
    total, asked = 0.0, 0
    for row in range(8):
        numbers = batch.documents[row]
        for number in numbers[numbers >= 0].unique():
            here = (numbers == number).nonzero().flatten().tolist()
            # With the separator behind it, its end.
            stop = here[-1] + 2 if here[-1] + 1 < LENGTH and numbers[here[-1] + 1] >= 0 else None
            some = batch.tokens[row : row + 1, here[0] : stop or here[-1] + 1]
            if some.shape[1] > 1:
                total += model(some, labels=some).loss.item() * (some.shape[1] - 1)
                asked += some.shape[1] - 1
    assert losses[0][0] == pytest.approx(total / asked, rel=1e-5)
    assert asked == int((batch.labels[:, 1:] != IGNORED_LABEL).sum())
    with pytest.raises(ValueError, match=r"was trained with source\.windows='packed', this call"):
        train(small_model(shards), source, config, folder=run)
    alone = recall(model, packed, rows=8, batch=8, piece=5)
    assert alone.loss == pytest.approx(recall(model, packed, rows=8, batch=8).loss, rel=1e-5)
    assert alone.loss != pytest.approx(recall(model, source, rows=8, batch=8).loss, rel=1e-5)
