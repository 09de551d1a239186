"""What each of two processes does in the tests of `parallel`; what came out goes to a file.

python -m torch.distributed.run --nproc-per-node 2 tests/train/two_processes.py FOLDER
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from tests.train.pairs import Pairs
from tests.train.runs import SHORT, at_step, small_model, told
from tests.train.test_nonfinite import Poisoned, when_poisoned

from echo_lm.train import Diverged, train
from echo_lm.train.parallel import KINDS, STRATEGIES, Alone, processes

STEP = 9
"""After which a run is broken off; its last checkpoint is that of step 5."""
IN_PIECES = replace(SHORT, batch=8, accumulate=2)


class BrokenOffError(Exception):
    pass


def break_off() -> None:
    raise BrokenOffError


def whole_and_resumed(strategy: Alone, folder: Path) -> dict[str, Any]:
    """A run, and one that was broken off, is set aside as it then was, and goes on."""
    whole = train(small_model(), Pairs(), SHORT, strategy=strategy, folder=folder / "whole")
    with pytest.raises(BrokenOffError):
        train(
            small_model(),
            Pairs(),
            SHORT,
            strategy=strategy,
            folder=folder / "resumed",
            watch=at_step(STEP, break_off),
        )
    if strategy.rank == 0:
        copytree(folder / "resumed", folder / "half")
    resumed = train(
        small_model(seed=1), Pairs(), SHORT, strategy=strategy, folder=folder / "resumed"
    )
    return {"whole": told(whole), "resumed": told(resumed)}


def in_pieces(strategy: Alone) -> dict[str, Any]:
    return {"pieces": told(train(small_model(), Pairs(), IN_PIECES, strategy=strategy))}


def diverged(strategy: Alone) -> dict[str, Any]:
    model = small_model()
    when_poisoned(model, "blocks.1.mlp", lambda y: y * torch.inf)
    try:
        train(model, Poisoned(), IN_PIECES, strategy=strategy)
    except Diverged as stopped:
        return {"diverged": str(stopped)}
    return {}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    with processes("ddp", "cpu"):
        for kind in STRATEGIES[1:]:
            strategy = KINDS[kind]()
            found = whole_and_resumed(strategy, folder / kind)
            found |= in_pieces(strategy) | diverged(strategy)
            if strategy.rank == 0:
                (folder / f"{kind}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
