"""Every family: its answers follow from the tokens before them, and from nothing less."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_lm.tasks import TASKS, Family, find
from echo_lm.tasks.base import Batch

from .solvers import SOLVERS, Solver

CASES: list[tuple[str, dict[str, Any]]] = [
    ("mqar", {"pairs": 8, "gap": 128}),
    ("mqar", {"pairs": 32, "gap": 384}),
    ("mqar", {"pairs": 32, "gap": 4096}),
    ("mqar", {"pairs": 8, "gap": 0}),
    ("mqar", {"pairs": 4, "gap": 48, "queries": 1}),
    ("overwritten", {"pairs": 4, "rounds": 3, "gap": 8}),
    ("overwritten", {"pairs": 32, "rounds": 1, "gap": 0}),
    ("zoology", {"pairs": 4, "length": 64}),
    ("zoology", {"pairs": 16, "length": 64, "filler": "zero"}),
    ("zoology", {"pairs": 64, "length": 256}),
    ("system-prompt", {"pairs": 1, "length": 64}),
    ("system-prompt", {"pairs": 8, "length": 256}),
    ("tool-trace", {"pairs": 8, "length": 64}),
    ("tool-trace", {"pairs": 4, "length": 512}),
    ("niah", {"pairs": 1, "length": 64}),
    ("niah", {"pairs": 8, "length": 64}),
    ("niah", {"pairs": 4, "length": 2048}),
    ("multihop", {"pairs": 3, "noise": 16}),
    ("multihop", {"pairs": 8, "noise": 16}),
    ("multihop", {"pairs": 8, "noise": 256}),
    ("multihop", {"pairs": 4, "noise": 64, "written": False}),
    ("common-word", {"pairs": 8, "length": 64}),
    ("common-word", {"pairs": 4, "length": 512}),
    *((name, {"tier": tier}) for name in list(TASKS)[-4:] for tier in ("easy", "hard")),
]
IDS = [" ".join([name, *(f"{k}={v}" for k, v in how.items())]) for name, how in CASES]


def solver_of(task: Family, name: str) -> Solver:
    silent = not getattr(task, "written", True)
    return SOLVERS["multihop, silent" if silent else name]


def check_batch(task: Family, name: str, batch: Batch) -> None:
    """Answers derivable, labels where the answers stand, facts exactly the facts."""
    solver = solver_of(task, name)
    assert batch.tokens.shape == batch.labels.shape == batch.facts.shape
    assert batch.tokens.shape[1] == task.length
    assert batch.tokens.dtype == batch.labels.dtype == torch.int64
    assert int(batch.tokens.min()) >= 0
    assert int(batch.tokens.max()) < task.vocab_size
    if name != "zoology":  # where an answer is asked for and never shown
        torch.testing.assert_close(batch.labels[batch.answers], batch.tokens[batch.answers])
    for row in range(len(batch.tokens)):
        names = [task.spell(token[None]) for token in batch.tokens[row]]
        places = batch.answers[row].nonzero().flatten().tolist()
        assert places
        for place in places:
            answer = task.spell(batch.labels[row, place][None])
            assert solver.answer(names[:place]) == answer
        facts = set(batch.facts[row].nonzero().flatten().tolist())
        assert facts == solver.facts(names, places)
        assert max(facts) < places[0] - 1


@pytest.mark.parametrize(("name", "how"), CASES, ids=IDS)
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_reader_answers_everything(name: str, how: dict[str, Any], split: Any) -> None:
    task = find(name, **how)
    rows = 8 if task.length > 1000 else 24
    check_batch(task, name, task.batch(rows, seed=1, step=2, split=split))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_a_reader_answers_everything_whatever_the_settings(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list(TASKS)[:8]))
    pairs = data.draw(st.integers(2, 20))
    room = data.draw(st.integers(0, 60))
    spare = {
        "mqar": lambda: {"gap": room},
        "overwritten": lambda: {"gap": room % 8, "rounds": 1 + room % 3},
        "zoology": lambda: {"length": 4 * pairs + 2 * room},
        "system-prompt": lambda: {"length": 2 * pairs + 8 + room},
        "tool-trace": lambda: {"length": 3 * pairs + 8 + room},
        "niah": lambda: {"length": 2 * pairs + 2 + room},
        "multihop": lambda: {"noise": pairs + room, "written": data.draw(st.booleans())},
        "common-word": lambda: {"length": 6 * pairs + 2 + room},
    }[name]
    task = find(name, pairs=pairs, **spare())
    check_batch(task, name, task.batch(4, seed=data.draw(st.integers(0, 2**40))))


SMALL: list[tuple[str, dict[str, Any], float]] = [
    ("mqar", {"pairs": 4, "gap": 8}, 1 / 32),
    ("overwritten", {"pairs": 4, "rounds": 2, "gap": 2}, 1 / 32),
    ("zoology", {"pairs": 4, "length": 32}, 0.002),
    ("system-prompt", {"pairs": 4, "length": 32}, 1 / 64),
    ("tool-trace", {"pairs": 4, "length": 32}, 1 / 64),
    ("niah", {"pairs": 4, "length": 32}, 1 / 64),
    ("multihop", {"pairs": 3, "noise": 8}, 1 / 64),
    ("common-word", {"pairs": 2, "length": 32}, 1 / 64),
    ("tool-calling", {}, 1 / 10),
    ("cot-retrieval", {}, 1 / 10),
    ("specific-recall", {}, 1 / 10),
]


def guessed_by_position(task: Family) -> float:
    """The share right of whoever learned the most frequent answer for each question in turn."""

    def by_question(batch: Batch) -> list[list[int]]:
        return [row[asked].tolist() for row, asked in zip(batch.labels, batch.answers, strict=True)]

    seen: dict[int, Counter[int]] = defaultdict(Counter)
    for row in by_question(task.batch(3000, seed=0)):
        for turn, label in enumerate(row):
            seen[turn][label] += 1
    right = [
        seen[turn].most_common(1)[0][0] == label
        for row in by_question(task.batch(1500, seed=0, split="test"))
        for turn, label in enumerate(row)
    ]
    return sum(right) / len(right)


@pytest.mark.parametrize(("name", "how", "chance"), SMALL, ids=[name for name, *_ in SMALL])
def test_who_has_not_read_guesses(name: str, how: dict[str, Any], chance: float) -> None:
    """Four standard deviations of 1,500 guesses above chance are no knowledge."""
    spread = (chance * (1 - chance) / 1500) ** 0.5
    assert guessed_by_position(find(name, **how)) < chance + 4 * spread


def test_who_has_not_read_the_economy_knows_that_counts_are_small() -> None:
    """Its first digit is 0 more often than not, its second one is anything."""
    assert 0.4 < guessed_by_position(find("resource-economy")) < 0.65


@pytest.mark.parametrize("name", TASKS)
def test_a_batch_is_a_function_of_its_arguments(name: str) -> None:
    task = find(name)
    told = task.batch(6, seed=3, step=4)
    again = find(name).batch(6, seed=3, step=4)
    for field in ("tokens", "labels", "facts"):
        torch.testing.assert_close(getattr(again, field), getattr(told, field))
    more = task.batch(9, seed=3, step=4)
    torch.testing.assert_close(more.tokens[:6], told.tokens)
    for other in ({"seed": 2, "step": 4}, {"seed": 3, "step": 5}):
        assert not (task.batch(6, **other).tokens == told.tokens).all(1).any()
    held_out = task.batch(6, seed=3, step=4, split="test")
    assert not (held_out.tokens == told.tokens).all(1).any()


@pytest.mark.parametrize(
    ("tier", "name", "most"),
    [
        ("easy", "tool-calling", 400),
        ("hard", "tool-calling", 1500),
        ("easy", "resource-economy", 400),
        ("hard", "resource-economy", 3000),
        ("easy", "cot-retrieval", 400),
        ("hard", "cot-retrieval", 3000),
        ("easy", "specific-recall", 500),
        ("hard", "specific-recall", 2500),
    ],
)
def test_lengths_are_within_the_papers(tier: str, name: str, most: int) -> None:
    assert find(name, tier=tier).length <= most


@pytest.mark.parametrize(
    ("name", "how", "said"),
    [
        ("mqar", {"pairs": 33}, "pairs must be a whole number between 1 and 32, got 33."),
        ("mqar", {"pairs": 4, "queries": 5}, "queries must be .* between 1 and 4, got 5."),
        ("mqar", {"gap": -1}, "gap must be a whole number at least 0, got -1."),
        ("overwritten", {"rounds": 0}, "rounds must be a whole number at least 1, got 0."),
        ("mqar", {"gap": 1.5}, "gap must be a whole number at least 0, got 1.5."),
        ("zoology", {"pairs": 17}, "length must be .* at least 68, four for each pair, got 64."),
        ("zoology", {"length": 65}, "length must be even"),
        ("zoology", {"filler": "ones"}, "filler must be one of random, zero, got 'ones'."),
        ("system-prompt", {"length": 15}, "length must be .* at least 16 to hold .*, got 15."),
        ("tool-trace", {"pairs": 8, "length": 31}, "length must be .* at least 32 "),
        ("niah", {"pairs": 0}, "pairs must be a whole number between 1 and 32, got 0."),
        ("multihop", {"pairs": 1}, "pairs must be a whole number between 2 and 63, got 1."),
        ("multihop", {"pairs": 8, "noise": 7}, "noise must be .* at least 8, one after each"),
        ("common-word", {"pairs": 22}, "pairs must be a whole number between 1 and 21, got 22."),
        ("tool-calling", {"tier": "harder"}, "tier must be one of easy, hard, got 'harder'."),
        ("tool-calling", {"agents": 27}, "agents must be .* between 1 and 26, got 27."),
        ("niah", {"needles": 3}, "The task 'niah' has no setting 'needles'; it has pairs, length"),
        ("recall", {}, "There is no task 'recall'; there are mqar, overwritten, "),
    ],
)
def test_settings_out_of_range_are_named(name: str, how: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        find(name, **how)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"rows": 0}, "rows must be a whole number at least 1, got 0."),
        ({"rows": 1, "step": -1}, "step must be a whole number at least 0, got -1."),
        ({"rows": 1, "split": "dev"}, "split must be one of train, test, got 'dev'."),
    ],
)
def test_a_batch_that_is_none_is_refused(how: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        find("mqar").batch(**{"seed": 0, **how})
