"""The delta rule of DeltaNet; the mathematics is in README.md."""

from echo_lm.ops.delta.interface import delta_rule
from echo_lm.ops.delta.state import DeltaState

__all__ = ["DeltaState", "delta_rule"]
