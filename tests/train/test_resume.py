"""A run that is interrupted and goes on is the run that was not, to the last bit."""

from __future__ import annotations

import io
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from echo_lm.model.config import SKAConfig
from echo_lm.train import TrainConfig, train
from echo_lm.train.history import METRICS_FILE

from .pairs import Pairs
from .runs import SHORT, same_weights, small_model, told


@dataclass(frozen=True)
class Interrupted(Pairs):
    """Ctrl-C, or a kill, while the batch of one step is made; the same task otherwise."""

    at: int = 0
    kill: bool = False

    def batch(self, rows: int, *, step: int = 0, split: Any = "train", **options: Any) -> Any:
        if split == "train" and step == self.at:
            if self.kill:
                raise MemoryError("as if killed")
            signal.raise_signal(signal.SIGINT)
        return super().batch(rows, step=step, split=split, **options)


@pytest.fixture(scope="module")
def whole() -> Any:
    model = small_model()
    return model, train(model, Pairs(), SHORT)


def described_as_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo_lm.train.loop.describe", lambda source: {"pairs": source.pairs})


@pytest.mark.parametrize("step", [0, 2, 4, 7, 11])
def test_ctrl_c_at_any_step(
    step: int, whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described_as_pairs(monkeypatch)
    console = Console(file=io.StringIO(), width=200)
    with pytest.raises(KeyboardInterrupt):
        train(small_model(), Interrupted(at=step), SHORT, folder=tmp_path, console=console)
    assert f"Stopped after step {step + 1}, which is kept in" in console.file.getvalue()
    assert [path.name for path in tmp_path.glob("step-*")] == [f"step-{step + 1:08d}"]

    model = small_model(seed=1)  # Weights come from the checkpoint.
    history = train(model, Pairs(), SHORT, folder=tmp_path)
    assert same_weights(model, whole[0])
    assert told(history) == told(whole[1])
    assert history.ended == "steps"


@pytest.mark.parametrize("step", [3, 7, 11])
def test_a_killed_run_goes_on_from_its_last_checkpoint(
    step: int, whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described_as_pairs(monkeypatch)
    with pytest.raises(MemoryError):
        train(small_model(), Interrupted(at=step, kill=True), SHORT, folder=tmp_path)
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 99, "lo')
    model = small_model()
    history = train(model, Pairs(), SHORT, folder=tmp_path)
    assert same_weights(model, whole[0])
    assert told(history) == told(whole[1])


def test_what_has_ended_comes_back_at_once(whole: Any, tmp_path: Path) -> None:
    first = train(small_model(), Pairs(), SHORT, folder=tmp_path)
    model = small_model(seed=1)
    again = train(model, Pairs(), SHORT, folder=tmp_path)
    assert again == first
    assert same_weights(model, whole[0])


def test_a_run_without_a_folder_is_the_same(whole: Any, tmp_path: Path) -> None:
    model = small_model()
    history = train(model, Pairs(), SHORT, folder=tmp_path)
    assert told(history) == told(whole[1])
    assert same_weights(model, whole[0])


def test_the_generators_go_on_too(tmp_path: Path) -> None:
    train(small_model(), Pairs(), SHORT, folder=tmp_path)
    after = torch.get_rng_state()
    torch.manual_seed(123)
    train(small_model(), Pairs(), SHORT, folder=tmp_path)
    assert torch.equal(torch.get_rng_state(), after)


def test_dropout_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described_as_pairs(monkeypatch)
    model = small_model(embedding_dropout=0.3)
    history = train(model, Pairs(), SHORT)
    with pytest.raises(KeyboardInterrupt):
        train(small_model(embedding_dropout=0.3), Interrupted(at=6), SHORT, folder=tmp_path)
    again = small_model(seed=1, embedding_dropout=0.3)
    assert told(train(again, Pairs(), SHORT, folder=tmp_path)) == told(history)
    assert same_weights(again, model)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lr": 1e-3}, r"train\.lr=0\.005, this call has 0\.001"),
        ({"steps": 13}, r"train\.steps=12, this call has 13"),
        ({"betas": (0.9, 0.99)}, r"train\.betas=\[0\.9, 0\.95\], this call has \[0\.9, 0\.99\]"),
    ],
)
def test_refuses_to_go_on_with_other_settings(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    train(small_model(), Pairs(), SHORT, folder=tmp_path)
    with pytest.raises(ValueError, match=said):
        train(small_model(), Pairs(), replace(SHORT, **changes), folder=tmp_path)


def test_refuses_to_go_on_with_another_model_or_task(tmp_path: Path) -> None:
    train(small_model(), Pairs(), SHORT, folder=tmp_path)
    with pytest.raises(ValueError, match=r"model\.ska\.rank=8, this call has 6"):
        train(small_model(ska=SKAConfig(rank=6)), Pairs(), SHORT, folder=tmp_path)
    with pytest.raises(ValueError, match=r"source\.pairs=2, this call has 3"):
        train(small_model(), Pairs(3), SHORT, folder=tmp_path)


def test_how_often_to_save_and_read_may_change(whole: Any, tmp_path: Path) -> None:
    train(small_model(), Pairs(), SHORT, folder=tmp_path)
    config: TrainConfig = replace(SHORT, checkpoint_every=1, read_every=1)
    assert told(train(small_model(), Pairs(), config, folder=tmp_path)) == told(whole[1])
