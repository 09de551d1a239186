"""A text that goes on, and a memory in a file."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from echo_lm import speak
from echo_lm.data.tokenise import tokenizer_of
from echo_lm.model import EchoLM, EchoState
from echo_lm.model.boxed import BOX, DEFAULT

from .model.families import small_config, wake
from .test_cli import echo_lm

END = "<|endoftext|>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of bytes and its tokenizer."""
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    place = tmp_path / "model"
    save(place, seed=0)
    tokenizer.save(str(place / "tokenizer.json"))
    return place


def save(place: Path, seed: int) -> None:
    torch.manual_seed(seed)
    wake(EchoLM(replace(small_config("echo-50m"), vocab_size=257))).save_pretrained(place)


def coder_of(folder: Path) -> speak.Coder:
    return speak.Coder(tokenizer_of(folder, None, 257), END)


def say(folder: Path, prompt: str, state: Path | None = None, **settings: Any) -> str:
    how = dict(tokenizer=None, separator=END, state=state, seed=0, device="cpu", temperature=0.0)
    how |= dict(options={"max_new_tokens": 12}, out=io.StringIO())
    how |= settings
    speak.run(folder, prompt, **how)
    return how["out"].getvalue()


def written(folder: Path, text: str, new: int = 12) -> tuple[list[int], str]:
    """Greedily, by the model itself."""
    model = EchoLM.from_pretrained(folder)
    coder = coder_of(folder)
    ids = coder.encode(text, new=True)
    tokens = model.generate(torch.tensor([ids]), max_new_tokens=new)[0, len(ids) :].tolist()
    return tokens, coder.tokenizer.decode(tokens)


def test_what_is_written_follows_the_prompt(folder: Path) -> None:
    said = say(folder, "The river")
    tokens, text = written(folder, "The river")
    assert said.startswith("The river")
    # Bytes that make no character are shown when the next ones make one.
    assert text.rstrip("\ufffd").startswith(said.removeprefix("The river").rstrip("\n"))
    assert len(tokens) == 12
    settings = dict(temperature=1.0, options={"max_new_tokens": 30})
    drawn = [say(folder, "A", seed=seed, **settings) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_character_comes_when_it_is_whole(folder: Path) -> None:
    coder = coder_of(folder)
    text = "a\u00e9\u4e16\U0001f600!"
    ids = coder.encode(text, new=False)
    assert len(ids) == 11
    pieces = list(coder.decode([], iter(ids)))
    assert pieces == ["a", "", "\u00e9", "", "", "\u4e16", "", "", "", "\U0001f600", "!"]


@pytest.mark.parametrize("at_once", [4, 4096])
def test_a_conversation_goes_on(
    folder: Path, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if all of it had been one text; long prompts are read in pieces."""
    monkeypatch.setattr(speak, "AT_ONCE", at_once)
    memory = folder / "memory"
    first = written(folder, "Once upon a time")[1]
    say(folder, "Once upon a time", memory)
    assert EchoState.load(memory).count.tolist() == [1 + 16 + 12]
    kept = EchoState.load(memory)
    say(folder, " there was", memory)
    model = EchoLM.from_pretrained(folder)
    coder = coder_of(folder)
    tokens = coder.encode("Once upon a time", new=True) + written(folder, "Once upon a time")[0]
    tokens += coder.encode(" there was", new=False)
    wanted = model.generate(torch.tensor([tokens]), max_new_tokens=12)
    whole = model(wanted, return_state=True).state
    again = EchoState.load(memory)
    assert again.count.tolist() == whole.count.tolist() == [len(tokens) + 12]
    for name, entry in whole.to_dict().items():
        if isinstance(entry, torch.Tensor):
            torch.testing.assert_close(again.to_dict()[name], entry, rtol=1e-3, atol=1e-3)
    assert kept.nbytes == again.nbytes
    assert first


def test_the_separator_ends_a_text_and_is_not_remembered(folder: Path) -> None:
    mute = EchoLM(replace(small_config("echo-50m"), vocab_size=257, tie_embeddings=False))
    torch.nn.init.zeros_(mute.head.weight)
    mute.save_pretrained(folder)
    first = coder_of(folder).tokenizer.id_to_token(0)
    assert say(folder, "Hello", folder / "memory", separator=first) == "Hello\n"
    assert EchoState.load(folder / "memory").count.tolist() == [6]
    assert say(folder, "Hello", folder / "other") == "Hello" + 12 * first + "\n"
    assert EchoState.load(folder / "other").count.tolist() == [18]


def test_a_memory_of_other_weights_is_refused(folder: Path) -> None:
    memory = folder / "memory"
    say(folder, "Hello", memory)
    before = memory.read_bytes()
    save(folder, seed=1)
    with pytest.raises(ValueError, match=r"memory is the state of another model, or of other"):
        say(folder, " you", memory)
    assert memory.read_bytes() == before


def test_a_file_that_cannot_be_written_costs_no_memory(folder: Path) -> None:
    memory = folder / "memory"
    say(folder, "Hello", memory)
    before = memory.read_bytes()
    (folder / "memory.unfinished").mkdir()
    with pytest.raises(ValueError, match=r"The state cannot be written to .*memory"):
        say(folder, " you", memory)
    assert memory.read_bytes() == before


@pytest.mark.parametrize(
    ("prompt", "settings", "sentence"),
    [
        ("a", {"temperature": -1.0}, r"temperature must be 0 or more, got -1\.0\."),
        ("a", {"temperature": float("nan")}, r"temperature must be 0 or more, got nan\."),
        ("a", {"separator": "none"}, r"has no token 'none' to stand before a text; give --sep"),
        ("a", {"tokenizer": Path("nowhere")}, r"There is no tokenizer at nowhere\."),
        ("a", {"state": Path("nowhere/state")}, r"There is no folder nowhere to keep a state in"),
        ("a", {"options": {"top_k": 0}}, r"top_k must be at least 1, got 0\."),
    ],
)
def test_what_is_wrong_is_said(
    folder: Path, prompt: str, settings: dict[str, Any], sentence: str
) -> None:
    out = io.StringIO()
    with pytest.raises(ValueError, match=sentence):
        say(folder, prompt, **{"out": out} | settings)
    assert out.getvalue() == ""


def test_nothing_new_for_a_memory(folder: Path) -> None:
    say(folder, "", folder / "memory", options={"max_new_tokens": 2})
    with pytest.raises(ValueError, match=r"nothing to go on from: give a prompt\."):
        say(folder, "", folder / "memory")


def test_several_memories_in_a_file_are_refused(folder: Path) -> None:
    model = EchoLM.from_pretrained(folder)
    digest = speak.digest_of(folder / "model.safetensors")
    model(torch.tensor([[1], [2]]), return_state=True).state.save(folder / "two", of=digest)
    with pytest.raises(ValueError, match="two holds 2 memories, where one can go on"):
        say(folder, "a", folder / "two")


def test_the_tokenizer_of_another_model_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="has 257 tokens, this model 100"):
        tokenizer_of(folder, None, 100)


def test_the_command(folder: Path) -> None:
    done = echo_lm(
        *["generate", str(folder), "The river", "--max-new-tokens", "4", "--temperature", "0"],
        *["--state", str(folder / "memory")],
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout == say(folder, "The river", options={"max_new_tokens": 4})
    assert EchoState.load(folder / "memory").count.tolist() == [14]


def started(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "echo_lm.cli", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    )


def test_a_prompt_alone_is_for_the_model_in_the_box(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert speak.split_words(["The river"]) == (BOX / DEFAULT, "The river")
    long = "The river ran on past the old mill.\n" * 20
    assert speak.split_words([long]) == (BOX / DEFAULT, long)
    monkeypatch.chdir(tmp_path)
    (tmp_path / DEFAULT).mkdir()
    assert speak.split_words(["The river"])[0] == BOX / DEFAULT
    assert speak.split_words([str(folder), "The river"]) == (folder, "The river")


@pytest.mark.parametrize("words", [[], ["a", "b", "c"]])
def test_words_that_are_no_prompt_are_counted(words: list[str]) -> None:
    with pytest.raises(ValueError, match=f"a prompt in quotes; got {len(words)} words"):
        speak.split_words(words)


def test_a_model_without_a_prompt_is_not_read_as_one(folder: Path) -> None:
    for word in (str(folder), "echo-tiny", "runs/laptop/step-000"):
        with pytest.raises(ValueError, match='looks like a model: give it a prompt too, or "" for'):
            speak.split_words([word])


def test_who_stops_reading_ends_it_in_silence(folder: Path) -> None:
    """As head does."""
    with started("generate", str(folder), "The river", "--max-new-tokens", "100000") as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.read(3) == "The"
        running.stdout.close()
        assert running.wait(60) == 128 + signal.SIGPIPE
        assert running.stderr.read() == ""


def test_a_file_that_is_a_folder_is_named(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    with started("generate", str(folder), "The river") as running:
        _, said = running.communicate(timeout=60)
    assert running.returncode == 2
    assert said.startswith("echo-lm: ")
    assert said.count("\n") == 1
    assert "config.json" in said
