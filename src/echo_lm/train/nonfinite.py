"""What to say when a loss or a gradient is not finite: the step, the layer, the way back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from echo_lm.model.lm import LAYERS

PARTS = (*LAYERS, nn.Embedding, nn.RMSNorm)


class Diverged(ValueError):
    """A loss or a gradient was not finite."""


def parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Embedding, norms, layers and head, under their names and in the order they compute."""
    for name, module in model.named_modules():
        if isinstance(module, PARTS) or name == "head":
            yield f"{name} ({type(module).__name__})", module


def find_cause(model: nn.Module, take_step: Callable[[], Any]) -> str:
    """Take the step again without changing weights, and name the part where it first goes wrong.

    Forward, that is the first part whose output is not finite; backward, where gradients come from
    the end, the last part whose parameters have one that is not.
    """
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            return f"the weights {name} are not finite"
    seen: list[str] = []
    with _watch_outputs(model, seen):
        loss = take_step()
    if seen:
        return f"the output of {seen[0]} is not finite"
    if not bool(loss.isfinite()):
        return "the loss is not finite, though every layer's output is"
    wrong = [
        name
        for name, module in parts(model)
        for parameter in module.parameters()
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all())
    ]
    if wrong:
        return f"the gradient of {wrong[-1]} is not finite"
    return "a gradient was not finite, and is when the step is taken again"


@contextmanager
def _watch_outputs(model: nn.Module, seen: list[str]) -> Iterator[None]:
    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            y = output[0] if isinstance(output, tuple) else output
            if isinstance(y, Tensor) and not bool(y.isfinite().all()):
                seen.append(name)

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in parts(model)]
    try:
        with torch.enable_grad():
            yield
    finally:
        for handle in handles:
            handle.remove()
