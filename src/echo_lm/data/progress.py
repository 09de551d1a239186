"""What preparing shows: a live line in a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich import progress
from rich.console import Console

from echo_lm.data.inputs import Input

QUIET = 30.0
"""Seconds after which a plain line is due."""


class Progress:
    """How much of the inputs is read, and how many tokens that made."""

    def __init__(
        self, console: Console | None, inputs: Sequence[Input], at: int, tokens: int
    ) -> None:
        self.console, self.inputs = console, inputs
        self.at, self.tokens = at, tokens
        self.before, self.started = tokens, time.perf_counter()
        self.shown = self.started
        self.bar: progress.Progress | None = None
        if console is not None and console.is_terminal:
            self.bar = progress.Progress(
                progress.TextColumn("Tokenising"),
                progress.BarColumn(),
                progress.TextColumn("{task.fields[told]}"),
                progress.TimeRemainingColumn(),
                console=console,
                transient=True,
            )
            known = all(one.size for one in inputs)
            total = sum(one.size for one in inputs) if known else None
            self.task = self.bar.add_task("", total=total, told="")

    def __enter__(self) -> Progress:
        if self.tokens:
            self.say(f"Going on after {self.tokens:,} tokens.")
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar is not None:
            self.bar.stop()
        if kind is None:
            self.say(self.told())

    def show(self, at: int, tokens: int) -> None:
        """Take in how far the work has come."""
        self.at, self.tokens = at, tokens
        if self.bar is not None:
            read = sum(one.size for one in self.inputs[:at]) + self.inputs[at].consumed
            self.bar.update(self.task, completed=read, told=self.told())
        elif time.perf_counter() - self.shown > QUIET:
            self.say(self.told())

    def told(self) -> str:
        seconds = time.perf_counter() - self.started
        speed = (self.tokens - self.before) / max(seconds, 1e-9)
        which = f"input {self.at + 1} of {len(self.inputs)}"
        return f"{self.tokens:,} tokens, {which}, {speed:,.0f} tokens/s"

    def say(self, text: str) -> None:
        if self.console is not None:
            self.console.print(text, highlight=False)
            self.shown = time.perf_counter()
