"""Two processes do what one does, by any strategy, and any may go on where another stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

from echo_lm import EchoLM
from echo_lm.train import train
from echo_lm.train.parallel import STRATEGIES, Alone, processes

from .pairs import Pairs
from .runs import SHORT, same_weights, small_model, told
from .two_processes import IN_PIECES

ROOT = Path(__file__).parents[2]
MANY = STRATEGIES[1:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two processes left what they did."""
    folder = tmp_path_factory.mktemp("two")
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", str(Path(__file__).with_name("two_processes.py"))),
            str(folder),
        ],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        timeout=300,
    )
    return folder


def found(folder: Path, kind: str) -> dict[str, Any]:
    return json.loads((folder / f"{kind}.json").read_text())


def numbers(records: list[dict[str, Any]]) -> torch.Tensor:
    """Loss and gradient norm of every step."""
    return torch.tensor([[r["loss"], r["gradient_norm"]] for r in records if "loss" in r])


def assert_same_run(got: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Sums over two processes round otherwise than sums over one; AdamW's first steps follow the
    sign of gradients near zero too."""
    torch.testing.assert_close(numbers(got), numbers(wanted), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", MANY)
def test_two_processes_do_what_one_does(kind: str, folder: Path) -> None:
    assert_same_run(found(folder, kind)["whole"], told(train(small_model(), Pairs(), SHORT)))


@pytest.mark.parametrize("kind", MANY)
def test_a_resumed_run_is_the_same_to_the_last_bit(kind: str, folder: Path) -> None:
    runs = found(folder, kind)
    assert runs["resumed"] == runs["whole"]
    a, b = (
        EchoLM.from_pretrained(folder / kind / run / "step-00000012")
        for run in ("whole", "resumed")
    )
    assert same_weights(a, b)


def test_strategies_agree(folder: Path) -> None:
    ddp, zero1, fsdp2 = (found(folder, kind)["whole"] for kind in MANY)
    assert ddp == zero1
    assert_same_run(fsdp2, ddp)


@pytest.mark.parametrize("kind", MANY)
def test_rows_read_in_pieces(kind: str, folder: Path) -> None:
    alone = told(train(small_model(), Pairs(), IN_PIECES))
    assert_same_run(found(folder, kind)["pieces"], alone)


@pytest.mark.parametrize("kind", MANY)
def test_one_process_goes_on_where_two_stopped(kind: str, folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    copytree(folder / kind / "half", run)
    model = small_model(seed=1)
    history = train(model, Pairs(), SHORT, folder=run)
    assert (run / "step-00000012").exists()
    assert_same_run(told(history), found(folder, kind)["whole"])


@pytest.mark.parametrize("kind", MANY)
def test_no_process_takes_a_step_that_is_not_finite(kind: str, folder: Path) -> None:
    said = found(folder, kind)["diverged"]
    assert said.startswith("Step 7 has loss nan")
    assert "the output of blocks.1.mlp (SwiGLU) is not finite" in said


@pytest.mark.parametrize(
    ("strategy", "started", "said"),
    [
        ("alone", 2, "torchrun has started 2 processes"),
        ("ddp", 1, "'ddp' needs processes to share the work"),
        ("tp", 1, "strategy must be one of alone, ddp, zero1, fsdp2, got 'tp'"),
    ],
)
def test_a_strategy_must_fit_how_it_was_started(
    strategy: Any, started: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(started))
    with pytest.raises(ValueError, match=said), processes(strategy, "cpu"):
        pass


def test_a_batch_that_cannot_be_shared_is_named() -> None:
    three = Alone()
    three.ranks = 3
    with pytest.raises(ValueError, match="A batch of 4 rows cannot be shared evenly by 3"):
        three.share(Pairs().batch(4, seed=0))


def test_no_row_is_left_out_of_the_pieces() -> None:
    two = Alone()
    two.ranks = 2
    share = two.share(Pairs().batch(12, seed=0))
    assert sum(len(piece.tokens) for piece in share.pieces(3)) == 6
    with pytest.raises(ValueError, match="6 rows cannot be read in 4 pieces of one size"):
        share.pieces(4)
