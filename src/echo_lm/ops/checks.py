"""Debug mode: look for NaN and infinity at the operators' doors, at the price of a device sync."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

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
