"""The one place that looks at hardware and optional packages, and chooses who computes."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, get_args

import torch

SKABackend = Literal["auto", "naive", "chunk", "recurrent"]

SCAN_PACKAGES = ("mamba-ssm", "flash-linear-attention")
"""Outside kernels for the state-space scan."""


@dataclass(frozen=True)
class Choice:
    """Who computes one kind of work on this machine, and why."""

    work: str
    chosen: str
    why: str


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


def installed(package: str) -> str | None:
    """The version of a distribution, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def device_name() -> str:
    """The accelerator, or the processor if there is none."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} threads"


def choices() -> list[Choice]:
    """What `auto` comes down to on this machine."""
    return [
        Choice("SKA, many tokens", "chunk (PyTorch)", "the parallel form, on any device"),
        Choice("SKA, one token", "recurrent (PyTorch)", "O(r² + rP) for each token"),
        Choice("Scan, many tokens", "chunk (PyTorch)", _why_no_scan_kernel()),
        Choice("Scan, one token", "recurrent (PyTorch)", "one update of the state"),
        Choice("Attention", "scaled_dot_product_attention", "torch picks its kernel"),
    ]


def _why_no_scan_kernel() -> str:
    if not torch.cuda.is_available():
        return "outside kernels need a CUDA device"
    found = [f"{name} {got}" for name in SCAN_PACKAGES if (got := installed(name))]
    if not found:
        return f"{' and '.join(SCAN_PACKAGES)} are not installed"
    return f"{', '.join(found)} found, but this version of Echo does not call it"
