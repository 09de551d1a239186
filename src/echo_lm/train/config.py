"""The settings of a run. Free of torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from echo_lm.settings import is_number, one_of, positive, share, whole


@dataclass(frozen=True)
class TrainConfig:
    """What, with the model and the source, decides every number of a run."""

    steps: int
    lr: float = 2e-3
    """The highest learning rate, reached after the warm-up."""
    batch: int = 16
    """Rows of a step."""
    accumulate: int = 1
    """Pieces a step's rows are read in; their gradients add up to those of the whole."""
    seed: int = 0
    """Of the batches; weights are the caller's to seed."""
    warmup: int = 100
    """Steps over which the learning rate rises from 0."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """After the warm-up: a cosine, or level until the cool-down (warm-up, stable, decay)."""
    floor: float = 0.1
    """The share of `lr` that the schedule ends at."""
    cooldown: float = 0.2
    """The share of the steps over which "wsd" falls, in a straight line."""
    weight_decay: float = 0.01
    """Of matrices; norms, biases and spectral parameters have none."""
    betas: tuple[float, float] = (0.9, 0.95)
    """How long AdamW remembers gradients, and their squares."""
    clip: float | None = 1.0
    """The largest gradient norm of a step; longer gradients are shortened to it. None: any."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Weights are fp32; "bf16" is autocast over them. "auto": bf16 on a GPU, fp32 on a CPU."""
    compile: bool = False
    """Run the model through `torch.compile` on a GPU; on a CPU it never is."""
    recompute: bool = False
    """Keep only what goes into each block and compute the rest again on the way back (activation
    checkpointing): less memory, more time."""
    facts_only: bool = False
    """Keep in SKA's memory only what the source marks as facts (the paper's action mask); the
    rest, queries among it, still asks."""
    evaluate_every: int = 100
    """Steps between evaluations; there is one after the last step in any case."""
    evaluate_rows: int = 128
    stop_at: float | None = None
    """End once this share of the answers is right."""
    patience: int | None = None
    """End after so many evaluations in a row that did not lower the loss."""
    read_every: int = 10
    """Steps between readings of the loss: each waits for the device."""
    checkpoint_every: int = 500
    """Steps between checkpoints; there is one at the end, and when interrupted, in any case."""

    def __post_init__(self) -> None:
        whole(self, "steps", "batch", "accumulate", "evaluate_every", "evaluate_rows")
        whole(self, "read_every", "checkpoint_every")
        whole(self, "warmup", "seed", least=0)
        positive(self, "lr")
        if self.clip is not None:
            positive(self, "clip")
        share(self, "floor", "cooldown")
        self._check_betas()
        one_of(self, "schedule", "cosine", "wsd")
        one_of(self, "precision", "auto", "fp32", "bf16")
        for name in ("compile", "recompute", "facts_only"):
            one_of(self, name, False, True)
        if self.warmup > self.steps:
            raise ValueError(
                f"warmup must be at most the {self.steps} steps of the run, got {self.warmup}."
            )
        if self.batch % self.accumulate:
            raise ValueError(
                f"batch must be a multiple of accumulate, got {self.batch} and {self.accumulate}."
            )
        if not is_number(self.weight_decay) or not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be 0 or more, got {self.weight_decay!r}.")
        if self.stop_at is not None:
            share(self, "stop_at")
        if self.patience is not None:
            whole(self, "patience")

    def _check_betas(self) -> None:
        """Two shares below 1; JSON and TOML have lists."""
        given: Any = self.betas
        betas = tuple(given) if isinstance(given, list | tuple) else (given,)
        object.__setattr__(self, "betas", betas)
        if len(betas) != 2 or not all(is_number(beta) and 0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers from 0 to below 1, got {given!r}.")

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "betas": list(self.betas)}
