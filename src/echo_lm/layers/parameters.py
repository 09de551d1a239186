"""How layers mark their parameters for the optimiser."""

from __future__ import annotations

from torch import nn


def no_weight_decay(*parameters: nn.Parameter | None) -> None:
    """Mark what an optimiser should not pull towards zero."""
    for parameter in parameters:
        if parameter is not None:
            parameter._no_weight_decay = True  # type: ignore[attr-defined]
