"""Debug mode: look for NaN and infinity at the operators' doors, at the price of a device sync."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from echo_lm.ops.state import TensorState

# A plain global, not a context variable: torch.compile can guard on it.
_debug = os.environ.get("ECHO_LM_DEBUG", "0") == "1"


def debugging() -> bool:
    """True inside `debug()`, or everywhere when ECHO_LM_DEBUG=1."""
    return _debug


@contextmanager
def debug(enabled: bool = True) -> Iterator[None]:
    """Have every operator refuse inputs that are not finite, naming the first one found."""
    global _debug
    before, _debug = _debug, enabled
    try:
        yield
    finally:
        _debug = before


def wants_gradient(*tensors: object, state: TensorState | None) -> bool:
    """Gradients are recorded, and one of these has some."""
    if not torch.is_grad_enabled():
        return False
    held = state.to_dict().values() if isinstance(state, TensorState) else ()
    return any(isinstance(x, Tensor) and x.requires_grad for x in (*tensors, *held))


def refuse_in_place(in_place: bool, learning: bool) -> None:
    """What a gradient needs must not be written over."""
    if in_place and learning:
        raise ValueError(
            "in_place=True was given where gradients are recorded; call it under torch.no_grad()."
        )


def require_finite(**tensors: Tensor | None) -> None:
    """In debug mode, raise for the first tensor that holds NaN or infinity."""
    if not debugging():
        return
    for name, tensor in tensors.items():
        if tensor is None or not tensor.is_floating_point():
            continue
        bad = ~torch.isfinite(tensor)
        if bad.any():
            where = bad.nonzero()[0].tolist()
            value = tensor[tuple(where)].item()
            raise ValueError(
                f"{name} must be finite, but {name}{where} is {value} "
                f"({int(bad.sum())} of {bad.numel()} entries are not finite)."
            )
