"""What to say when a loss or a gradient is not finite: the step, the layer, the way back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from echo_lm.model.lm import LAYERS

PARTS = (*LAYERS, nn.Embedding, nn.RMSNorm)


class Diverged(ValueError):
    """A loss or a gradient was not finite."""


@dataclass
class Watch:
    """What the parts of a model said in one step, in the order they computed."""

    parts: list[str] = field(default_factory=list)
    wrong_outputs: list[str] = field(default_factory=list)
    wrong_gradients: set[str] = field(default_factory=set)
    """Parts whose output has a gradient that is not finite; what comes after them made it."""


def find_cause(model: nn.Module, take_step: Callable[[], Tensor]) -> str:
    """Take the step again and name the part where it first goes wrong, forward or backward.

    `take_step` fills in gradients, returns the loss, and leaves the weights alone.
    """
    for name, parameter in model.named_parameters():
        if not is_finite(parameter):
            return f"the weights {name} are not finite"
    with watched(model) as seen:
        loss = take_step()
    if seen.wrong_outputs:
        return f"the output of {seen.wrong_outputs[0]} is not finite"
    if not is_finite(loss):
        return "the loss is not finite though every layer's output is"
    # Rows in pieces, and blocks that are computed again on the way back, come several times.
    parts = list(dict.fromkeys(seen.parts))
    wrong = [place for place, part in enumerate(parts) if part in seen.wrong_gradients]
    if wrong:
        after = [*parts, "the loss"][wrong[-1] + 1]
        return f"the gradient that {after} passes back is not finite"
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not is_finite(parameter.grad):
            return f"the gradient of {name} is not finite"
    return "nothing is amiss when the step is taken again"


@contextmanager
def watched(model: nn.Module) -> Iterator[Watch]:
    """Look at every output of embedding, norms, layers and head, and at its gradient."""
    seen = Watch()

    def watch(part: str) -> Callable[..., None]:
        def look_back(gradient: Tensor) -> None:
            if not is_finite(gradient):
                seen.wrong_gradients.add(part)

        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            y = output[0] if isinstance(output, tuple) else output
            seen.parts.append(part)
            if not is_finite(y):
                seen.wrong_outputs.append(part)
            y.register_hook(look_back)

        return look

    handles = [
        module.register_forward_hook(watch(f"{name} ({type(module).__name__})"))
        for name, module in model.named_modules()
        if isinstance(module, PARTS) or name == "head"
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def is_finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())
