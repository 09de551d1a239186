"""What a run shows: a live line in a terminal, plain lines elsewhere, nothing without a console."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from echo_lm.train.history import Record

QUIET = 60.0
"""Seconds after which a plain line is due though nothing was evaluated."""


class Display:
    """Shows records as they come."""

    def __init__(self, console: Console | None, steps: int, done: int) -> None:
        self.console, self.steps = console, steps
        self.latest: Record = {}
        self.done, self.started = done, time.perf_counter()
        self.shown = self.started
        self.progress: Progress | None = None
        if console is not None and console.is_terminal:
            self.progress = Progress(
                TextColumn("Training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[told]}"),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )
            self.bar = self.progress.add_task("", total=steps, completed=done, told="")

    def __enter__(self) -> Display:
        if self.progress is not None:
            self.progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.progress is not None:
            self.progress.stop()
            if self.latest:
                self.say(self.line())

    def show(self, record: Record) -> None:
        """Take in one record."""
        self.latest |= record
        if self.progress is not None:
            self.progress.update(self.bar, completed=record["step"], told=self.told())
        elif "test_loss" in record or time.perf_counter() - self.shown > QUIET:
            self.say(f"{self.line()}, {self.left()} left")

    def line(self) -> str:
        return f"step {self.latest['step']:,}/{self.steps:,}: {self.told()}"

    def told(self) -> str:
        """Loss, accuracy and speed, as far as known."""
        known = self.latest
        parts = [f"loss {known['loss']:.3f}"] if "loss" in known else []
        if "test_accuracy" in known:
            parts.append(f"{known['test_accuracy']:.1%} right")
        if "tokens_per_second" in known:
            parts.append(f"{known['tokens_per_second']:,.0f} tokens/s")
        if "utilisation" in known:
            parts.append(f"{known['utilisation']:.0%} of the matrix rate")
        return ", ".join(parts)

    def left(self) -> str:
        now = self.latest["step"]
        each = (time.perf_counter() - self.started) / max(1, now - self.done)
        seconds = (self.steps - now) * each
        return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"

    def say(self, text: str) -> None:
        if self.console is not None:
            self.console.print(text, highlight=False)
            self.shown = time.perf_counter()
