"""How fast a run is, of how fast it could be."""

from __future__ import annotations

import time

import torch
from torch import nn

PRODUCTS = 5
SIDES = {"cuda": 8192, "cpu": 1024}
"""Of the square matrices whose product is timed: large enough to keep the machine busy."""


def flops_per_token(model: nn.Module) -> int:
    """Forward and backward, counting the weight matrices alone: 6 for each entry a token meets.

    The embedding is looked up, not multiplied; tied to the head it is both.
    """
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    heads = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return 6 * sum(p.numel() for p in matrices if id(p) not in looked_up or id(p) in heads)


def matrix_rate(device: torch.device | str, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a large matrix product, the best of a few."""
    device = torch.device(device)
    side = SIDES.get(device.type, SIDES["cpu"])
    a = torch.randn(side, side, device=device, dtype=dtype)
    seconds = []
    for _ in range(PRODUCTS):
        _finish(device)
        start = time.perf_counter()
        a @ a
        _finish(device)
        seconds.append(time.perf_counter() - start)
    return 2 * side**3 / min(seconds)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
