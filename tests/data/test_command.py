"""`echo-lm data` as a user runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sysconfig
import time
from pathlib import Path

import pytest

from echo_lm.data import prepare

from .texts import contents, some_texts, write_lines

COMMAND = Path(sysconfig.get_path("scripts")) / "echo-lm"
ENVIRONMENT = {**os.environ, "COLUMNS": "100", "OMP_NUM_THREADS": "1"}


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [COMMAND, "data", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )


def echo_lm(*arguments: str | Path) -> tuple[int, str, str]:
    process = start(*arguments)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_from_text_to_tokens(tmp_path: Path) -> None:
    text = write_lines(tmp_path / "text.jsonl.xz", some_texts(200))
    tokenizer, out = tmp_path / "tokenizer.json", tmp_path / "tokens"
    learn = ("train-tokenizer", text, "--out", tokenizer, "--vocab-size", "300")
    code, said, error = echo_lm(*learn)
    assert code == 0, error
    assert "has 300 tokens" in said
    make = ("prepare", text, "--tokenizer", tokenizer, "--out", out, "--held-out-share", "0.1")
    code, said, error = echo_lm(*make, "--processes", "1")
    assert code == 0, error
    assert "Documents" in said
    assert "as uint16" in said
    code, _, error = echo_lm(*learn)
    assert (code, error.count("\n")) == (2, 1)
    assert error.startswith("echo-lm: ")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_one_that_is_stopped_goes_on(how: signal.Signals, tokenizer: Path, tmp_path: Path) -> None:
    text = write_lines(tmp_path / "text.jsonl", some_texts(10_000))
    out, whole = tmp_path / "stopped", tmp_path / "whole"
    arguments = ("prepare", text, "--tokenizer", tokenizer, "--shard-tokens", "20000", "--out", out)
    process = start(*arguments, "--processes", "2")
    # Once a shard has begun to be written, the one before it counts.
    third, fourth = (out / f"train-0000{i}.tokens.npy" for i in (2, 3))
    while not fourth.exists() and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(how)
    said, error = process.communicate(timeout=120)
    assert process.returncode == {signal.SIGKILL: -9, signal.SIGINT: 130}[how], error
    assert ("run the same again to go on" in " ".join(said.split())) == (how == signal.SIGINT)
    before = third.stat().st_mtime_ns
    code, said, error = echo_lm(*arguments, "--processes", "1")
    assert code == 0, error
    assert "Going on after" in said
    assert third.stat().st_mtime_ns == before
    prepare([text], tokenizer=tokenizer, shard_tokens=20_000, out=whole, processes=1)
    left = contents(out)
    assert {name: left[name] for name in left if not name.endswith(".unfinished")} == contents(
        whole
    )
