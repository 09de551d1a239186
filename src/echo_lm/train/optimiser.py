"""AdamW, and what it decays."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from echo_lm.train.config import TrainConfig


class AdamW(torch.optim.AdamW):
    """Takes no step while `found_inf` is 1, which the device finds out without the host."""

    found_inf: Tensor


def parameter_groups(
    model: nn.Module, config: TrainConfig, decayed: Collection[str]
) -> list[dict[str, Any]]:
    """The parameters that are decayed, by name, and the rest, each with all its settings."""
    named = list(model.named_parameters())
    shared = {"lr": config.lr, "betas": config.betas}
    groups = [
        {
            "params": [p for name, p in named if (name in decayed) == decay],
            "weight_decay": config.weight_decay if decay else 0.0,
            **shared,
        }
        for decay in (True, False)
    ]
    return [group for group in groups if group["params"]]


def decayed_names(model: nn.Module) -> set[str]:
    """Matrices are decayed; vectors, and what a layer has marked, are not."""
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() >= 2 and not getattr(parameter, "_no_weight_decay", False)
    }


def set_learning_rate(optimiser: torch.optim.Optimizer, lr: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = lr
