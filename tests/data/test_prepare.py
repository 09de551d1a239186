"""Text to shards: nothing is lost, done twice or mixed, whatever comes in between."""

from __future__ import annotations

import io
import json
import multiprocessing
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from rich.console import Console

from echo_lm.data import TokenShards, prepare, train_tokenizer
from echo_lm.data.folder import Folder
from echo_lm.data.inputs import Dataset, Fields, open_inputs, pieces
from echo_lm.data.tokenise import Settings, load_tokenizer, tokenise

from .texts import contents, prepared, some_texts, tokens_of, write_lines, write_plain, write_table

TEXTS = some_texts(120)
SMALL = {"shard_tokens": 500, "held_out_share": 0.2, "processes": 1}


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo_lm.data.inputs.PIECE_BYTES", 300)


def read_back(shards: TokenShards, split: Any) -> list[str]:
    tokenizer = tokenizers.Tokenizer.from_file(str(shards.tokenizer))
    return [
        tokenizer.decode(shards.document(split, i).tolist(), skip_special_tokens=False)
        for i in range(shards.documents(split))
    ]


def test_every_document_can_be_read_back(tokenizer: Path, tmp_path: Path) -> None:
    texts = [*TEXTS, "", "It says <|endoftext|> and goes on.", "<|endoftext|>"]
    shards = TokenShards(prepared(tmp_path, tokenizer, texts, shard_tokens=500))
    assert read_back(shards, "train") == [text for text in texts if text]
    assert shards.documents("test") == shards.tokens("test") == 0
    assert shards.text_bytes("train") == sum(len(text.encode()) for text in texts)
    stored = shards.manifest["splits"]["train"]["shards"]
    assert len(stored) > 3
    assert all(shard["tokens"] >= 500 for shard in stored[:-1])
    # A shard is what any program can read: little-endian, each document behind the separator.
    tokens = tokens_of(shards.folder / "train-00000.tokens.npy")
    starts = [start for start, _ in tokens_of(shards.folder / "train-00000.documents.npy")]
    assert [i for i, token in enumerate(tokens) if token == shards.separator] == starts


def test_sources_are_kept(tokenizer: Path, tmp_path: Path) -> None:
    """A document's own, or else its file's name."""
    table = write_table(tmp_path / "table.parquet", TEXTS[:9])
    plain = write_plain(tmp_path / "book.txt", TEXTS[9:11])
    named = write_lines(tmp_path / "held.jsonl", TEXTS[11:13], source="wiki")
    out = tmp_path / "out"
    prepare([table, plain], held_out=[named], tokenizer=tokenizer, out=out, processes=1)
    shards = TokenShards(out)
    assert shards.sources == ("wiki", "s0", "s1", "s2", "book")
    names = [shards.sources[i] for i in shards.document_sources("train")]
    assert names == ["s0", "s1", "s2"] * 3 + ["book"] * 2
    assert [shards.sources[i] for i in shards.document_sources("test")] == ["wiki"] * 2


def test_held_out_by_the_text_alone(tokenizer: Path, tmp_path: Path) -> None:
    """Copies are on one side, in any order."""
    texts = [*TEXTS, *TEXTS]
    random.Random(0).shuffle(texts)
    first = TokenShards(prepared(tmp_path / "a", tokenizer, TEXTS, held_out_share=0.25))
    again = TokenShards(prepared(tmp_path / "b", tokenizer, texts, held_out_share=0.25))
    held = read_back(first, "test")
    assert set(read_back(again, "test")) == set(held)
    assert not set(read_back(first, "train")) & set(held)
    # 120 draws of 1/4: sigma is under 5.
    assert 10 < len(held) < 50


def test_enough_is_enough(tokenizer: Path, tmp_path: Path) -> None:
    all_of_it = TokenShards(prepared(tmp_path / "all", tokenizer, TEXTS))
    some = TokenShards(prepared(tmp_path / "some", tokenizer, TEXTS, max_tokens=1000))
    last = len(some.document("train", some.documents("train") - 1)) + 1
    assert some.tokens("train") >= 1000 > some.tokens("train") - last
    whole = all_of_it.read("train", 0, some.tokens("train"))
    assert some.read("train", 0, 10**9).tolist() == whole.tolist()


def test_the_same_in_two_processes(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = prepared(tmp_path / "one", tokenizer, TEXTS, **SMALL)
    two = prepared(tmp_path / "two", tokenizer, TEXTS, **{**SMALL, "processes": 2})
    assert contents(one) == contents(two)


def test_a_process_that_was_ended_is_said(tokenizer: Path, tmp_path: Path) -> None:
    """As a system does that runs out of memory."""
    inputs = open_inputs([write_lines(tmp_path / "text.jsonl", TEXTS)])
    settings = Settings(tokenizer, 0, "uint16", Fields(), 0.0)
    work = tokenise(pieces([(one, "train") for one in inputs], Fields()), settings, 2)
    next(work)
    for child in multiprocessing.active_children():
        child.kill()
    with pytest.raises(ValueError, match="was ended from outside, perhaps for want of memory"):
        list(work)


class Killed(Exception):
    """As if the process were gone."""


@pytest.mark.parametrize("kept", ["full shards", "everything"])
@pytest.mark.parametrize("most", [None, 1500])
def test_one_that_was_killed_goes_on_to_the_same_bytes(
    kept: str, most: int | None, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it was: between any two writes of files, again and again until it is done."""
    settings = {**SMALL, "max_tokens": most}
    whole = contents(prepared(tmp_path / "whole", tokenizer, TEXTS, **settings))
    if kept == "everything":
        monkeypatch.setattr("echo_lm.data.folder.KEEP_EVERY", 0.0)
    replace, allowed = Path.replace, 0

    def some_times(path: Path, target: Path) -> Path:
        nonlocal allowed
        if allowed == 0:
            raise Killed
        allowed -= 1
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", some_times)
    deaths = 0
    while True:
        # More each time, or a run that dies before its first shard is full would never get there.
        allowed = deaths
        try:
            prepared(tmp_path / "killed", tokenizer, TEXTS, **settings)
            break
        except Killed:
            deaths += 1
    assert deaths > 5
    left = contents(tmp_path / "killed" / "tokens")
    assert {name: left[name] for name in left if not name.endswith(".unfinished")} == whole


def test_finished_work_is_not_done_again(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = prepared(tmp_path, tokenizer, TEXTS, **SMALL)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    monkeypatch.delattr(Folder, "take")
    prepared(tmp_path, tokenizer, TEXTS, **SMALL)
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"held_out_share": 0.3}, r"with held_out_share=0\.2, this call has 0\.3"),
        ({"shard_tokens": 600}, r"with shard_tokens=500, this call has 600"),
        ({"max_tokens": 100}, r"with max_tokens=None, this call has 100"),
        ({"fields": Fields(source="id")}, r"with source_field='source', this call has 'id'"),
    ],
)
def test_settings_do_not_mix(
    changed: dict[str, Any], said: str, tokenizer: Path, tmp_path: Path
) -> None:
    prepared(tmp_path, tokenizer, TEXTS, **SMALL)
    with pytest.raises(ValueError, match=f"{said}: go on with the former, or choose another"):
        prepared(tmp_path, tokenizer, TEXTS, **{**SMALL, **changed})


def test_another_tokenizer_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    out = prepared(tmp_path, tokenizer, TEXTS, **SMALL)
    other = tmp_path / "other.json"
    train_tokenizer([tmp_path / "text.jsonl"], out=other, vocab_size=290)
    with pytest.raises(ValueError, match="was begun with another tokenizer: go on"):
        prepared(tmp_path, other, TEXTS, **SMALL)
    with pytest.raises(ValueError, match=r"was made with another tokenizer than .*other\.json"):
        TokenShards(out).check_tokenizer(other)
    TokenShards(out).check_tokenizer(tokenizer)


def test_other_text_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    prepared(tmp_path, tokenizer, TEXTS, **SMALL)
    with pytest.raises(ValueError, match="was begun with other inputs: go on"):
        prepared(tmp_path, tokenizer, TEXTS[1:], **SMALL)


def test_a_folder_of_something_else_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "thesis.tex").touch()
    with pytest.raises(ValueError, match="tokens holds other things: choose a new folder"):
        prepared(tmp_path, tokenizer, TEXTS)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"held_out_share": 1.0}, "held_out_share must be at least 0 and less than 1, got 1.0"),
        ({"shard_tokens": 0}, "shard_tokens must be at least 1, got 0"),
        ({"processes": 0}, "processes must be at least 1, got 0"),
        ({"separator": "</s>"}, r"tokenizer.json has no token '</s>': name one with --separator"),
        ({"tokenizer": Path("nowhere.json")}, r"There is no tokenizer at nowhere\.json"),
        ({"tokenizer": Path(__file__)}, r"test_prepare\.py is not a tokenizer\.json"),
        ({"files": []}, "There is nothing to train on"),
    ],
)
def test_wrong_settings(
    settings: dict[str, Any], said: str, tokenizer: Path, tmp_path: Path
) -> None:
    file = write_lines(tmp_path / "text.jsonl", TEXTS)
    given = {"files": [file], "tokenizer": tokenizer, "out": tmp_path / "out", **settings}
    with pytest.raises(ValueError, match=said):
        prepare(**given)
    assert not (tmp_path / "out").exists()


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_said_and_work_goes_on_after(tokenizer: Path, tmp_path: Path) -> None:
    """Room for the tokenizer and a shard as it begins, none for a full one."""
    file = write_lines(tmp_path / "text.jsonl", TEXTS * 20)

    def attempt(out: Path) -> None:
        prepare([file], tokenizer=tokenizer, out=out, shard_tokens=20_000, processes=1)

    attempt(tmp_path / "whole")
    full = tmp_path / "full"
    with full_disk(30_000), pytest.raises(ValueError, match=r"written \(File too large\)") as error:
        attempt(full)
    assert str(error.value).endswith("put that right and run the same again.")
    assert sorted(contents(full)) == ["manifest.json", "tokenizer.json"]
    with pytest.raises(ValueError, match="full is not complete: run the echo-lm data prepare"):
        TokenShards(full)
    attempt(full)
    assert contents(full) == contents(tmp_path / "whole")


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    vocabulary = {f"w{i}": i for i in range(70_000)} | {"<|endoftext|>": 70_000}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.save(str(tmp_path / "words.json"))
    out = prepared(tmp_path, tmp_path / "words.json", ["w1 w69999", "w65536"])
    shards = TokenShards(out)
    assert shards.manifest["recipe"]["dtype"] == "uint32"
    assert shards.read("train", 0, 9).tolist() == [70_000, 1, 69_999, 70_000, 65_536]


def test_a_tokenizer_that_would_cut_and_pad_does_not(tokenizer: Path, tmp_path: Path) -> None:
    """Many a tokenizer.json still has the settings of the model it was made for."""
    settings = json.loads(tokenizer.read_text())
    settings["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "cuts.json").write_text(json.dumps(settings))
    text = "the river remembers 42"
    cuts = tokenizers.Tokenizer.from_file(str(tmp_path / "cuts.json"))
    assert len(cuts.encode(text)) == 3
    whole = load_tokenizer(tmp_path / "cuts.json")
    assert whole.decode(whole.encode(text).ids) == text


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_told(
    terminal: bool, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a terminal all the time, elsewhere now and then; at the end in any case."""
    monkeypatch.setattr("echo_lm.data.progress.QUIET", 0.0)
    shown = Console(file=io.StringIO(), force_terminal=terminal, width=120)
    out = prepared(tmp_path, tokenizer, TEXTS, console=shown, max_tokens=2000)
    assert isinstance(shown.file, io.StringIO)
    lines = shown.file.getvalue().splitlines()
    total = TokenShards(out).tokens("train")
    assert f"{total:,} tokens, input 1 of 1, " in lines[-1]
    assert len([line for line in lines if "tokens/s" in line]) >= 2


def test_a_dataset_is_streamed(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a folder: a hub is not always there. Stopped and continued as files are."""
    hub = tmp_path / "hub"
    hub.mkdir()
    write_lines(hub / "train.jsonl", TEXTS, source="web")
    settings = {"tokenizer": tokenizer, "dataset": Dataset(str(hub), None, "train"), **SMALL}
    prepare([], out=tmp_path / "whole", **settings)
    shards = TokenShards(tmp_path / "whole")
    assert sorted(read_back(shards, "train") + read_back(shards, "test")) == sorted(TEXTS)
    assert shards.sources == ("web",)

    take, calls = Folder.take, iter(range(10**6))

    def dies(folder: Folder, some: Any) -> bool:
        if next(calls) == 30:
            raise Killed
        return take(folder, some)

    with monkeypatch.context() as once:
        once.setattr(Folder, "take", dies)
        with pytest.raises(Killed):
            prepare([], out=tmp_path / "killed", **settings)
    prepare([], out=tmp_path / "killed", **settings)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")

    nowhere = Dataset(str(tmp_path / "nowhere"), None, "train")
    with pytest.raises(ValueError, match=r"The dataset .*nowhere could not be read after row 0: "):
        prepare([], out=tmp_path / "other", tokenizer=tokenizer, dataset=nowhere, processes=1)
