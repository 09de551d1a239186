"""AdamW, and what it decays."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from echo_lm.train.config import TrainConfig


class AdamW(torch.optim.AdamW):
    """Takes no step while `found_inf` is 1, which the device finds out without the host."""

    found_inf: Tensor


def make_optimiser(model: nn.Module, config: TrainConfig) -> AdamW:
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for parameter in model.parameters():
        (matrices if decays(parameter) else rest).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


def decays(parameter: nn.Parameter) -> bool:
    """Matrices do; vectors, scalars and what a layer has marked do not."""
    return parameter.dim() >= 2 and not getattr(parameter, "_no_weight_decay", False)


def set_learning_rate(optimiser: torch.optim.Optimizer, lr: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = lr


def optimiser_tensors(model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Its state under the names of the parameters: `exp_avg.head.weight`."""
    return {
        f"{entry}.{name}": tensor
        for name, parameter in model.named_parameters()
        for entry, tensor in optimiser.state.get(parameter, {}).items()
    }


def load_optimiser_tensors(
    model: nn.Module, optimiser: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> None:
    """The inverse of `optimiser_tensors`; every tensor goes to where AdamW keeps it."""
    for name, parameter in model.named_parameters():
        entries = {
            key.removesuffix(f".{name}"): tensor
            for key, tensor in tensors.items()
            if key.partition(".")[2] == name
        }
        if entries:
            device = parameter.device
            optimiser.state[parameter] = {k: t.to(device) for k, t in entries.items()}
