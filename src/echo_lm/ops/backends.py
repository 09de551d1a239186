"""The one place that looks at hardware and optional packages, and chooses who computes."""

from __future__ import annotations

from typing import Literal, get_args

SKABackend = Literal["auto", "naive", "chunk", "recurrent"]


def choose_ska(
    requested: SKABackend, *, causal: Literal["exact", "chunk", False], tokens: int
) -> SKABackend:
    """The form of SKA that serves a call."""
    if requested not in get_args(SKABackend):
        known = ", ".join(get_args(SKABackend))
        raise ValueError(f"backend must be one of {known}; got {requested!r}.")
    if requested == "recurrent" and causal is False:
        raise ValueError(
            'backend="recurrent" reads token by token and cannot look ahead as causal=False does; '
            'use backend="chunk" or "auto".'
        )
    if requested != "auto":
        return requested
    return "recurrent" if tokens == 1 and causal is not False else "chunk"
