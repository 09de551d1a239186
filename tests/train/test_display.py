"""What a run shows to whom."""

from __future__ import annotations

import io
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from echo_lm.interrupt import deferred_interrupt
from echo_lm.train import train

from .pairs import Pairs
from .runs import SHORT, at_step, small_model


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_plain_lines_where_there_is_no_terminal() -> None:
    console = Console(file=io.StringIO(), width=100)
    train(small_model(), Pairs(), SHORT, console=console)
    lines = shown(console).splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 4/12", "step 8/12", "step 12/12"]
    for part in ("loss ", "% right", " tokens/s", " left"):
        assert part in lines[0]
    assert "\x1b" not in shown(console)


def test_a_live_line_in_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=160, force_terminal=True)
    train(small_model(), Pairs(), SHORT, console=console)
    assert "12/12" in shown(console)
    assert "step 12/12: loss " in shown(console).splitlines()[-1]


def test_says_that_it_goes_on(tmp_path: Path) -> None:
    watch = at_step(6, lambda: signal.raise_signal(signal.SIGINT))
    console = Console(file=io.StringIO(), width=200)
    with pytest.raises(KeyboardInterrupt):
        train(small_model(), Pairs(), SHORT, folder=tmp_path, watch=watch, console=console)
    train(small_model(), Pairs(), SHORT, folder=tmp_path, console=console)
    assert f"Going on after step 6 of {tmp_path}." in shown(console)


def test_without_a_folder_nothing_is_promised() -> None:
    watch = at_step(6, lambda: signal.raise_signal(signal.SIGINT))
    console = Console(file=io.StringIO(), width=200)
    with pytest.raises(KeyboardInterrupt):
        train(small_model(), Pairs(), SHORT, watch=watch, console=console)
    assert "Stopped after step 6. Nothing was kept" in shown(console)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_being_asked_again_is_at_once(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(number)
    with deferred_interrupt() as interrupted:
        assert not interrupted()
        signal.raise_signal(number)
        signal.raise_signal(number)
        assert interrupted()
        monkeypatch.setattr("echo_lm.interrupt.ONE_WISH", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_someone_else_s_handler_stays() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with deferred_interrupt() as interrupted:
            signal.raise_signal(signal.SIGINT)
            assert not interrupted()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_quiet_run_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    train(small_model(), Pairs(), replace(SHORT, steps=3))
    assert capsys.readouterr() == ("", "")
