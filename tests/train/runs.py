"""Small models and runs for the tests of the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from echo_lm import EchoConfig, EchoLM
from echo_lm.model.config import Mamba2Config, SKAConfig
from echo_lm.train import History, TrainConfig

SHORT = TrainConfig(
    steps=12,
    batch=4,
    lr=5e-3,
    warmup=3,
    evaluate_every=4,
    evaluate_rows=8,
    read_every=3,
    checkpoint_every=5,
)


def small_model(seed: int = 0, **changes: Any) -> EchoLM:
    """Mamba-2 and SKA, tied, in fp32: a thousandth of a second a step."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "dim": 32,
        "mixers": ("mamba2", "ska"),
        "vocab_size": 16,
        "heads": 2,
        "mlp": "swiglu",
        "mlp_hidden": 32,
        "ska": SKAConfig(rank=8),
        "mamba2": Mamba2Config(state_dim=8, head_dim=16),
    }
    return EchoLM(EchoConfig(**settings | changes))


def told(history: History) -> list[dict[str, Any]]:
    """Its records without what depends on the clock."""
    clock = ("tokens_per_second", "utilisation")
    return [
        {name: value for name, value in record.items() if name not in clock}
        for record in history.records
    ]


def same_weights(a: EchoLM, b: EchoLM) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def at_step(step: int, act: Callable[[], Any]) -> Callable[[dict[str, Any]], None]:
    """A watcher that acts when it hears of a step."""

    def watch(record: dict[str, Any]) -> None:
        if record["step"] == step and "loss" in record:
            act()

    return watch
