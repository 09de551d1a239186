"""The one place that looks at hardware and optional packages, and chooses who computes."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Literal, get_args

import torch
from torch import Tensor

SKABackend = Literal["auto", "naive", "chunk", "recurrent", "triton"]

SCAN_PACKAGES = ("mamba-ssm", "flash-linear-attention")
"""Outside kernels for the state-space scan."""

KERNEL_WIDTHS = {
    torch.float32: range(16, 65),
    torch.bfloat16: range(16, 129),
    torch.float16: range(16, 129),
}
KERNEL_CHUNKS = (16, 32, 64)
"""What the Triton kernels of SKA take: wider fp32 tiles do not fit a multiprocessor."""

KERNEL_DEVICES = ("cuda",)
"""Where Triton kernels can be launched, unless they are interpreted."""

log = logging.getLogger("echo_lm")


@dataclass(frozen=True)
class Choice:
    """Who computes one kind of work on this machine, and why."""

    work: str
    chosen: str
    why: str


def choose_ska(
    requested: SKABackend,
    q: Tensor,
    v: Tensor,
    *,
    causal: Literal["exact", "chunk", False],
    chunk_size: int,
    fading: bool = False,
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
    if requested == "auto" and q.shape[1] == 1 and causal is not False:
        return "recurrent"
    if requested == "auto" and q.device.type != "cuda":
        return "chunk"
    if requested in ("auto", "triton"):
        reason = why_no_kernel(q, v, causal=causal, chunk_size=chunk_size, fading=fading)
        if reason is None:
            return "triton"
        if requested == "triton":
            raise ValueError(f'backend="triton" {reason}; use backend="chunk".')
        _say_once(f"SKA on {q.device} runs in PyTorch: the Triton kernel {reason}.")
        return "chunk"
    return requested


def why_no_kernel(
    q: Tensor,
    v: Tensor,
    *,
    causal: Literal["exact", "chunk", False],
    chunk_size: int,
    fading: bool = False,
) -> str | None:
    """What keeps the Triton kernels from a call, if anything does."""
    rank, width = q.shape[-1], v.shape[-1]
    if find_spec("triton") is None:
        return "needs the triton package, which is not installed"
    if q.device.type not in KERNEL_DEVICES and not kernels_interpreted():
        return f"needs a CUDA device, not {q.device} (or TRITON_INTERPRET=1, to check it slowly)"
    if causal is False:
        return "is causal and cannot serve causal=False"
    if q.dtype not in KERNEL_WIDTHS:
        return f"takes fp32, bf16 and fp16, not {q.dtype}"
    widths = KERNEL_WIDTHS[q.dtype]
    if rank not in widths or width not in widths:
        return (
            f"takes rank and value width from {widths[0]} to {widths[-1]} in {q.dtype}, not "
            f"{rank} and {width}"
        )
    if causal == "chunk" and chunk_size not in KERNEL_CHUNKS:
        return f"takes a chunk_size of {', '.join(map(str, KERNEL_CHUNKS))}, not {chunk_size}"
    if fading and chunk_size % KERNEL_CHUNKS[0]:
        return f"fades every {KERNEL_CHUNKS[0]} tokens or a multiple of that, not {chunk_size}"
    return None


def kernels_interpreted() -> bool:
    """Triton's interpreter runs kernels on the CPU, to check them slowly."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache
def _say_once(message: str) -> None:
    log.warning(message)


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


def pick_device(requested: str) -> str:
    """A device that is there; "auto" is a GPU if there is one."""
    if requested == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=requested)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"There is no device {requested!r} here: {reason}") from None
    return requested


Precision = Literal["auto", "fp32", "bf16"]
"""Of products over fp32 weights; "auto" is bf16 on a GPU and fp32 on a CPU."""


def product_dtype(device: torch.device | str, precision: Precision = "auto") -> torch.dtype:
    """What products are computed in."""
    narrow = precision == "bf16" or (precision == "auto" and torch.device(device).type == "cuda")
    return torch.bfloat16 if narrow else torch.float32


def autocast(device: torch.device | str, precision: Precision = "auto") -> torch.autocast:
    """Products in that precision within it."""
    narrow = product_dtype(device, precision) == torch.bfloat16
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=narrow)


def choices() -> list[Choice]:
    """What `auto` comes down to on this machine."""
    return [
        _many_tokens(),
        Choice("SKA, one token", "recurrent (PyTorch)", "O(r² + rP) for each token"),
        Choice("Scan, many tokens", "chunk (PyTorch)", _why_no_scan_kernel()),
        Choice("Scan, one token", "recurrent (PyTorch)", "one update of the state"),
        Choice("Delta rule", "chunk, recurrent (PyTorch)", "a baseline, without kernels"),
        Choice("Attention", "scaled_dot_product_attention", "torch picks its kernel"),
    ]


def _many_tokens() -> Choice:
    work = "SKA, many tokens"
    if not torch.cuda.is_available():
        return Choice(work, "chunk (PyTorch)", "the Triton kernels need a CUDA device")
    if find_spec("triton") is None:
        return Choice(work, "chunk (PyTorch)", "triton is not installed")
    return Choice(work, "Triton kernels", f"triton {installed('triton')}, for causal calls")


def _why_no_scan_kernel() -> str:
    if not torch.cuda.is_available():
        return "outside kernels need a CUDA device"
    found = [f"{name} {got}" for name in SCAN_PACKAGES if (got := installed(name))]
    if not found:
        return f"{' and '.join(SCAN_PACKAGES)} are not installed"
    return f"{', '.join(found)} found, but this version of Echo does not call it"
