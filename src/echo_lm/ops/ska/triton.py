"""SKA on a GPU: exact and chunk mode as Triton kernels, with an analytic backward.

The forward keeps the sums and factors of each chunk, 42 KB a head at r = 48, P = 64 (30 in chunk
mode); what it passed through on the way to the answers, the backward computes anew. It writes the
gradients of the sums over the sums, and dq and dk over the factors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

import torch
import triton
from jaxtyping import Bool, Float, Int
from torch import Tensor

from echo_lm.ops.backends import kernels_interpreted
from echo_lm.ops.ska import kernels
from echo_lm.ops.ska.chunk import begun_readout, ends, lay_out, with_derived
from echo_lm.ops.ska.layout import ChunkLayout, periods_begin, running_max, running_sum
from echo_lm.ops.ska.problem import Problem
from echo_lm.ops.ska.state import SKAState

SCAN_BLOCK, SCAN_AHEAD = 256, 16
PROGRAMS = 2
"""Of the exact backward on a multiprocessor: what its registers allow."""
MULTIPROCESSORS = 132
"""Of an H200, where there is none to ask."""
WARPS = {
    "sums": 4,
    "inverse_cholesky": 2,
    "whiten": 4,
    "factor": 1,
    "exact_forward": 4,
    "exact_backward": 4,
    "chunk_forward": 4,
    "chunk_backward": 4,
    "spread": 4,
}
"""For tiles up to 64 wide, twice as many beyond. Measured on one H200 with the first version of
these kernels, but for the exact backward, which has not run on one."""


@dataclass(frozen=True)
class Precision:
    """How matrix products are split: see `products.mm`."""

    inverse: str
    """What whitens the sums, whose error grows with the length of the text."""
    factor: str
    """What each token takes from it inside a chunk."""
    answer: str
    """Applying them to queries and gradients."""
    gradient: str
    """What is only summed up."""


PRECISION = {
    torch.float32: Precision("tf32x3", "tf32x3", "tf32x3", "tf32x3"),
    torch.bfloat16: Precision("tf32x3", "bf16x3", "bf16x3", "bf16"),
    torch.float16: Precision("tf32x3", "bf16x3", "bf16x3", "bf16"),
}
INTERPRETED = Precision("ieee", "ieee", "ieee", "ieee")


@torch.compiler.disable
def ska_triton(
    problem: Problem, return_state: bool
) -> tuple[Float[Tensor, "b t h p"], SKAState | None]:
    """Answer all tokens of all rows."""
    layout, old = lay_out(problem, tile_length(problem)), problem.state
    q, k, v = (layout.to_slots(x) for x in (problem.q, problem.k, problem.v))
    initial = torch.cat([x.flatten(-2) for x in (old.gram, old.lag, old.value)], dim=-1)
    launch, readout = Launch.of(problem, layout, q, v), None
    left = None if problem.decay is None else problem.left_of_sums(launch.places.begins)
    ridge, energy_end = problem.ridge.expand(len(q), -1), old.key_energy
    if problem.relative_ridge or return_state:
        energies = torch.linalg.vector_norm(k, dim=-1, dtype=old.gram.dtype).square()
        energy, energy_end = layout.scan(old.key_energy, energies.amax(1), running_max, left)
        scale = energy
        if problem.relative_ridge == "trace":
            trace = old.gram.diagonal(dim1=-2, dim2=-1).sum(-1)
            scale = layout.scan(trace, energies.sum(1), running_sum, left)[0] / launch.rank
        ridge = problem.ridge_of(scale)
    if problem.causal == "exact":
        y, final = _Exact.apply(q, k, v, old.last_key, initial, problem.coef, ridge, left, launch)
    else:
        begun = old.value
        if any(layout.phases) or 0 in layout.chunks:
            begun = begun_readout(problem)
        y, final, readout = _Chunk.apply(
            q, k, v, old.last_key, initial, problem.coef, ridge, left, begun, launch
        )
    y = layout.to_tokens(y)
    if not return_state:
        return y, None
    r, p = launch.rank, launch.width
    gram, lag, value = final.split([r * r, r * r, p * r], dim=-1)
    first_key, last_key, count = ends(problem)
    state = SKAState(
        gram.unflatten(-1, (r, r)),
        lag.unflatten(-1, (r, r)),
        value.unflatten(-1, (p, r)),
        first_key.to(gram.dtype),
        last_key.to(gram.dtype),
        energy_end,
        count,
    )
    return y, with_derived(problem, state, readout)


def tile_length(problem: Problem) -> int:
    """Tokens that a program works on. In exact mode whatever is fast, as long as it fits."""
    if problem.causal == "chunk":
        return problem.chunk_size
    best = best_tile_length(problem)
    return math.gcd(best, problem.chunk_size) if problem.chunked else best


def best_tile_length(problem: Problem) -> int:
    """Wide tiles need the room."""
    wide = max(problem.k.shape[-1], problem.v.shape[-1]) > 64
    return 32 if wide or problem.k.dtype == torch.float32 else 64


@dataclass(frozen=True)
class Launch:
    """The sizes of one call, and the kernels launched with them."""

    layout: ChunkLayout
    chunks: int
    heads: int
    rank: int
    width: int
    order: int
    exact_inputs: bool
    precision: Precision

    @classmethod
    def of(cls, problem: Problem, layout: ChunkLayout, q: Tensor, v: Tensor) -> Launch:
        return cls(
            layout=layout,
            chunks=len(q),
            heads=q.shape[2],
            rank=q.shape[3],
            width=v.shape[3],
            order=problem.coef.shape[1] - 1,
            exact_inputs=q.dtype == torch.bfloat16,
            precision=INTERPRETED if kernels_interpreted() else PRECISION[q.dtype],
        )

    @property
    def grid(self) -> tuple[int, int]:
        return self.chunks, self.heads

    @property
    def floats(self) -> int:
        """Of the sums of one head."""
        return 2 * self.rank**2 + self.width * self.rank

    @property
    def tiles(self) -> dict[str, int]:
        S, R, PW = (self.layout.chunk_size, *map(tile_width, (self.rank, self.width)))
        return {"S": S, "R": R, "PW": PW}

    def warps(self, kernel: str) -> int:
        return WARPS[kernel] * (2 if max(self.tiles["R"], self.tiles["PW"]) > 64 else 1)

    @cached_property
    def places(self) -> Places:
        layout = self.layout
        return places_of(
            tuple(layout.chunks),
            tuple(layout.read),
            layout.chunk_size,
            layout.period,
            layout.device,
        )

    def before(self, last_key: Tensor, left: Tensor | None) -> tuple[Tensor | None, ...]:
        """What says which key precedes each: see `kernels.load_before`."""
        return last_key, self.places.first_row, self.places.phase, left

    @property
    def rows(self) -> tuple[Int[Tensor, " n"], ...]:
        """Which row begins or ends with each chunk, and where."""
        return self.places.first_row, self.places.phase, self.places.last_row

    def add_up(
        self, k: Tensor, v: Tensor, last_key: Tensor, initial: Tensor, left: Tensor | None
    ) -> tuple[Float[Tensor, "n h f"], Float[Tensor, "rows h f"]]:
        """G, M and C before each chunk, and after the last one of each row."""
        sums = torch.empty(self.chunks, self.heads, self.floats, device=k.device)
        kernels.sums_kernel[self.grid](
            k, v, *self.before(last_key, left), sums, *strides(k, v), self.rank, self.width,
            **self.tiles, PRECISION=self.precision.answer, EXACT=self.exact_inputs,
            num_warps=self.warps("sums"),
        )  # fmt: skip
        return sums, self.scan(sums, initial, left)

    def prepare(
        self,
        k: Tensor,
        v: Tensor,
        last_key: Tensor,
        initial: Tensor,
        ridge: Tensor,
        left: Tensor | None,
    ) -> tuple[Float[Tensor, "n h f"], Float[Tensor, "rows h f"]]:
        """F, F M F' and C F' before each chunk; G, M and C after the last one of each row."""
        sums, final = self.add_up(k, v, last_key, initial, left)
        kernels.inverse_cholesky_kernel[self.grid](
            sums, ridge, *ridge.stride(), self.rank, self.width, R=self.tiles["R"],
            PRECISION=self.precision.inverse, num_warps=self.warps("inverse_cholesky"),
        )  # fmt: skip
        kernels.whiten_kernel[self.grid](
            sums, self.rank, self.width, R=self.tiles["R"], PW=self.tiles["PW"],
            PRECISION=self.precision.inverse, num_warps=self.warps("whiten"),
        )  # fmt: skip
        return sums, final

    def scan(
        self,
        sums: Float[Tensor, "n h f"],
        initial: Float[Tensor, "rows h f"],
        left: Float[Tensor, "n h"] | None,
        *,
        reverse: bool = False,
        before: Float[Tensor, "n h f"] | None = None,
        dleft: Float[Tensor, "n h blocks"] | None = None,
    ) -> Float[Tensor, "rows h f"]:
        """Make sums exclusive prefix (or suffix) sums, in place; return the totals.

        In reverse, with what the forward scan has made (`before`), also write the gradient of
        `left`, in parts.
        """
        final = torch.empty_like(initial)
        first, count = self.places.first_chunk, self.places.count
        grid = (len(initial), self.heads, self.scan_blocks)
        kernels.scan_kernel[grid](
            sums, initial, final, first, count, left, before, dleft, self.floats,
            REVERSE=reverse, BLOCK=SCAN_BLOCK, AHEAD=SCAN_AHEAD, num_warps=2,
        )  # fmt: skip
        return final

    @property
    def scan_blocks(self) -> int:
        return triton.cdiv(self.floats, SCAN_BLOCK)

    def factor(self, k: Tensor, sums: Float[Tensor, "n h f"]) -> Planes:
        """E of each chunk: fp32, or bf16 and the rest, in what can later hold dq and dk."""
        planes = empty_like(k), None if k.dtype == torch.float32 else empty_like(k)
        kernels.factor_kernel[self.grid](
            k, sums, *as_factor(planes), *strides(k, planes[0]), self.rank, self.width,
            S=self.tiles["S"], R=self.tiles["R"],
            PRECISION=self.precision.factor, EXACT=self.exact_inputs,
            num_warps=self.warps("factor"),
        )  # fmt: skip
        return planes

    def seams(self, k: Tensor) -> Float[Tensor, "n h r"]:
        """The gradient of the key before each chunk's first."""
        return torch.empty(*self.grid, self.rank, device=k.device)

    def hand_back(
        self,
        k: Tensor,
        v: Tensor,
        last_key: Tensor,
        initial: Tensor,
        left: Tensor | None,
        sums: Float[Tensor, "n h f"],
        dfinal: Float[Tensor, "rows h f"],
        gradients: tuple[Tensor, Tensor, Tensor],
        *,
        add: bool,
        learn_left: bool,
    ) -> tuple[Float[Tensor, "rows h f"], Float[Tensor, "rows h r"], Float[Tensor, "n h"] | None]:
        """From the gradients of each chunk's initial sums to those of tokens, state and `left`.

        Gradients of k, v and the seams are added to, or written if not `add`.
        """
        before, dleft = None, None
        if learn_left:
            before, _ = self.add_up(k, v, last_key, initial, left)
            dleft = torch.empty(*self.grid, self.scan_blocks, device=k.device)
        dinitial = self.scan(
            sums, dfinal.contiguous(), left, reverse=True, before=before, dleft=dleft
        )
        del before
        dk, dv, seams = gradients
        kernels.spread_kernel[self.grid](
            k, v, *self.before(last_key, left), sums, *gradients,
            *strides(k, v), *strides(dk, dv), self.rank, self.width, **self.tiles,
            PRECISION=self.precision.answer, EXACT=self.exact_inputs, ADD=add,
            num_warps=self.warps("spread"),
        )  # fmt: skip
        dleft = None if dleft is None else dleft.sum(-1)
        if left is not None:
            dseam = self.hand_back_seams(k, last_key, left, seams)
            dleft = None if dleft is None else dleft + dseam
        rows = self.places.occupied
        chunks = self.places.first_chunk[rows].long()
        dlast_key = torch.zeros_like(last_key)
        dlast_key[rows] = seams[chunks].to(dlast_key.dtype)
        seams.index_fill_(0, chunks, 0)
        dk[:-1, -1] += seams[1:]
        return dinitial, dlast_key, dleft

    def hand_back_seams(
        self, k: Tensor, last_key: Tensor, left: Tensor, seams: Float[Tensor, "n h r"]
    ) -> Float[Tensor, "n h"]:
        """A chunk's first predecessor came in times sqrt(left): the gradient of both factors."""
        rows, chunks = self.places.occupied, self.places.first_chunk[self.places.occupied].long()
        predecessor = k[:, -1].roll(1, 0).to(last_key.dtype).index_copy(0, chunks, last_key[rows])
        root = left.sqrt()
        dleft = (seams * predecessor).sum(-1) / (2 * root)
        seams *= root[..., None]
        return dleft


@dataclass(frozen=True)
class Places:
    """Where rows begin and end in the flat list of chunks, on the device."""

    first_chunk: Int[Tensor, " rows"]
    count: Int[Tensor, " rows"]
    first_row: Int[Tensor, " n"]
    """The row whose first chunk this is, or -1."""
    phase: Int[Tensor, " n"]
    """The slot of that row's first token, or -1."""
    last_row: Int[Tensor, " n"]
    """The row whose last chunk this is, or -1."""
    occupied: Int[Tensor, " some"]
    """Rows with tokens."""
    begins: Bool[Tensor, " n"]
    """Whether sums fade before this chunk."""


@lru_cache(maxsize=64)
def places_of(
    chunks: tuple[int, ...],
    read: tuple[int, ...],
    chunk_size: int,
    period: int,
    device: torch.device,
) -> Places:
    """Copied to the device once for each layout."""
    phases = [n % chunk_size for n in read]
    first = [end - n for end, n in zip(accumulate(chunks), chunks, strict=True)]
    marks = {name: [-1] * sum(chunks) for name in ("first_row", "phase", "last_row")}
    occupied = [row for row, n in enumerate(chunks) if n]
    for row in occupied:
        marks["first_row"][first[row]] = row
        marks["phase"][first[row]] = phases[row]
        marks["last_row"][first[row] + chunks[row] - 1] = row

    def on_device(x: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(x, dtype=dtype, device=device)

    return Places(
        first_chunk=on_device(first, torch.int32),
        count=on_device(chunks, torch.int32),
        **{name: on_device(mark, torch.int32) for name, mark in marks.items()},
        occupied=on_device(occupied, torch.int64),
        begins=on_device(periods_begin(chunks, read, chunk_size, period), torch.bool),
    )


class _Exact(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        last_key: Tensor,
        initial: Tensor,
        coef: Tensor,
        ridge: Tensor,
        left: Tensor | None,
        launch: Launch,
    ) -> tuple[Tensor, Tensor]:
        q, k, v = map(slotted, (q, k, v))
        last_key, initial, coef = (x.contiguous() for x in (last_key, initial, coef))
        sums, final = launch.prepare(k, v, last_key, initial, ridge, left)
        e = launch.factor(k, sums)
        y = torch.empty_like(v, memory_format=torch.contiguous_format)
        kernels.exact_forward_kernel[launch.grid](
            q, k, v, *launch.before(last_key, left), sums, *as_factor(e), coef, y,
            *strides(q, k, v, e[0], y), launch.rank, launch.width, **launch.tiles,
            ORDER=launch.order, PRECISION=launch.precision.answer, EXACT=launch.exact_inputs,
            num_warps=launch.warps("exact_forward"),
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, last_key, initial, coef, ridge, left)
        ctx.launch, ctx.kept = launch, (sums, e)
        return y, final

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, last_key, initial, coef, ridge, left = ctx.saved_tensors
        launch: Launch = ctx.launch
        dy, before = slotted(dy), launch.before(last_key, left)
        # The sums are overwritten below: a second backward of the same graph makes them anew.
        kept, ctx.kept = ctx.kept, None
        if kept is None:
            sums, _ = launch.prepare(k, v, last_key, initial, ridge, left)
            kept = sums, launch.factor(k, sums)
        sums, e = kept
        del kept
        dcoef = torch.empty(*launch.grid, launch.order + 1, device=q.device)
        dridge = torch.empty(launch.grid, device=q.device)
        dq, dk, dv = e[0], empty_like(k) if e[1] is None else e[1], empty_like(v)
        seams = launch.seams(k)
        programs = min(launch.chunks * launch.heads, programs_at_once(q.device))
        tiles = programs, 2 * launch.order + 3, launch.layout.chunk_size, launch.rank
        chains = torch.empty(tiles, device=q.device)
        kernels.exact_backward_kernel[programs,](
            q, k, v, *before, sums, *as_factor(e), coef, dy, chains,
            dq, dk, dv, seams, dcoef, dridge,
            *strides(q, k, v, dy, dk, dv), *launch.grid, launch.rank, launch.width,
            **launch.tiles, ORDER=launch.order,
            PRECISION=launch.precision.answer, LOCAL=launch.precision.gradient,
            EXACT=launch.exact_inputs, num_warps=launch.warps("exact_backward"), num_stages=1,
        )  # fmt: skip
        del chains
        dinitial, dlast_key, dleft = launch.hand_back(
            k, v, last_key, initial, left, sums, dfinal, (dk, dv, seams),
            add=True, learn_left=ctx.needs_input_grad[7],
        )  # fmt: skip
        return dq, dk, dv, dlast_key, dinitial, dcoef.sum(0), dridge, dleft, None


class _Chunk(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        last_key: Tensor,
        initial: Tensor,
        coef: Tensor,
        ridge: Tensor,
        left: Tensor | None,
        begun: Tensor,
        launch: Launch,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = map(slotted, (q, k, v))
        last_key, initial, coef, begun = (x.contiguous() for x in (last_key, initial, coef, begun))
        sums, final = launch.prepare(k, v, last_key, initial, ridge, left)
        y, readout = empty_like(v), begun.clone()
        kernels.chunk_forward_kernel[launch.grid](
            q, sums, coef, *launch.rows, begun, readout, y,
            *strides(q, y), launch.rank, launch.width, **launch.tiles, ORDER=launch.order,
            PRECISION=launch.precision.answer, EXACT=launch.exact_inputs,
            num_warps=launch.warps("chunk_forward"),
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, last_key, initial, coef, ridge, left, begun)
        ctx.launch, ctx.kept = launch, sums
        return y, final, readout

    @staticmethod
    def backward(
        ctx: Any, dy: Tensor, dfinal: Tensor, dreadout: Tensor
    ) -> tuple[Tensor | None, ...]:
        q, k, v, last_key, initial, coef, ridge, left, begun = ctx.saved_tensors
        launch: Launch = ctx.launch
        dy, dreadout = slotted(dy), dreadout.contiguous()
        sums, ctx.kept = ctx.kept, None
        if sums is None:
            sums, _ = launch.prepare(k, v, last_key, initial, ridge, left)
        dq, dk, dv = (empty_like(x) for x in (q, k, v))
        dcoef = torch.empty(*launch.grid, launch.order + 1, device=q.device)
        dridge = torch.empty(launch.grid, device=q.device)
        dbegun = dreadout_of_idle_rows(dreadout, launch.layout)
        kernels.chunk_backward_kernel[launch.grid](
            q, sums, coef, *launch.rows, begun, dy, dreadout,
            dq, dbegun, dcoef, dridge, *strides(q, dy, dq), launch.rank, launch.width,
            **launch.tiles, ORDER=launch.order,
            PRECISION=launch.precision.answer, LOCAL=launch.precision.gradient,
            EXACT=launch.exact_inputs, num_warps=launch.warps("chunk_backward"),
        )  # fmt: skip
        dinitial, dlast_key, dleft = launch.hand_back(
            k, v, last_key, initial, left, sums, dfinal, (dk, dv, launch.seams(k)),
            add=False, learn_left=ctx.needs_input_grad[7],
        )  # fmt: skip
        return dq, dk, dv, dlast_key, dinitial, dcoef.sum(0), dridge, dleft, dbegun, None


Planes = tuple[Float[Tensor, "n s h r"], Float[Tensor, "n s h r"] | None]


def as_factor(planes: Planes) -> tuple[Tensor | None, ...]:
    """As what E is written in: the exponents of fp16 would not reach."""
    if planes[1] is None:
        return planes
    return tuple(plane.view(torch.bfloat16) for plane in planes if plane is not None)


def empty_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def dreadout_of_idle_rows(dreadout: Tensor, layout: ChunkLayout) -> Tensor:
    """Rows without tokens hand their read-out on as it was; the kernel writes the others'."""
    if 0 not in layout.chunks:
        return torch.zeros_like(dreadout)
    idle = torch.tensor([n == 0 for n in layout.chunks], device=dreadout.device)
    return dreadout * idle.view(-1, 1, 1, 1)


def programs_at_once(device: torch.device) -> int:
    """Programs of the exact backward that work side by side, each with chains of its own."""
    if device.type != "cuda":
        return PROGRAMS * MULTIPROCESSORS
    return PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count


def tile_width(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


def slotted(x: Float[Tensor, "n s h d"]) -> Float[Tensor, "n s h d"]:
    """The same tensor, if slots follow each other at one stride; else a copy."""
    fits = x.stride(3) == 1 and (len(x) == 1 or x.stride(0) == x.shape[1] * x.stride(1))
    return x if fits else x.contiguous()


def strides(*tensors: Float[Tensor, "n s h d"]) -> list[int]:
    """Slot and head stride of each."""
    return [stride for x in tensors for stride in (x.stride(1), x.stride(2))]
