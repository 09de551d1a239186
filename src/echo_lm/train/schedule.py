"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from echo_lm.train.config import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """Of step 1, 2, ..., `config.steps`: a linear warm-up, then a cosine down to the floor."""
    if step <= config.warmup:
        return config.lr * step / config.warmup
    progress = (step - config.warmup) / max(1, config.steps - config.warmup)
    falling = 0.5 * (1 + math.cos(math.pi * min(progress, 1)))
    return config.lr * (config.floor + (1 - config.floor) * falling)
