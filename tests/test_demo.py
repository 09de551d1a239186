"""The demo on a budget that teaches nothing, and what it says of numbers made by hand."""

from __future__ import annotations

import io
import os
import signal
import sys
from pathlib import Path
from threading import enumerate as enumerate_threads
from typing import Any

import pytest
import torch
from rich.console import Console

from echo_lm import demo
from echo_lm.evaluate import Recall
from echo_lm.train import History

Shown = tuple[list[demo.Runner], str, Path]


def console(**options: Any) -> Console:
    return Console(file=io.StringIO(), width=200, **options)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """A run, what it printed, and where its plot is."""
    folder = tmp_path_factory.mktemp("demo") / "plots"
    where = console()
    runners = demo.run(1, folder, steps=5, rows=2, console=where)
    return runners, printed(where), folder / "echo-demo.png"


def test_shows_the_task(shown: Shown) -> None:
    example = shown[1].split("answers marked\n")[1].split("\n\n")[0].split()
    told = dict(zip(example[:4:2], example[1:4:2], strict=True))
    assert len(example) == demo.LENGTH
    assert dict(zip(example[-4::2], example[-3::2], strict=True)) == told


def test_all_learn_from_the_same_and_are_read_at_every_length(shown: Shown) -> None:
    runners = shown[0]
    assert [one.name for one in runners] == list(demo.MODELS)
    for one in runners:
        assert one.history.ended == "steps"
        assert [found.answers for found in one.read] == [2 * demo.PAIRS] * 4
    rates = [one.history.curve("lr") for one in runners]
    assert rates[0] == rates[1] == rates[2]


def test_progress_is_plain_where_there_is_no_terminal(shown: Shown) -> None:
    assert "\x1b" not in shown[1]
    for name in demo.MODELS:
        lines = [line for line in shown[1].splitlines() if line.startswith(f"{name}  ")]
        assert any("step     5  loss " in line and line.endswith("% right") for line in lines)
        assert any("texts of 4,096 tokens" in line for line in lines)


def test_the_table_shows_what_was_found(shown: Shown) -> None:
    for one in shown[0]:
        row = next(line for line in shown[1].splitlines() if line.startswith(f"│ {one.name} "))
        cells = [cell.strip() for cell in row.strip("│").split("│")]
        shares = [f"{found.accuracy:.0%}" for found in one.read]
        assert cells == [one.name, *shares, f"{one.read[-1].state_bytes:,} bytes"]


def test_only_the_cache_grows(shown: Shown) -> None:
    ssm, attention, ska = ([found.state_bytes for found in one.read] for one in shown[0])
    assert len(set(ssm)) == len(set(ska)) == 1
    per_token = 2 * 4 * 64
    assert attention[3] - attention[0] == per_token * 63 * demo.LENGTH


def test_the_plot_is_where_it_is_said_to_be(shown: Shown) -> None:
    assert f"The plot is in {shown[2]}" in shown[1]
    assert shown[2].read_bytes().startswith(b"\x89PNG")


def test_the_closing_words_are_of_these_numbers(shown: Shown) -> None:
    said = " ".join(shown[1].split())
    for sentence in demo.conclude(shown[0], 5):
        assert sentence in said


def made(near: float, far: float, bytes_near: int, bytes_far: int) -> demo.Runner:
    """What nobody has measured."""

    def found(accuracy: float, state_bytes: int) -> Recall:
        return Recall(accuracy, 0.0, 0.0, (), 1, 1, state_bytes)

    middle = [found(near, bytes_near)] * 2
    read = [found(near, bytes_near), *middle, found(far, bytes_far)]
    history = History([{"step": 1, "test_accuracy": near}], "steps")
    return demo.Runner("X", torch.nn.Identity(), history, read)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("numbers", "sentence"),
    [
        (
            (1.0, 0.99, 2000, 2000),
            "X keeps what it learned: 99% right in texts of 4,096 tokens; it remembers 2,000 bytes "
            "at any length.",
        ),
        (
            (0.9, 0.1, 100, 6400),
            "X falls from 90% to 10% right in texts of 4,096 tokens; its memory has grown "
            "64-fold, to 6,400 bytes.",
        ),
        (
            (0.3, 0.3, 100, 100),
            "X did not learn this in 7 steps (30% right); it remembers 100 bytes at any length.",
        ),
    ],
)
def test_the_words_follow_the_numbers(
    numbers: tuple[float, float, int, int], sentence: str
) -> None:
    assert demo.conclude([made(*numbers)], 7) == [sentence]


def test_without_matplotlib_it_says_how_to_get_the_plot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    where = console()
    demo.save_plot([made(1.0, 1.0, 1, 1)], tmp_path / "plot.png", where)
    assert "pip install 'echo-lm[plot]'" in printed(where)
    assert not list(tmp_path.iterdir())


def test_a_live_line_for_each_in_a_terminal() -> None:
    where = console(force_terminal=True)
    with demo.Lanes(where, 10) as lanes:
        for name in demo.MODELS:
            lanes.trained(name, {"step": 5, "loss": 0.9, "test_accuracy": 0.25})
            lanes.trained(name, {"step": 10, "loss": 0.5})
    *_, first, second, third, _ = printed(where).splitlines()
    for name, text in zip(demo.MODELS, (first, second, third), strict=True):
        assert name in text
        assert "step    10  loss 0.50   25% right" in text


class Interrupting(io.StringIO):
    """Presses Ctrl-C when the first progress is written, from whatever thread."""

    def write(self, text: str) -> int:
        if "  step " in text and "  step " not in self.getvalue():
            os.kill(os.getpid(), signal.SIGINT)
        return super().write(text)


def test_ctrl_c_ends_all_threads(tmp_path: Path) -> None:
    before = set(enumerate_threads())
    where = Console(file=Interrupting(), width=200)
    with pytest.raises(KeyboardInterrupt):
        demo.run(0, tmp_path, steps=50, rows=2, console=where)
    assert printed(where).endswith("Stopped before the end: there is nothing to show yet.\n")
    # Another test's thread may have ended meanwhile; none may be left that was not there.
    assert set(enumerate_threads()) <= before
    assert not list(tmp_path.iterdir())


def test_what_goes_wrong_in_a_thread_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rows, batch and piece must be at least 1, got 0"):
        demo.run(0, tmp_path, steps=2, rows=0, console=console())


def test_a_folder_that_is_none_is_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    where = console()
    with pytest.raises(ValueError, match=f"out must be a folder to write to, got {file}"):
        demo.run(0, file, console=where)
    assert printed(where) == ""


def test_a_folder_that_is_read_only_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By what the system says: root, who may run the tests, writes wherever it likes.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match=f"got {tmp_path}, which is read-only"):
        demo.run(0, tmp_path, console=console())


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_that_is_none_is_refused_at_once(seed: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"seed must be a whole number between 0 and .* {seed}"):
        demo.run(seed, tmp_path, console=console())
