"""The state-space scan of Mamba-2 and Mamba-3; the mathematics is in README.md."""

from echo_lm.ops.ssd.interface import ssd
from echo_lm.ops.ssd.state import SSDState

__all__ = ["SSDState", "ssd"]
