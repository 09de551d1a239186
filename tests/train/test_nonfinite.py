"""A loss or gradient that is not finite stops the run, names its origin, and costs no weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from echo_lm import EchoLM
from echo_lm.train import Diverged, train

from .pairs import Pairs
from .runs import SHORT, same_weights, small_model, told

BAD = 7
"""The step that goes wrong."""


class Poisoned(Pairs):
    """Marks the batch of one step by a token that no other has."""

    def batch(self, rows: int, *, step: int = 0, split: Any = "train", **options: Any) -> Any:
        batch = super().batch(rows, step=step, split=split, **options)
        if step == BAD - 1 and split == "train":
            batch.tokens[0, 0] = 15
            return batch
        return replace(batch, tokens=batch.tokens.clamp_max(14))


class Explode(torch.autograd.Function):
    """The identity, whose gradient is infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * torch.inf


def when_poisoned(model: EchoLM, layer: str, spoil: Callable[[Tensor], Tensor]) -> None:
    """Spoil what a layer says of the marked batch."""
    poisoned = False

    def look(module: Any, inputs: tuple[Tensor, ...]) -> None:
        nonlocal poisoned
        poisoned = bool((inputs[0] == 15).any())

    def act(module: Any, inputs: Any, output: Any) -> Any:
        if not poisoned:
            return None
        return (spoil(output[0]), *output[1:]) if isinstance(output, tuple) else spoil(output)

    model.embedding.register_forward_pre_hook(look)
    model.get_submodule(layer).register_forward_hook(act)


@pytest.mark.parametrize("read_every", [1, 4, 12])
def test_names_the_layer_whose_output_is_not_finite(read_every: int, tmp_path: Path) -> None:
    model = small_model()
    when_poisoned(model, "blocks.1.mixers.0", lambda y: y * torch.nan)
    config = replace(SHORT, read_every=read_every, evaluate_every=12)
    with pytest.raises(Diverged) as stopped:
        train(model, Poisoned(), config, folder=tmp_path)
    assert str(stopped.value) == (
        "Step 7 has loss nan and gradient norm nan: the output of blocks.1.mixers.0 "
        f"(SpectralKoopmanAttention) is not finite; the last checkpoint is "
        f"{tmp_path / 'step-00000005'}."
    )


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        ("blocks.0.mlp", r"blocks\.0\.mlp \(SwiGLU\)"),
        ("blocks.1.mixer_norms.0", r"blocks\.1\.mixer_norms\.0 \(RMSNorm\)"),
        ("norm", r"norm \(RMSNorm\)"),
    ],
)
@pytest.mark.parametrize("changes", [{}, {"recompute": True}, {"accumulate": 2}])
def test_names_the_layer_that_spoils_the_gradient(
    layer: str, named: str, changes: dict[str, Any]
) -> None:
    """Gradients come from the end: every layer before it has one that is not finite too."""
    model = small_model()
    when_poisoned(model, layer, Explode.apply)
    with pytest.raises(Diverged, match=f"the gradient that {named} passes back is not finite"):
        train(model, Poisoned(), replace(SHORT, **changes))


def test_names_the_parameter_if_it_is_alone() -> None:
    model = small_model()
    mixer = model.mixers()[1]
    mixer.eta.register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(Diverged, match=r"the gradient of blocks\.1\.mixers\.0\.eta is not finite"):
        train(model, Pairs(), SHORT)


def test_the_weights_stay_those_before_the_step() -> None:
    """Though the host hears of it five steps later."""
    model, expected = small_model(), small_model()
    when_poisoned(model, "blocks.1.mlp", lambda y: y * torch.inf)
    with pytest.raises(Diverged, match="there is no checkpoint"):
        train(model, Poisoned(), replace(SHORT, read_every=12, evaluate_every=12))

    class Stop(Exception):
        pass

    def stop(record: dict[str, Any]) -> None:
        if record["step"] == BAD - 1:
            raise Stop

    with pytest.raises(Stop):
        train(expected, Poisoned(), replace(SHORT, read_every=1, evaluate_every=12), watch=stop)
    assert same_weights(model, expected)


def test_steps_before_it_are_on_record(tmp_path: Path) -> None:
    heard: list[dict[str, Any]] = []
    model = small_model()
    when_poisoned(model, "norm", lambda y: y * torch.nan)
    with pytest.raises(Diverged, match=r"the output of norm \(RMSNorm\)"):
        train(model, Poisoned(), replace(SHORT, read_every=12), folder=tmp_path, watch=heard.append)
    assert [r["step"] for r in heard if "loss" in r] == list(range(1, BAD))
    whole = told(train(small_model(), Poisoned(), SHORT))
    assert [r["loss"] for r in heard if "loss" in r] == [
        r["loss"] for r in whole if "loss" in r and r["step"] < BAD
    ]


def test_names_weights_that_were_never_finite() -> None:
    model = small_model()
    with torch.no_grad():
        model.head.weight[3, 0] = torch.nan
    with pytest.raises(Diverged, match=r"the weights embedding\.weight are not finite"):
        train(model, Pairs(), SHORT)
