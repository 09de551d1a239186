"""How a model begins: what it imports, where its weights start, and its first steps."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import echo_lm
from echo_lm.layers import SpectralKoopmanAttention
from echo_lm.model import EchoLM

from .families import SHRUNK, random_tokens, small_config

WITH_SKA = [name for name in SHRUNK if "echo" in name or "ska" in name]


def test_importing_echo_does_not_import_torch() -> None:
    program = "import sys, echo_lm; assert 'torch' not in sys.modules; echo_lm.EchoLM; import torch"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("package", ["echo_lm", "echo_lm.model"])
def test_public_names_resolve(package: str) -> None:
    module = sys.modules[package]
    names = [name for name in dir(module) if not name.startswith("_")]
    assert {"EchoConfig", "EchoLM", "EchoState"} <= set(names)
    for name in names:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="EchoLLM"):
        module.EchoLLM  # noqa: B018


def test_public_names_are_what_they_say() -> None:
    assert echo_lm.EchoLM is EchoLM
    assert echo_lm.SKAState.__name__ == "SKAState"
    assert callable(echo_lm.ska)
    assert echo_lm.__version__.count(".") == 2


class Silence(nn.Module):
    """Adds nothing to the residual stream."""

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, None]:
        return torch.zeros_like(x), None


@pytest.mark.parametrize("name", WITH_SKA)
def test_a_new_model_is_the_same_without_its_ska(name: str) -> None:
    model = EchoLM(small_config(name))
    without = copy.deepcopy(model)
    replaced = 0
    for block in without.blocks:
        for i, mixer in enumerate(block.mixers):
            if isinstance(mixer, SpectralKoopmanAttention):
                block.mixers[i] = Silence()
                replaced += 1
    assert replaced
    tokens = random_tokens(model, 2, 20)
    assert torch.equal(model(tokens).logits, without(tokens).logits)


@pytest.mark.parametrize("name", SHRUNK)
def test_a_new_model_has_no_opinion(name: str) -> None:
    model = EchoLM(small_config(name))
    tokens = random_tokens(model, 4, 20)
    loss = model(tokens, labels=tokens).loss
    assert abs(loss.item() - math.log(model.config.vocab_size)) < 0.05


def test_what_layers_add_shrinks_with_depth() -> None:
    config = small_config("mamba2-ska-swiglu-50m")
    torch.manual_seed(0)
    outputs = [
        module.out_proj.weight
        for module in EchoLM(config).modules()
        if hasattr(module, "out_proj") and module.out_proj.weight.any()
    ]
    # Two Mamba-2 and three SwiGLU; SKA, silent as yet, is the sixth to add to the stream.
    assert len(outputs) == 5
    for weight in outputs:
        bound = weight.shape[1] ** -0.5 / math.sqrt(6)
        assert 0.9 * bound < weight.abs().max() <= bound


@pytest.mark.parametrize("name", SHRUNK)
def test_weight_decay_spares_what_is_not_a_matrix_of_a_projection(name: str) -> None:
    """The optimiser leaves 1-D parameters alone; layers mark what else it should."""
    for key, parameter in EchoLM(small_config(name)).named_parameters():
        spared = parameter.dim() < 2 or hasattr(parameter, "_no_weight_decay")
        part = key.rsplit(".", 1)[0].rsplit(".", 1)[-1]
        matrix = part.endswith("_proj") or part in ("embedding", "conv")
        assert spared != matrix or part == "conv", key


@pytest.mark.parametrize("name", WITH_SKA)
def test_the_operators_own_parameters_are_marked(name: str) -> None:
    model = EchoLM(small_config(name))
    own = [
        parameter
        for key, parameter in model.named_parameters()
        if key.endswith((".coef", ".eta", ".raw_gamma", ".raw_ridge"))
    ]
    assert len(own) == (2 if "paper" in name else 3)
    assert all(getattr(parameter, "_no_weight_decay", False) for parameter in own)


def gradients(model: EchoLM, tokens: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(tokens, labels=tokens).loss.backward()
    return {
        key: parameter.grad
        for key, parameter in model.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize("name", SHRUNK)
def test_every_parameter_learns_from_the_second_step_on(name: str) -> None:
    model = EchoLM(small_config(name))
    tokens = random_tokens(model, 4, 30)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = gradients(model, tokens)
    optimiser.step()
    second = gradients(model, tokens)
    everything = {key for key, _ in model.named_parameters()}
    for grads in (first, second):
        assert grads.keys() == everything
        assert all(grad.isfinite().all() for grad in grads.values())
    # SKA's output projection, zero as yet, is all that the first step can teach its branch.
    branch = "blocks.1.mixers.0.", "blocks.1.mixer_norms.0."
    silent = {key for key in everything if key.startswith(branch) and "out_proj" not in key}
    still = {key for key, grad in first.items() if not grad.any()}
    assert still == (silent if name in WITH_SKA else set())
    assert not {key for key, grad in second.items() if not grad.any()}


@pytest.mark.parametrize("name", ["echo-50m", "echo-50m-paper"])
def test_a_few_steps_lower_the_loss(name: str) -> None:
    model = EchoLM(small_config(name))
    tokens = random_tokens(model, 4, 30)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        loss = model(tokens, labels=tokens).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all(later < earlier for earlier, later in pairwise(losses))
