"""What `echo-lm tasks` shows."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from echo_lm.model.loss import IGNORED_LABEL
from echo_lm.tasks import TASKS, find, settings_of
from echo_lm.tasks.base import Batch, Family, Split

FACT, ANSWER = "underline", "bold reverse"
LONGEST_RUN = 120
"""Tokens of noise that are shown in one go."""


def show_tasks(console: Console | None = None) -> None:
    """Every task, what it is and what can be set."""
    table = Table("Task", "What it is", "Settings")
    for name in TASKS:
        told = (TASKS[name].__doc__ or "").partition("\n")[0]
        settings = ", ".join(f"{key}={value}" for key, value in settings_of(name).items())
        table.add_row(name, told, settings)
    console = console or Console()
    console.print(table)
    console.print("An example: echo-lm tasks NAME [SETTING=VALUE ...]")


def show_example(
    name: str,
    settings: Mapping[str, Any],
    *,
    seed: int = 0,
    split: Split = "train",
    console: Console | None = None,
) -> None:
    """One sequence, with its facts and answers marked."""
    console = console or Console()
    task = find(name, **settings)
    console.print(f"[bold]{name}[/bold]: {task.length:,} tokens of {task.vocab_size:,} symbols")
    console.print(Text.assemble("facts ", ("underlined", FACT), ", answers ", ("marked", ANSWER)))
    console.print(marked(task, task.batch(1, seed=seed, split=split)))


def marked(task: Family, batch: Batch) -> Text:
    """The first sequence as rich text. Long runs of noise are cut short."""
    tokens, labels = batch.tokens[0].tolist(), batch.labels[0].tolist()
    asked, facts = batch.answers[0].tolist(), batch.facts[0].tolist()
    style = [ANSWER if a else FACT if f else "" for a, f in zip(asked, facts, strict=True)]
    text = Text()
    for mark, run in groupby(range(len(tokens)), key=lambda place: style[place]):
        places = list(run)
        if not mark and len(places) > LONGEST_RUN:
            kept = LONGEST_RUN // 2
            left_out = len(places) - 2 * kept
            text.append(spelled(task, tokens, labels, places[:kept]))
            text.append(f" ... {left_out:,} more ... ", style="dim")
            places = places[-kept:]
        text.append(spelled(task, tokens, labels, places), style=mark)
        text.append(task.symbols.separator)
    return text


def spelled(task: Family, tokens: list[int], labels: list[int], places: list[int]) -> str:
    """Tokens side by side; one that stands where another is asked for, in brackets behind it."""
    names = []
    for place in places:
        name, label = task.symbols.name(tokens[place]), labels[place]
        hidden = label not in (IGNORED_LABEL, tokens[place])
        names.append(f"{task.symbols.name(label)}({name})" if hidden else name)
    return task.symbols.separator.join(names)
