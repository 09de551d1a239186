"""What the loop does with a model, a source and its settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from echo_lm import EchoLM
from echo_lm.model.config import SKAConfig
from echo_lm.tasks import Batch
from echo_lm.train import Record, TrainConfig, train
from echo_lm.train.history import METRICS_FILE
from echo_lm.train.loop import describe, why_ended
from echo_lm.train.optimiser import decayed_names, parameter_groups
from echo_lm.train.schedule import learning_rate

from .pairs import Pairs
from .runs import SHORT, same_weights, small_model, told


def by_hand(model: EchoLM, task: Pairs, config: TrainConfig) -> list[float]:
    """The same run in plain PyTorch."""
    decayed = decayed_names(model)
    groups = [
        {"params": [p for n, p in model.named_parameters() if n in decayed], "weight_decay": 0.01},
        {"params": [p for n, p in model.named_parameters() if n not in decayed], "weight_decay": 0},
    ]
    optimiser = torch.optim.AdamW(groups, betas=config.betas, fused=True)
    losses = []
    for step in range(1, config.steps + 1):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(config, step)
        optimiser.zero_grad()
        batch = task.batch(config.batch, seed=config.seed, step=step - 1)
        loss = model(batch.tokens, labels=batch.labels, logits_to_keep=0).loss
        loss.backward()
        if config.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimiser.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("clip", [1.0, 1e-9, None])
def test_is_plain_training(clip: float | None) -> None:
    """At 1e-9 gradients are so short that AdamW's epsilon shortens its steps."""
    config = replace(SHORT, clip=clip)
    model, expected = small_model(), small_model()
    losses = by_hand(expected, Pairs(), config)
    history = train(model, Pairs(), config)
    assert [loss for _, loss in history.curve("loss")] == losses
    assert same_weights(model, expected)


def test_learns() -> None:
    config = TrainConfig(steps=300, batch=16, lr=5e-3, warmup=20, stop_at=0.98, evaluate_every=50)
    history = train(small_model(), Pairs(), config)
    assert history.ended == "target"
    assert history.steps < 300
    assert history.last("test_accuracy") >= 0.98


def test_the_metrics_file_holds_the_history(tmp_path: Path) -> None:
    heard: list[Record] = []
    history = train(small_model(), Pairs(), SHORT, folder=tmp_path, watch=heard.append)
    lines = (tmp_path / METRICS_FILE).read_text().splitlines()
    assert [json.loads(line) for line in lines] == history.records == heard
    assert [step for step, _ in history.curve("loss")] == list(range(1, 13))
    assert [step for step, _ in history.curve("test_loss")] == [4, 8, 12]
    assert {"step", "loss", "lr", "gradient_norm", "tokens_per_second"} == set(history.records[0])
    health = history.last("ska")["blocks.1.mixers.0"]
    assert health["lambda_min"] >= 0.9 * min(health["ridge"])
    assert health["condition"] > 1
    assert len(health["coefficients"]) == 2


def test_weights_are_there_for_the_next_reader(tmp_path: Path) -> None:
    model = small_model()
    train(model, Pairs(), SHORT, folder=tmp_path)
    assert same_weights(EchoLM.from_pretrained(tmp_path / "step-00000012"), model)


def test_the_seed_chooses_the_batches() -> None:
    one, same, other = (
        told(train(small_model(), Pairs(), replace(SHORT, seed=seed))) for seed in (0, 0, 1)
    )
    assert one == same
    assert one != other


def test_facts_only_leaves_the_rest_out_of_memory() -> None:
    """A model of SKA alone, asked where nothing was marked, has nothing to answer from."""

    class Unmarked(Pairs):
        def batch(self, *arguments: Any, **options: Any) -> Any:
            batch = super().batch(*arguments, **options)
            return replace(batch, facts=torch.zeros_like(batch.facts))

    def trained(task: Pairs, facts_only: bool) -> Any:
        model = small_model(mixers=("ska",))
        return train(model, task, replace(SHORT, facts_only=facts_only))

    health = trained(Unmarked(), True).last("ska")["blocks.0.mixers.0"]
    assert health["condition"] == pytest.approx(1)
    assert told(trained(Pairs(), True)) != told(trained(Pairs(), False))
    assert told(trained(Unmarked(), False)) == told(trained(Pairs(), False))


def test_patience_and_target_end_a_run() -> None:
    def history_of(*losses: float, accuracy: float = 0.0) -> Any:
        history = train(small_model(), Pairs(), replace(SHORT, steps=3, evaluate_rows=1))
        history.records = [
            {"step": 4 * i, "test_loss": loss, "test_accuracy": accuracy}
            for i, loss in enumerate(losses, start=1)
        ]
        return history

    patient = replace(SHORT, steps=100, patience=2, stop_at=0.9)
    assert why_ended(history_of(), patient) == ""
    assert why_ended(history_of(3, 2, 2.5), patient) == ""
    assert why_ended(history_of(3, 2, 2.5, 2.1), patient) == "patience"
    assert why_ended(history_of(3, 2, 2.5, 1.9), patient) == ""
    assert why_ended(history_of(3, 2, accuracy=0.9), patient) == "target"
    assert why_ended(history_of(3, 2), replace(SHORT, steps=8)) == "steps"


def test_tests_on_another_source() -> None:
    history = train(small_model(), Pairs(), SHORT, test=Pairs(3))
    assert told(history) != told(train(small_model(), Pairs(), SHORT))
    losses = [loss for _, loss in history.curve("loss")]
    assert losses == [loss for _, loss in train(small_model(), Pairs(), SHORT).curve("loss")]


def test_curves_thin_out_and_keep_their_end() -> None:
    history = train(small_model(), Pairs(), SHORT)
    assert [step for step, _ in history.curve("lr", every=5)] == [1, 6, 11, 12]


def test_learning_rate_rises_then_falls_to_the_floor() -> None:
    config = TrainConfig(steps=100, lr=1.0, warmup=10, floor=0.2)
    rates = [learning_rate(config, step) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[54] == pytest.approx(0.6)
    assert rates[-1] == pytest.approx(0.2)
    assert learning_rate(TrainConfig(steps=5, lr=1.0, warmup=0), 1) > 0.9
    assert learning_rate(TrainConfig(steps=5, lr=1.0, warmup=5), 5) == 1


def test_a_level_learning_rate_falls_in_the_cool_down() -> None:
    config = TrainConfig(steps=100, lr=2.0, warmup=10, floor=0.1, schedule="wsd", cooldown=0.2)
    rates = [learning_rate(config, step) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.2 * step for step in range(1, 11)])
    assert set(rates[9:80]) == {2.0}
    assert rates[89] == pytest.approx(0.5 * (2.0 + 0.2))
    assert rates[-1] == pytest.approx(0.2)


@pytest.mark.parametrize("pieces", [2, 4])
def test_pieces_add_up_to_the_whole(pieces: int) -> None:
    """Though rows have different numbers of answers, and some have none."""

    class Ragged(Pairs):
        def batch(self, rows: int, **options: Any) -> Batch:
            batch = super().batch(rows, **options)
            batch.labels[::3, 5:] = -100
            return batch

    whole, model = small_model(), small_model()
    wanted = train(whole, Ragged(), SHORT)
    got = train(model, Ragged(), replace(SHORT, accumulate=pieces))
    for name in ("loss", "gradient_norm"):
        for (_, a), (_, b) in zip(got.curve(name), wanted.curve(name), strict=True):
            assert a == pytest.approx(b, rel=1e-4)


def test_what_decays() -> None:
    model = small_model(mixers=("mamba2", "ska", "attention"), ska=SKAConfig(rank=8))
    decayed = decayed_names(model)
    assert "embedding.weight" in decayed
    assert "blocks.1.mixers.0.q_proj.weight" in decayed
    for kept in ("norm.weight", "coef", "raw_ridge", "eta", "A_log", "dt_bias", "conv.bias", "D"):
        assert not any(name.endswith(kept) for name in decayed), kept
    groups = parameter_groups(model, SHORT, decayed)
    assert [group["weight_decay"] for group in groups] == [0.01, 0.0]
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def test_sources_are_told_apart() -> None:
    class Plain:
        def __init__(self, inner: Pairs) -> None:
            self.inner, self.size = inner, 3

    assert describe(Pairs(3)) == {"kind": "Pairs", "pairs": 3, "vocab_size": 16}
    assert describe(Plain(Pairs())) == {"kind": "Plain", "inner": "Pairs", "size": 3}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": 0}, "steps must be a whole number from 1 on, got 0"),
        ({"steps": 2.5}, "steps must be a whole number"),
        ({"warmup": 101}, "warmup must be at most the 100 steps of the run, got 101"),
        ({"lr": -1.0}, "lr must be a positive number, got -1.0"),
        ({"clip": float("inf")}, "clip must be a positive number"),
        ({"clip": 0.0}, "clip must be a positive number, got 0.0"),
        ({"stop_at": 99}, "stop_at is a share between 0 and 1, got 99"),
        ({"weight_decay": -0.1}, "weight_decay must be 0 or more"),
        ({"precision": "fp16"}, "precision must be one of 'auto', 'fp32', 'bf16'; got 'fp16'"),
        ({"lr": "high"}, "lr must be a positive number, got 'high'"),
        ({"batch": 10, "accumulate": 4}, "batch must be a multiple of accumulate, got 10 and 4"),
        ({"schedule": "linear"}, "schedule must be one of 'cosine', 'wsd'; got 'linear'"),
        ({"cooldown": 20}, "cooldown is a share between 0 and 1, got 20"),
        ({"patience": 0}, "patience must be a whole number from 1 on"),
    ],
)
def test_refuses_settings_that_make_no_sense(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TrainConfig(**{"steps": 100, "warmup": 10, **changes})
