"""What the compiler makes of the Triton kernels for an H100 or H200, without one.

A real call, forward and backward, on CPU tensors: every launch is compiled as it would be on the
GPU, with its own sizes, types and warps, and does not run. Registers, spills, shared memory and
instructions are read from the machine code. So is the peak of memory, from what the call allocates.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from echo_lm import ska
from echo_lm.ops import backends
from echo_lm.ops.ssd import ssd
from echo_lm.results import circumstances, write_json

RESULTS = Path("results/cpu/compiled.json")
Row = dict[str, str | int | float]

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 227 * 1024
"""What one program may take of a multiprocessor's 228 KB; each takes another KB on top."""
REGISTERS, THREADS, PROGRAMS = 65536, 2048, 32
"""Of a multiprocessor, which also hands out registers to a warp 256 at a time."""
GRAIN = 512
"""The CUDA allocator rounds up to this."""
KINDS = {
    "wgmma": ("HGMMA",),
    "mma": ("HMMA",),
    "global": ("LDG", "STG", "LDGSTS"),
    "shared": ("LDS", "STS", "LDSM", "STSM"),
    "local": ("LDL", "STL"),
    "shuffle": ("SHFL",),
    "barrier": ("BAR",),
}
"""Instructions by what they do. What spills goes to local memory."""

HEADS, RANK, WIDTH, ORDER = 12, 48, 64, 2
MODES: dict[str, dict[str, Any]] = {
    "exact": {"causal": "exact"},
    "chunk": {"causal": "chunk", "chunk_size": 64},
}
SHAPES = ((16, 2048), (2, 16384))
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Launch:
    """One kernel as one launch compiles it. Instructions are counted where they stand: once,
    however often a loop comes round to them."""

    name: str
    warps: int
    registers: int
    """Of a thread."""
    spilled_bytes: int
    """Local memory of a thread."""
    shared_bytes: int
    """Of a program."""
    instructions: Counter[str] = field(repr=False)

    def count(self, kind: str) -> int:
        return sum(n for op, n in self.instructions.items() if op in KINDS[kind])

    @property
    def programs_at_once(self) -> int:
        """How many fit a multiprocessor."""
        of_warp = -(-self.registers * 32 // 256) * 256
        by_registers = REGISTERS // of_warp // self.warps
        by_shared = (SHARED_BYTES + 1024) // (self.shared_bytes + 1024)
        return min(by_registers, by_shared, THREADS // (32 * self.warps), PROGRAMS)

    def to_row(self) -> Row:
        return {
            "kernel": self.name,
            "warps": self.warps,
            "registers": self.registers,
            "spilled": self.spilled_bytes,
            "shared KB": round(self.shared_bytes / 1024, 1),
            "warps at once": self.programs_at_once * self.warps,
            "instructions": sum(self.instructions.values()),
            **{kind: self.count(kind) for kind in KINDS},
        }


class Hopper:
    """As much of a driver as Triton asks for before it loads what it has compiled."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> str:
        return "none"

    def get_current_stream(self, device: str) -> int:
        return 0


class Pointer:
    """What a tensor on the GPU tells the compiler: its type, and whether it lies at 16 bytes."""

    def __init__(self, x: Tensor) -> None:
        self.dtype, self.offset = x.dtype, x.storage_offset() * x.itemsize

    def data_ptr(self) -> int:
        return self.offset


def compiled(call: Callable[[], object]) -> list[Launch]:
    """What each launch of a call compiles to, in their order; none of them runs."""
    kernels: dict[str, Launch] = {}
    launches: list[Launch] = []
    compile_and_run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        args, options = tree_map_only(Tensor, Pointer, (args, options))
        kernel = compile_and_run(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in kernels:
            kernels[kernel.hash] = launch_of(kernel)
        launches.append(kernels[kernel.hash])

    with _launches_go_to(compile_only), patch.object(driver, "_active", Hopper()):
        call()
    return launches


def peak_bytes(call: Callable[[], object]) -> int:
    """The most that tensors made by a call hold at once; no kernel is compiled."""
    with _launches_go_to(lambda *args, **options: None), Allocations() as allocations:
        call()
    return allocations.peak


@contextmanager
def _launches_go_to(run: Callable[..., None]) -> Iterator[None]:
    """As if on a GPU. Kernels defined under TRITON_INTERPRET never come here."""
    if backends.kernels_interpreted():
        raise RuntimeError(
            "TRITON_INTERPRET is set, so that kernels are interpreted and not compiled; unset it."
        )
    with (
        patch.object(JITFunction, "run", run),
        patch.object(backends, "KERNEL_DEVICES", ("cuda", "cpu")),
    ):
        yield


def launch_of(kernel: Any) -> Launch:
    """What the machine code of a compiled kernel says."""
    resources = dict(_RESOURCE.findall(_cuobjdump("--dump-resource-usage", kernel.asm["cubin"])))
    code = _INSTRUCTION.findall(_cuobjdump("--dump-sass", kernel.asm["cubin"]))
    return Launch(
        name=kernel.metadata.name.removesuffix("_kernel"),
        warps=kernel.metadata.num_warps,
        registers=int(resources["REG"]),
        spilled_bytes=int(resources["STACK"]) + int(resources["LOCAL"]),
        shared_bytes=kernel.metadata.shared,
        instructions=Counter(code),
    )


_RESOURCE = re.compile(r"(REG|STACK|LOCAL):(\d+)")
_INSTRUCTION = re.compile(r"^ +/\*[0-9a-f]+\*/ +(?:@!?U?P\w+ +)?([A-Z0-9]+)", re.MULTILINE)


def _cuobjdump(question: str, cubin: bytes) -> str:
    """Triton's wheels carry the tool."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, question, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Allocations(TorchDispatchMode):
    """The most bytes that tensors made in here held at once, by the CUDA allocator's count."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_iter(result):
            if isinstance(x, Tensor):
                self._hold(x.untyped_storage())
        return result

    def _hold(self, storage: torch.UntypedStorage) -> None:
        place = storage._cdata
        if place not in self.held and storage.nbytes():
            self.held[place] = -(-storage.nbytes() // GRAIN) * GRAIN
            weakref.finalize(storage, self.held.pop, place)
            self.peak = max(self.peak, sum(self.held.values()))


def ska_call(
    mode: str,
    *,
    dtype: str = "bf16",
    batch: int = 1,
    tokens: int = 128,
    rank: int = RANK,
    width: int = WIDTH,
    order: int = ORDER,
    **options: Any,
) -> None:
    """SKA forward and backward, at the size that is timed on a GPU."""
    q, k = (torch.zeros(batch, tokens, HEADS, rank, dtype=DTYPES[dtype]) for _ in range(2))
    v, dy = (torch.zeros(batch, tokens, HEADS, width, dtype=DTYPES[dtype]) for _ in range(2))
    coef, ridge = torch.ones(HEADS, order + 1), torch.ones(HEADS)
    given = [x.requires_grad_() for x in (q, k, v, coef, ridge)]
    y = ska(q, k, v, coef=coef, ridge=ridge, backend="triton", **{**MODES[mode], **options})
    torch.autograd.grad(y, given, dy)


def step_call(mode: str) -> None:
    """One token of SKA, as when decoding."""
    with torch.no_grad():
        q, k = (torch.zeros(1, 1, HEADS, RANK, dtype=torch.bfloat16) for _ in range(2))
        v = torch.zeros(1, 1, HEADS, WIDTH, dtype=torch.bfloat16)
        coef, ridge = torch.ones(HEADS, ORDER + 1), torch.ones(HEADS)
        ska(q, k, v, coef=coef, ridge=ridge, backend="triton", **MODES[mode])


def scan_call(*, tokens: int = 128, state_dim: int = 64, turned: bool = False) -> None:
    """The scan of Mamba-2, or of Mamba-3 if turned; forward and backward unless it is one token."""
    learning = tokens > 1
    x, dy = (torch.zeros(1, tokens, HEADS, WIDTH, dtype=torch.bfloat16) for _ in range(2))
    B, C = (torch.zeros(1, tokens, 1, state_dim, dtype=torch.bfloat16) for _ in range(2))
    scalars = {"log_decay": -torch.ones(1, tokens, HEADS), "gamma": torch.ones(1, tokens, HEADS)}
    if turned:
        scalars["beta"] = torch.ones(1, tokens, HEADS)
        scalars["angle"] = torch.ones(1, tokens, HEADS, state_dim // 4)
    given = [z.requires_grad_(learning) for z in (x, B, C, *scalars.values())]
    y = ssd(x, B, C, **scalars, backend="triton")
    if learning:
        torch.autograd.grad(y, given, dy)


CALLS: dict[str, Callable[[], object]] = {
    f"SKA {mode}, {dtype}, r={rank}, P={width}": partial(
        ska_call, mode, dtype=dtype, rank=rank, width=width
    )
    for dtype, rank, width in (
        ("bf16", 48, 64),
        ("bf16", 16, 16),
        ("bf16", 128, 128),
        ("fp16", 48, 64),
        ("fp32", 64, 64),
    )
    for mode in MODES
}
CALLS |= {f"SKA {mode}, bf16, fading": partial(ska_call, mode, decay=0.9) for mode in MODES}
CALLS |= {f"SKA {mode}, bf16, one token": partial(step_call, mode) for mode in MODES}
CALLS |= {
    "scan, bf16, Mamba-2": scan_call,
    "scan, bf16, Mamba-3": partial(scan_call, state_dim=128, turned=True),
    "scan, bf16, Mamba-2, one token": partial(scan_call, tokens=1),
    "scan, bf16, Mamba-3, one token": partial(scan_call, tokens=1, state_dim=128, turned=True),
}
"""What is compiled, by name. Another operator adds its calls here."""


def peak(mode: str, batch: int, tokens: int) -> Row:
    held = peak_bytes(partial(ska_call, mode, batch=batch, tokens=tokens))
    return {"call": f"SKA {mode}", "batch": batch, "tokens": tokens, "GiB": round(held / 2**30, 4)}


def main(names: list[str]) -> int:
    """Compile the calls that bear one of these in their name, or all, and record those."""
    chosen = {call: CALLS[call] for call in CALLS if not names or any(n in call for n in names)}
    if not chosen:
        print(f"No call has {' or '.join(names)} in its name: {'; '.join(CALLS)}.", file=sys.stderr)
        return 2
    taken, console = circumstances(), Console()
    kernels: list[Row] = []
    for name, call in chosen.items():
        with console.status(f"Compiling {name}"):
            seen = {launch.name: launch for launch in compiled(call)}
        kernels += [{"call": name, **launch.to_row()} for launch in seen.values()]
        show(name, kernels[-len(seen) :], console)
    peaks = [peak(mode, *shape) for shape in SHAPES for mode in MODES]
    show("Peaks of memory", peaks, console)
    config = {
        "target": f"sm_{HOPPER.arch}",
        "triton": triton.__version__,
        "registers, spilled": "of a thread, spilled in bytes",
        "warps at once": "of a multiprocessor, which could hold 64",
        "instructions": "where they stand in the code, loops counted once",
        "GiB": "most that tensors held at once, inputs and gradients included",
    }
    numbers = {"kernels": kernels, "peaks": peaks}
    write_json(RESULTS, {"benchmark": "compiled", "config": config, **taken, "numbers": numbers})
    console.print(f"Written to {RESULTS}")
    return 0


def show(title: str, rows: list[Row], console: Console) -> None:
    """As many columns as a terminal has room for; the record has all."""
    columns = [column for column in rows[0] if column not in KINDS and rows[0][column] != title]
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, no_wrap=isinstance(rows[0][column], str))
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
