"""Recall as counted by hand, whatever the pieces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from echo_lm import EchoConfig, EchoLM
from echo_lm.evaluate import Recall, recall
from echo_lm.model.config import Mamba2Config, SKAConfig
from echo_lm.tasks.base import Batch

MIXERS = [("mamba2", "ska"), ("mamba2", "attention"), ("mamba3",)]


class Questions:
    """Random tokens; row i asks at every (i + 2)-th place."""

    def batch(self, rows: int, *, seed: int, step: int = 0, device: Any = "cpu", **_: Any) -> Batch:
        source = torch.Generator().manual_seed(1000 * seed + step)
        tokens = torch.randint(6, (rows, 40), generator=source)
        places = torch.arange(40)
        asked = (places % (torch.arange(rows)[:, None] + 2) == 1) & (places > 0)
        labels = torch.where(asked, tokens, -100)
        return Batch(tokens, labels, torch.rand(rows, 40, generator=source) < 0.5).to(device)


def a_model(mixers: Any = MIXERS[0]) -> EchoLM:
    torch.manual_seed(1)
    config = EchoConfig(
        dim=32,
        mixers=mixers,
        vocab_size=6,
        heads=2,
        ska=SKAConfig(rank=8),
        mamba2=Mamba2Config(state_dim=8, head_dim=16),
    )
    model = EchoLM(config)
    for mixer in model.mixers():
        torch.nn.init.xavier_uniform_(mixer.out_proj.weight)
    return model


def by_hand(model: EchoLM, rows: int) -> Recall:
    batch = Questions().batch(rows, seed=0)
    with torch.inference_mode():
        out = model(batch.tokens, return_state=True)
    hits: list[list[bool]] = []
    loss = 0.0
    for row in range(rows):
        hits.append([])
        for t in range(1, 40):
            label = int(batch.labels[row, t])
            if label != -100:
                said = out.logits[row, t - 1]
                hits[-1].append(int(said.argmax()) == label)
                loss -= float(said.log_softmax(-1)[label])
    longest = max(len(row) for row in hits)
    nth = [[row[i] for row in hits if i < len(row)] for i in range(longest)]
    answers = sum(len(row) for row in hits)
    return Recall(
        accuracy=sum(map(sum, hits)) / answers,
        exact=sum(map(all, hits)) / rows,
        loss=loss / answers,
        by_position=tuple(sum(right) / len(right) for right in nth),
        rows=rows,
        answers=answers,
        state_bytes=out.state.nbytes // rows,
    )


@pytest.mark.parametrize("mixers", MIXERS)
@pytest.mark.parametrize("piece", [1024, 40, 16, 7, 1])
def test_equals_counting_by_hand_in_any_pieces(mixers: Any, piece: int) -> None:
    model = a_model(mixers)
    expected = by_hand(model, 5)
    got = recall(model, Questions(), rows=5, piece=piece)
    assert got.loss == pytest.approx(expected.loss, rel=1e-5)
    assert replace(got, loss=expected.loss) == expected


def test_batches_add_up() -> None:
    class Even(Questions):
        """The rows of `Questions`, whatever batch they come in."""

        def batch(self, rows: int, *, step: int = 0, **options: Any) -> Batch:
            whole = super().batch(8, step=0, **options)
            return Batch(*(t[3 * step : 3 * step + rows] for t in vars(whole).values()))

    model = a_model()
    whole, parts = (recall(model, Even(), rows=8, batch=batch) for batch in (8, 3))
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5)
    assert replace(parts, loss=whole.loss) == whole


@pytest.mark.parametrize(("said", "share"), [(3, 1.0), (5, 0.0)])
def test_a_perfect_and_a_hopeless_model(said: int, share: float) -> None:
    class Threes(Questions):
        def batch(self, *arguments: Any, **options: Any) -> Batch:
            batch = super().batch(*arguments, **options)
            return replace(batch, labels=torch.where(batch.answers, 3, -100))

    model = a_model()
    model.head.register_forward_hook(lambda module, inputs, y: 100 * torch.eye(6)[said] + 0 * y)
    got = recall(model, Threes(), rows=4)
    assert got.accuracy == got.exact == share
    assert set(got.by_position) == {share}
    assert got.loss == pytest.approx(0 if share else 100)


def test_facts_only_masks_the_memory() -> None:
    model = a_model()
    free, masked = (recall(model, Questions(), rows=4, facts_only=only) for only in (False, True))
    assert free.loss != masked.loss
    plain = a_model(("mamba2",))
    assert recall(plain, Questions(), rows=4) == recall(plain, Questions(), rows=4, facts_only=True)


def test_leaves_the_model_as_it_was() -> None:
    model = a_model().train()
    recall(model, Questions(), rows=2)
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_a_source_that_asks_nothing() -> None:
    class Silent(Questions):
        def batch(self, *arguments: Any, **options: Any) -> Batch:
            batch = super().batch(*arguments, **options)
            return replace(batch, labels=torch.full_like(batch.labels, -100))

    with pytest.raises(ValueError, match="The source asks for nothing"):
        recall(a_model(), Silent(), rows=2)


@pytest.mark.parametrize("name", ["rows", "batch", "piece"])
def test_refuses_nothing_to_do(name: str) -> None:
    with pytest.raises(ValueError, match=r"rows, batch and piece must be at least 1"):
        recall(a_model(), Questions(), **{name: 0})
