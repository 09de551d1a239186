"""What `echo-lm tasks` shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from echo_lm.tasks import TASKS, find, settings_of
from echo_lm.tasks.base import Split, Spelled

FACT, ANSWER = "underline", "bold reverse"


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
    console.print(marked(task, seed, split))


def marked(task: Spelled, seed: int, split: Split) -> Text:
    """The sequence as rich text. An answer that does not stand in it is shown in brackets."""
    batch = task.batch(1, seed=seed, split=split)
    rows = zip(
        batch.tokens[0].tolist(),
        batch.labels[0].tolist(),
        batch.facts[0].tolist(),
        batch.answers[0].tolist(),
        strict=True,
    )
    text = Text()
    for token, label, fact, answer in rows:
        if answer:
            text.append(task.symbols.name(label), style=ANSWER)
        if answer and label != token:
            text.append(f"({task.symbols.name(token)})")
        if not answer:
            text.append(task.symbols.name(token), style=FACT if fact else "")
        text.append(task.symbols.separator)
    return text
