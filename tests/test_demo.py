from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from echo_lm import EchoConfig, EchoLM, demo
from echo_lm.model.lm import EchoOutput


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=100)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_agrees_and_says_so(console: Console) -> None:
    assert demo.run(300, seed=1, console=console)
    assert "they agree" in printed(console)


class Forgetful(EchoLM):
    """Forgets everything before each call."""

    def forward(self, input_ids: Tensor, *args: Any, **options: Any) -> EchoOutput:
        options["state"] = None
        return super().forward(input_ids, *args, **options)


class Deaf(EchoLM):
    """Loses one number of one SKA state in each call."""

    def forward(self, *args: Any, **options: Any) -> EchoOutput:
        out = super().forward(*args, **options)
        if out.state is not None:
            out.state = out.state.clone()
            out.state.layers[-1].value[0, 0, 0, 0] = 0
        return out


@pytest.mark.parametrize("wrong", [Forgetful, Deaf])
def test_fails_when_a_state_is_wrong(
    wrong: type[EchoLM], console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "EchoLM", wrong)
    assert not demo.run(300, seed=1, console=console)
    assert "above 1e-03" in printed(console)


def test_the_untrained_model_listens_to_its_memory() -> None:
    """SKA layers start silent: a demo with silent layers would show nothing."""
    model = demo.untrained("synthetic-ska")
    assert all(bool(mixer.out_proj.weight.any()) for mixer in model.mixers())


@pytest.mark.parametrize("tokens", [128, 129, 1000, 20_000])
def test_pieces_are_the_text(tokens: int) -> None:
    text = torch.arange(tokens).unsqueeze(0)
    cut = list(demo.pieces(text))
    assert torch.equal(torch.cat(cut, dim=1), text)
    assert all(1 <= piece.shape[1] <= demo.LONGEST_PIECE for piece in cut)
    assert all(piece.shape[1] == 1 for piece in cut[-demo.STEPS :])


@pytest.mark.parametrize("tokens", [-1, 0, 127])
def test_too_short_a_text_is_refused(tokens: int) -> None:
    with pytest.raises(ValueError, match=f"tokens must be at least 128, got {tokens}"):
        demo.run(tokens, seed=0)


def test_cache_is_that_of_a_transformer_of_the_same_shape() -> None:
    model = EchoLM(EchoConfig(dim=64, heads=4, mixers=("attention",) * 3, vocab_size=16)).eval()
    with torch.inference_mode():
        state = model(torch.zeros(1, 7, dtype=torch.int64), return_state=True).state
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in state.layers)
    assert demo.cache(model, 7) == kept
