"""The command as a user runs it."""

from __future__ import annotations

import re
import subprocess
import sysconfig
import time
from pathlib import Path

import pytest

from echo_lm import EchoConfig

COMMAND = Path(sysconfig.get_path("scripts")) / "echo-lm"


def echo_lm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={"COLUMNS": "100", "PATH": "", "OMP_NUM_THREADS": "1"},
    )


def one_line(text: str) -> str:
    """What was printed, whatever the width it was wrapped at."""
    return " ".join(text.split())


def test_help_names_the_commands_at_once() -> None:
    start = time.perf_counter()
    done = echo_lm("--help")
    assert time.perf_counter() - start < 1.5
    assert done.returncode == 0
    assert "info" in done.stdout
    assert "demo" in done.stdout


def test_info_shows_who_computes_what_and_every_preset() -> None:
    done = echo_lm("info")
    assert done.returncode == 0, done.stderr
    assert re.search(r"SKA, many tokens +│ chunk \(PyTorch\)", done.stdout)
    assert re.search(r"SKA, one token +│ recurrent \(PyTorch\)", done.stdout)
    for preset in EchoConfig.presets():
        assert preset in one_line(done.stdout)


@pytest.mark.parametrize(
    ("preset", "shown"),
    [
        ("echo-180m", ["SpectralKoopmanAttention", "SpectralKoopmanMLP", "more than 69 tokens"]),
        ("transformer-50m", ["16: attention; MLP: swiglu", "28,672 a token"]),
        ("mamba3-cg-ska-tool", ["mamba3+ska, mamba3 at 0", "Mamba3"]),
    ],
)
def test_info_of_a_preset(preset: str, shown: list[str]) -> None:
    done = echo_lm("info", preset)
    assert done.returncode == 0, done.stderr
    for text in (preset, "State of one sequence", *shown):
        assert text in one_line(done.stdout)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["info", "nonsense"], "There is no preset 'nonsense'; there are echo-180m, "),
        (["analyze", "nowhere", "--task", "mqar", "pairs=2"], "There is no model directory at "),
        (["demo", "--out", __file__], f"out must be a folder to write to, got {__file__} ("),
        (["reproduce", "lm"], "lm reads a folder of tokens, which echo-lm data prepare makes: "),
        (
            ["reproduce", "rank", "--text", "tokens"],
            "rank reads nothing of yours: leave out --text",
        ),
        (["demo", "--seed", "-1"], "seed must be a whole number between 0 and "),
        (["bench", "ops", "softmax"], "There is no operator 'softmax'; there are ska-exact, "),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(arguments: list[str], sentence: str) -> None:
    done = echo_lm(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"echo-lm: {sentence}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["demo", "--seed", "many"]])
def test_a_command_line_that_does_not_parse(arguments: list[str]) -> None:
    done = echo_lm(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "--help" in one_line(done.stdout + done.stderr)


def test_tasks_are_listed_and_shown() -> None:
    listed = echo_lm("tasks")
    assert listed.returncode == 0, listed.stderr
    assert "resource-economy" in listed.stdout
    example = echo_lm("tasks", "mqar", "pairs=2", "gap=4", "--split", "test")
    assert example.returncode == 0, example.stderr
    assert "mqar: 12 tokens of 128 symbols" in example.stdout
    assert re.search(r"^(k\d+ v\d+ ){2}(n\d+ ){4}(k\d+ v\d+ ?){2}$", example.stdout, re.MULTILINE)


def test_a_task_that_is_none_is_named() -> None:
    done = echo_lm("tasks", "recall")
    assert done.returncode == 2
    assert done.stderr.startswith("echo-lm: There is no task 'recall'; there are mqar,")
