"""The last good checkpoint is never lost."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from echo_lm.train import train
from echo_lm.train.checkpoint import flatten, latest

from .pairs import Pairs
from .runs import SHORT, at_step, same_weights, small_model, told


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """Files end at `limit` bytes, as they would on a disk with no room for more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (0, r"metrics\.jsonl could not be written \(.*File too large"),
        (20_000, r"checkpoint of step 10 could not be written to .*; the last one, .*5, is whole"),
        (80_000, r"checkpoint of step 10 could not be written to .*; the last one, .*5, is whole"),
    ],
)
def test_a_full_disk_keeps_the_last_one(limit: int, said: str, tmp_path: Path) -> None:
    """No room at all; none for the weights; room for the weights and none for the optimiser."""
    whole = small_model()
    expected = train(whole, Pairs(), SHORT)
    config = replace(SHORT, read_every=1)
    with ExitStack() as disk:
        fill = at_step(9, lambda: disk.enter_context(full_disk(limit)))
        with pytest.raises(ValueError, match=said) as stopped:
            train(small_model(), Pairs(), config, folder=tmp_path, watch=fill)
    assert str(stopped.value).endswith("make room and run the same again to go on.")
    assert "\n" not in str(stopped.value)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000005"]

    model = small_model()
    history = train(model, Pairs(), SHORT, folder=tmp_path)
    assert told(history) == told(expected)
    assert same_weights(model, whole)


def test_one_that_was_cut_short_is_not_taken(tmp_path: Path) -> None:
    """A process killed while it wrote leaves a folder under another name."""
    train(small_model(), Pairs(), SHORT, folder=tmp_path)
    (tmp_path / "step-00000099.unfinished").mkdir()
    found = latest(tmp_path)
    assert found is not None
    assert found.name == "step-00000012"
    train(small_model(), Pairs(), SHORT, folder=tmp_path)


def test_a_copy_that_someone_keeps_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "step-00000005-before"
    mine.mkdir()
    killed = tmp_path / "step-00000003.unfinished"
    killed.mkdir()
    train(small_model(), Pairs(), SHORT, folder=tmp_path)
    assert mine.exists()
    assert not killed.exists()


def test_a_damaged_one_is_named(tmp_path: Path) -> None:
    train(small_model(), Pairs(), SHORT, folder=tmp_path)
    (tmp_path / "step-00000012" / "optimiser.safetensors").write_bytes(b"not that")
    with pytest.raises(ValueError, match=r"step-00000012 is not a whole checkpoint"):
        train(small_model(), Pairs(), SHORT, folder=tmp_path)


def test_holds_no_pickle(tmp_path: Path) -> None:
    train(small_model(), Pairs(), SHORT, folder=tmp_path)
    kinds = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert kinds == {".safetensors", ".json", ".jsonl"}


def test_nested_settings_have_one_name_each() -> None:
    assert flatten({"a": {"b": 1, "c": {"d": [2]}}, "e": None}) == {
        "a.b": 1,
        "a.c.d": [2],
        "e": None,
    }
