"""The one place that looks at hardware and optional packages, and chooses who computes."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from echo_lm.extras import need

SKABackend = Literal["auto", "naive", "chunk", "recurrent", "triton"]
SKAForm = Literal["naive", "chunk", "recurrent", "triton", "step"]
"""What a backend comes down to: Triton has kernels for many tokens, and for one that no gradient
passes through."""

ScanBackend = Literal["auto", "naive", "chunk", "recurrent", "triton"]
ScanForm = Literal["naive", "chunk", "recurrent", "triton", "step"]

FLA_OPERATORS = {
    "mesa_net": ("fla.ops.mesa_net", "chunk_mesa_net"),
    "gated_delta_rule": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    "simple_gla": ("fla.ops.simple_gla", "chunk_simple_gla"),
}
"""Operators of flash-linear-attention that ours are compared with."""
FLA_GATED = ("gated_delta_rule", "simple_gla")
FLA_UNSOUND_TRITON = ((3, 4, 0), (3, 7, 1))
"""From this version on, and before that one, triton compiles the backward of its gated operators
into wrong gradients on Hopper (its issue 640)."""
HOPPER = 9

KERNEL_WIDTHS = {
    torch.float32: range(16, 65),
    torch.bfloat16: range(16, 129),
    torch.float16: range(16, 129),
}
KERNEL_CHUNKS = (16, 32, 64)
"""What the Triton kernels of SKA take: wider fp32 tiles do not fit a multiprocessor."""
STEP_WIDTHS = range(1, 129)
"""What those of one token take, in any of these dtypes."""

SCAN_WIDEST = 128
SCAN_RANKS = (1, 2, 4, 8, 16)
"""What the Triton kernels of the scan take."""

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
    learning: bool = False,
) -> SKAForm:
    """The form of SKA that serves a call, whose gradients are wanted if `learning`."""
    if requested not in get_args(SKABackend):
        known = ", ".join(get_args(SKABackend))
        raise ValueError(f"backend must be one of {known}; got {requested!r}.")
    if requested == "recurrent" and causal is False:
        raise ValueError(
            'backend="recurrent" reads token by token and cannot look ahead as causal=False does; '
            'use backend="chunk" or "auto".'
        )
    if requested != "auto" and requested != "triton":
        return requested
    one_token = q.shape[1] == 1 and causal is not False
    plain: SKAForm = "recurrent" if one_token else "chunk"
    step = one_token and not learning
    if requested == "auto" and (q.device.type != "cuda" or (one_token and learning)):
        return plain
    if step:
        reason = why_no_step_kernel(q, v)
    else:
        reason = why_no_kernel(q, v, causal=causal, chunk_size=chunk_size, fading=fading)
    if reason is None:
        return "step" if step else "triton"
    if requested == "triton":
        raise ValueError(f'backend="triton" {reason}; use backend="{plain}".')
    say_once(f"SKA on {q.device} runs in PyTorch: the Triton kernel {reason}.")
    return plain


def why_no_step_kernel(q: Tensor, v: Tensor) -> str | None:
    """What keeps the Triton kernels from a call of one token, if anything does."""
    rank, width = q.shape[-1], v.shape[-1]
    if (reason := why_no_triton(q)) is not None:
        return reason
    if rank not in STEP_WIDTHS or width not in STEP_WIDTHS:
        return f"takes rank and value width up to {STEP_WIDTHS[-1]}, not {rank} and {width}"
    return None


def why_no_triton(x: Tensor) -> str | None:
    """What keeps any Triton kernel from a call, if anything does."""
    if find_spec("triton") is None:
        return "needs the triton package, which is not installed"
    if x.device.type not in KERNEL_DEVICES and not kernels_interpreted():
        return f"needs a CUDA device, not {x.device} (or TRITON_INTERPRET=1, to check it slowly)"
    if x.dtype not in KERNEL_WIDTHS:
        return f"takes fp32, bf16 and fp16, not {x.dtype}"
    return None


def choose_scan(
    requested: ScanBackend,
    x: Tensor,
    B: Tensor,
    *,
    shares_last: bool,
    restarts: bool,
    learning: bool,
) -> ScanForm:
    """The form of the scan that serves a call; x and B have a rank axis.

    `shares_last`: heads of a group share the B that a trapezoid remembers. `restarts`: tokens may
    begin anew.
    """
    if requested not in get_args(ScanBackend):
        known = ", ".join(get_args(ScanBackend))
        raise ValueError(f"backend is {requested!r}, but it must be one of {known}.")
    if requested != "auto" and requested != "triton":
        return requested
    plain: ScanForm = "recurrent" if x.shape[1] == 1 else "chunk"
    stepping = plain == "recurrent" and not (restarts or learning)
    if requested == "auto" and (x.device.type != "cuda" or not (stepping or plain == "chunk")):
        return plain
    if stepping:
        reason = why_no_scan_step(x, B, shares_last=shares_last)
        if reason is None:
            return "step"
    if requested == "triton" or plain == "chunk":
        reason = why_no_scan_kernel(x, B)
        if reason is None:
            return "triton"
    if requested == "triton":
        raise ValueError(f'backend="triton" {reason}; use backend="{plain}".')
    say_once(f"The scan on {x.device} runs in PyTorch: the Triton kernel {reason}.")
    return plain


def why_no_scan_step(x: Tensor, B: Tensor, *, shares_last: bool) -> str | None:
    """What keeps the Triton kernel of a step from a call of the scan, if anything does."""
    if (reason := why_no_triton(x)) is not None:
        return reason
    if x.shape[1] > 1:
        return f"takes single tokens, not {x.shape[1]}"
    if x.shape[-1] not in STEP_WIDTHS or B.shape[-1] not in STEP_WIDTHS:
        return (
            f"takes head widths and state sizes up to {STEP_WIDTHS[-1]}, not {x.shape[-1]} and "
            f"{B.shape[-1]}"
        )
    if shares_last:
        return "takes a trapezoid only where every head has a B of its own"
    return None


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
    if (reason := why_no_triton(q)) is not None:
        return reason
    if causal is False:
        return "is causal and cannot serve causal=False"
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


def why_no_scan_kernel(x: Tensor, B: Tensor) -> str | None:
    """What keeps the Triton kernels from a call, if anything does."""
    rank, width, state_dim = x.shape[3], x.shape[4], B.shape[4]
    if (reason := why_no_triton(x)) is not None:
        return reason
    if max(width, state_dim) > SCAN_WIDEST:
        return (
            f"takes heads and states up to {SCAN_WIDEST} wide, not head width {width} with state "
            f"size {state_dim}"
        )
    if rank not in SCAN_RANKS:
        return f"takes a rank of {', '.join(map(str, SCAN_RANKS))}, not {rank}"
    return None


def kernels_interpreted() -> bool:
    """Triton's interpreter runs kernels on the CPU, to check them slowly."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache
def say_once(message: str) -> None:
    log.warning(message)


def fla_operator(name: str) -> Callable[..., Any]:
    """An operator of flash-linear-attention."""
    module, function = FLA_OPERATORS[name]
    operator: Callable[..., Any] = getattr(need(module, "gpu"), function)
    return operator


def why_no_fla(name: str, device: torch.device | str, *, backward: bool) -> str | None:
    """What keeps an operator of flash-linear-attention from being run here, if anything does."""
    if torch.device(device).type != "cuda":
        return "needs a CUDA device"
    if find_spec("fla") is None:
        return "flash-linear-attention is not installed: pip install 'echo-lm[gpu]'"
    if not backward or name not in FLA_GATED:
        return None
    triton = installed("triton") or ""
    hopper = torch.cuda.get_device_capability(device)[0] == HOPPER
    return unsound_gated_backward(triton) if hopper else None


def unsound_gated_backward(triton: str) -> str | None:
    """What is wrong with the gated backward of flash-linear-attention on Hopper, if anything is."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", triton)[:3])
    sound_until, sound_from = FLA_UNSOUND_TRITON
    if not sound_until <= numbers < sound_from:
        return None
    return f"its gated backward is wrong on Hopper with triton {triton}; 3.7.1 cures it"


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


def weights_dtype(device: torch.device | str) -> torch.dtype | None:
    """What weights are best held in: fp32 on a CPU, where less is not faster; else as they are."""
    return torch.float32 if torch.device(device).type == "cpu" else None


def autocast(device: torch.device | str, precision: Precision = "auto") -> torch.autocast:
    """Products in that precision within it."""
    narrow = product_dtype(device, precision) == torch.bfloat16
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=narrow)


def choices() -> list[Choice]:
    """What `auto` comes down to on this machine."""
    return [
        _many_tokens("SKA", "for causal calls"),
        _one_token("SKA", "O(r² + rP) for each token"),
        _many_tokens("Scan", f"heads and states up to {SCAN_WIDEST} wide"),
        _one_token("Scan", "one update of the state"),
        Choice("Delta rule", "chunk, recurrent (PyTorch)", "a baseline, without kernels"),
        Choice("Attention", "scaled_dot_product_attention", "torch picks its kernel"),
    ]


def _many_tokens(operator: str, served: str) -> Choice:
    work = f"{operator}, many tokens"
    if not torch.cuda.is_available():
        return Choice(work, "chunk (PyTorch)", "the Triton kernels need a CUDA device")
    if find_spec("triton") is None:
        return Choice(work, "chunk (PyTorch)", "triton is not installed")
    return Choice(work, "Triton kernels", f"triton {installed('triton')}, {served}")


def _one_token(operator: str, cost: str) -> Choice:
    work = f"{operator}, one token"
    if not torch.cuda.is_available():
        return Choice(work, "recurrent (PyTorch)", cost)
    if find_spec("triton") is None:
        return Choice(work, "recurrent (PyTorch)", "triton is not installed")
    return Choice(work, "Triton kernels", "over the state, in a CUDA graph when generating")
