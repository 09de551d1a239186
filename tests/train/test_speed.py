"""How fast a run is told to be."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

from echo_lm import EchoConfig, EchoLM
from echo_lm.train import train
from echo_lm.train.speed import flops_per_token, matrix_rate

from .pairs import Pairs
from .runs import SHORT, small_model


@pytest.mark.parametrize("tied", [True, False])
def test_flops_are_those_of_the_weight_matrices(tied: bool) -> None:
    """Attention over one token adds next to nothing, so that a count of all products agrees."""
    config = EchoConfig(
        dim=64, mixers=("attention",) * 2, heads=4, vocab_size=50, mlp="swiglu", tie_embeddings=tied
    )
    model, tokens = EchoLM(config), torch.zeros(8, 1, dtype=torch.int64)
    with FlopCounterMode(display=False) as counted:
        model(tokens).logits.sum().backward()
    # The first block passes no gradient on to tokens, but to the embedding it does.
    assert 8 * flops_per_token(model) == pytest.approx(counted.get_total_flops(), rel=0.02)


def test_the_matrix_rate_is_one_this_machine_can_have() -> None:
    assert 1e8 < matrix_rate("cpu", torch.float32) < 1e14


def test_utilisation_is_told_to_who_watches() -> None:
    console = Console(file=io.StringIO(), width=200)
    shown = train(small_model(), Pairs(), SHORT, console=console)
    assert 0 < shown.last("utilisation") < 1
    assert "of the matrix rate" in console.file.getvalue()
    assert not train(small_model(), Pairs(), SHORT).curve("utilisation")
