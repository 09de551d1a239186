"""No example is for training and for testing, and none is lost."""

from __future__ import annotations

import pytest
import torch

from echo_lm.tasks import MQAR, NIAH, TASKS, Mixture, Repeated, SystemPrompt, ToolTrace, find
from echo_lm.tasks.base import Batch, Split, is_test
from echo_lm.tasks.draws import Draws


def rows_of(tokens: torch.Tensor) -> set[tuple[int, ...]]:
    return {tuple(row) for row in tokens.tolist()}


def test_a_small_space_is_shared_out() -> None:
    """One pair without a gap: 32 keys by 32 values, and not one on both sides."""
    task = MQAR(pairs=1, gap=0)
    train = rows_of(task.batch(20_000, seed=0).tokens)
    test = rows_of(task.batch(20_000, seed=0, split="test").tokens)
    assert not train & test
    assert len(train | test) == 32 * 32
    assert 90 < len(test) < 170  # an eighth is 128


def test_a_test_example_is_hidden_even_where_tasks_overlap() -> None:
    """With no noise, a needle is a system prompt."""
    train = rows_of(SystemPrompt(1, 4).batch(15_000, seed=1).tokens)
    test = rows_of(NIAH(1, 4).batch(3_000, seed=1, split="test").tokens)
    assert not train & test
    assert len(train | test) > 0.98 * 64 * 63


@pytest.mark.parametrize("name", TASKS)
def test_splits_do_not_overlap(name: str) -> None:
    task = find(name)
    assert not is_test(task.batch(48, seed=7).tokens).any()
    assert is_test(task.batch(48, seed=7, split="test").tokens).all()


def test_one_in_eight_is_for_testing() -> None:
    tokens = torch.randint(128, (40_000, 12))
    assert abs(float(is_test(tokens).double().mean()) - 1 / 8) < 4 * (7 / 64 / 40_000) ** 0.5
    assert torch.equal(is_test(tokens), is_test(tokens.flip(0)).flip(0))
    assert not torch.equal(is_test(tokens), is_test(tokens.flip(1)))  # the order counts


def test_a_space_too_small_to_share_is_refused() -> None:
    class One(MQAR):
        def examples(self, draws: Draws) -> Batch:
            batch = super().examples(draws)
            return Batch(batch.tokens * 0, batch.labels, batch.facts)

    task = One(pairs=1, gap=0)
    splits: tuple[Split, Split] = ("test", "train")
    has, lacks = splits if is_test(torch.zeros(1, 4, dtype=torch.int64)) else splits[::-1]
    assert not task.batch(1, seed=0, split=has).tokens.any()
    with pytest.raises(ValueError, match="too few examples"):
        task.batch(1, seed=0, split=lacks)


PARTS = (SystemPrompt(2, 32), ToolTrace(2, 40))


def test_a_mixture_takes_turns_by_weight() -> None:
    mixture = Mixture(PARTS, (1, 3))
    lengths = [mixture.batch(2, seed=5, step=step).tokens.shape[1] for step in range(40)]
    for start in range(0, 40, 4):
        assert sorted(lengths[start : start + 4]) == [32, 40, 40, 40]
    assert len({tuple(lengths[start : start + 4]) for start in range(0, 40, 4)}) > 1
    assert mixture.length == 40
    assert mixture.vocab_size == 128


def test_a_mixture_goes_through_its_parts_in_order() -> None:
    """Each part's own batches, one after the other, none left out."""
    mixture = Mixture(PARTS, (1, 3))
    seen = {32: 0, 40: 0}
    for step in range(24):
        batch = mixture.batch(2, seed=5, step=step)
        length = batch.tokens.shape[1]
        own = PARTS[length == 40].batch(2, seed=5, step=seen[length])
        torch.testing.assert_close(batch.tokens, own.tokens)
        seen[length] += 1


def test_repeated_examples_come_back_every_epoch() -> None:
    task = Repeated(SystemPrompt(2, 32), count=20)
    epochs = [
        torch.cat([task.batch(5, seed=2, step=4 * epoch + i).tokens for i in range(4)])
        for epoch in range(3)
    ]
    assert all(len(rows_of(epoch)) == 20 for epoch in epochs)
    assert rows_of(epochs[0]) == rows_of(epochs[1]) == rows_of(epochs[2])
    assert not torch.equal(epochs[0], epochs[1])
    test = torch.cat([task.batch(20, seed=2, step=i, split="test").tokens for i in range(2)])
    assert len(rows_of(test)) == 40
    assert not rows_of(test) & rows_of(epochs[0])


def test_what_cannot_be_mixed_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one part"):
        Mixture(())
    with pytest.raises(ValueError, match="2 parts need as many weights, got 1"):
        Mixture(PARTS, (1,))
    with pytest.raises(ValueError, match="weights must be a whole number at least 1, got 0"):
        Mixture(PARTS, (1, 0))
    with pytest.raises(ValueError, match="the same symbols"):
        Mixture((SystemPrompt(), MQAR()))
    with pytest.raises(ValueError, match="rows must be a whole number between 1 and 20, got 21"):
        Repeated(SystemPrompt(), 20).batch(21, seed=0)
