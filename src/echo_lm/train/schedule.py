"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from echo_lm.train.config import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """Of step 1, 2, ..., `config.steps`: a linear warm-up, then down to the floor."""
    if step <= config.warmup:
        return config.lr * step / config.warmup
    falling = wsd(config, step) if config.schedule == "wsd" else cosine(config, step)
    return config.lr * (config.floor + (1 - config.floor) * falling)


def cosine(config: TrainConfig, step: int) -> float:
    """From 1 at the end of the warm-up to 0 at the last step."""
    progress = (step - config.warmup) / max(1, config.steps - config.warmup)
    return 0.5 * (1 + math.cos(math.pi * min(progress, 1)))


def wsd(config: TrainConfig, step: int) -> float:
    """1 until the cool-down, then in a straight line to 0 at the last step."""
    return min(1.0, (config.steps - step) / max(1.0, config.cooldown * config.steps))
