"""What a person sees of a task."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from echo_lm.tasks import TASKS, find, parse_settings
from echo_lm.tasks.show import ANSWER, FACT, marked, show_example, show_tasks


def shown(name: str, *settings: str) -> str:
    console = Console(file=io.StringIO(), width=4000)
    show_example(name, parse_settings(settings), seed=3, console=console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_every_task_is_listed_with_its_settings() -> None:
    console = Console(file=io.StringIO(), width=400)
    show_tasks(console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for name in TASKS:
        assert name in text
    assert "pairs=8, gap=128, queries=None" in text


@pytest.mark.parametrize("name", TASKS)
def test_facts_and_answers_are_marked(name: str) -> None:
    task = find(name)
    batch = task.batch(1, seed=3)
    text = marked(task, batch)
    facts = [text.plain[span.start : span.end] for span in text.spans if span.style == FACT]
    answers = [text.plain[span.start : span.end] for span in text.spans if span.style == ANSWER]
    separator = task.symbols.separator
    told = separator.join(
        task.spell(row[mark]) for row, mark in [(batch.tokens[0], batch.facts[0])]
    )
    assert separator.join(facts) == told
    wanted = task.spell(batch.labels[0][batch.answers[0]])
    if name == "zoology":  # what stands there instead follows in brackets
        answers = [answer.partition("(")[0] for answer in answers]
    assert separator.join(answers) == wanted


def test_long_noise_is_cut_short() -> None:
    text = shown("mqar", "pairs=2", "gap=5000")
    assert "mqar: 5,008 tokens of 128 symbols" in text
    assert " ... 4,881 more ... " in text
    assert len(text) < 1000


def test_settings_are_read_from_words() -> None:
    assert parse_settings(["pairs=3", "written=false", "tier=hard"]) == {
        "pairs": 3,
        "written": False,
        "tier": "hard",
    }
    with pytest.raises(ValueError, match="A setting is written like \"pairs=8\", got 'pairs'"):
        parse_settings(["pairs"])
