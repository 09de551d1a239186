"""Spectral Koopman Attention. README.md beside this file holds the mathematics."""

from echo_lm.ops.ska.interface import ska as ska
from echo_lm.ops.ska.state import SKAState as SKAState
