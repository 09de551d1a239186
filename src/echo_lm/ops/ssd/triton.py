"""The scan on a GPU: Triton kernels with an analytic backward.

Only the inputs are kept for the backward, which makes the states of chunks anew.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from echo_lm.ops.backends import kernels_interpreted
from echo_lm.ops.ssd import kernels
from echo_lm.ops.ssd.problem import Problem

HEADS_AT_ONCE = 8
"""That share B and C and are gone through by one program of the backward."""
SCAN_BLOCK, SCAN_AHEAD = 256, 8


@dataclass(frozen=True)
class Recipe:
    """How matrix products are split, see `products.mm`, and cut into tiles that fit."""

    state: str
    """What is carried on from chunk to chunk."""
    answer: str
    """What is only read off, and rounded to the dtype of the inputs."""
    chunk: int
    """Rows of x at most; a power of two."""
    rows: int
    """Of a chunk that a program answers for; fewer than 64, as `kernels` explains."""
    columns: int
    """Of x taken at a time."""


RECIPES = {
    torch.float32: Recipe("tf32x3", "tf32x3", chunk=32, rows=16, columns=32),
    torch.bfloat16: Recipe("bf16x3", "bf16", chunk=64, rows=32, columns=64),
    torch.float16: Recipe("bf16x3", "bf16x3", chunk=64, rows=16, columns=32),
}


@torch.compiler.disable
def ssd_triton(problem: Problem) -> tuple[Float[Tensor, "b t h r p"], Float[Tensor, "b h p n"]]:
    """Answer all tokens. B and C are read in the dtype of x."""
    x, past, h = problem.x, *problem.as_plain_scan()
    B, C = problem.B.to(x.dtype), problem.C.to(x.dtype)
    return _Scan.apply(x, B, C, problem.log_decay, problem.gamma, past, h, Launch.of(problem))


@dataclass(frozen=True)
class Launch:
    """The sizes of one call, and the kernels launched with them."""

    batch: int
    tokens: int
    heads: int
    groups: int
    rank: int
    width: int
    state_dim: int
    exact_inputs: bool
    recipe: Recipe

    @classmethod
    def of(cls, problem: Problem) -> Launch:
        x, B = problem.x, problem.B
        batch, tokens, heads, rank, width = x.shape
        recipe = RECIPES[x.dtype]
        if kernels_interpreted():
            recipe = replace(recipe, state="ieee", answer="ieee")
        asked = min(problem.chunk_size, tokens * rank)
        while recipe.chunk > 16 and recipe.chunk > asked:
            recipe = replace(recipe, chunk=recipe.chunk // 2)
        return cls(
            batch=batch,
            tokens=tokens,
            heads=heads,
            groups=B.shape[2],
            rank=rank,
            width=width,
            state_dim=B.shape[-1],
            exact_inputs=x.dtype == torch.bfloat16,
            recipe=recipe,
        )

    @property
    def chunks(self) -> int:
        return triton.cdiv(self.tokens * self.rank, self.recipe.chunk)

    @property
    def blocks(self) -> int:
        """Programs that share the rows of all chunks."""
        return self.batch * self.chunks * (self.recipe.chunk // self.rows)

    @property
    def rows(self) -> int:
        return min(self.recipe.rows, self.recipe.chunk)

    @property
    def heads_per_group(self) -> int:
        return self.heads // self.groups

    @property
    def parts(self) -> int:
        """Of the heads of a group, each with a gradient of B and C of its own."""
        return triton.cdiv(self.heads_per_group, HEADS_AT_ONCE)

    @property
    def grid(self) -> tuple[int, int]:
        return self.batch * self.chunks, self.heads

    @property
    def scan_blocks(self) -> int:
        return triton.cdiv(self.width * self.state_dim, SCAN_BLOCK)

    @property
    def tiles(self) -> dict[str, int]:
        width = tile_width(self.width)
        return {
            "CHUNK": self.recipe.chunk,
            "RANK": self.rank,
            "PB": min(width, self.recipe.columns),
            "NW": tile_width(self.state_dim),
        }

    @property
    def answering(self) -> dict[str, Any]:
        """Tiles of the kernels that work on some rows of a chunk."""
        return self.tiles | {
            "ROWS": self.rows,
            "PW": tile_width(self.width),
            "PRECISION": self.recipe.answer,
        }

    @property
    def gradient_options(self) -> dict[str, int]:
        """Of the kernels that go through heads, loading the next one while they work on one."""
        widest = max(self.answering["PW"], self.tiles["NW"])
        stages = 2 if self.answering["PW"] > 64 else 3  # Within 99 KB of shared memory.
        options = {"num_warps": 4 if widest < 64 else 8, "num_stages": stages}
        if widest == 64 and self.recipe.answer == "bf16":
            options["maxnreg"] = 128  # So that a multiprocessor holds two programs.
        return options

    @property
    def chunk_tokens(self) -> int:
        return self.recipe.chunk // self.rank

    def gates(self, log_decay: Tensor, own: Tensor, past: Tensor) -> Float[Tensor, "n h 4 t"]:
        gates = sums(*self.grid, 4, self.chunk_tokens, like=own)
        kernels.gates_kernel[self.grid](
            log_decay, own, past, gates, log_decay.stride(), own.stride(), past.stride(),
            self.tokens, self.chunks, TOKENS=self.chunk_tokens, num_warps=1,
        )  # fmt: skip
        return gates

    def added(
        self, v: Tensor, k: Tensor, gates: Tensor, *, to_end: bool
    ) -> Float[Tensor, "n h p n"]:
        """What each chunk adds to the state at its end, or asks of the one at its start."""
        added = sums(*self.grid, self.width, self.state_dim, like=v)
        block = min(tile_width(self.width), self.recipe.rows)
        kernels.added_kernel[*self.grid, triton.cdiv(self.width, block)](
            v, k, gates, added, strides(v), strides(k), self.tokens, self.chunks,
            self.heads_per_group, self.width, self.state_dim,
            **(self.tiles | {"PB": block}), TO_END=to_end, PRECISION=self.recipe.state,
            EXACT=self.exact_inputs, num_warps=4,
        )  # fmt: skip
        return added

    def scan(
        self,
        added: Tensor,
        initial: Float[Tensor, "b h p n"],
        gates: Tensor,
        *,
        before: Tensor | None = None,
    ) -> tuple[Float[Tensor, "n h p n"], Float[Tensor, "b h p n"], Tensor | None]:
        """From what chunks add to the states at their starts, in the dtype they are read in, and
        the state at the end of all.

        Given those starts (`before`), backwards, from what readers ask of them; then also their
        products with the gradients of the chunks' ends, in blocks.
        """
        narrow = self.recipe.answer == "bf16"
        states = torch.empty_like(added, dtype=torch.bfloat16) if narrow else added
        final = torch.empty_like(initial)
        met = None
        if before is not None:
            met = sums(*self.grid, self.scan_blocks, like=added)
        kernels.scan_kernel[self.batch, self.heads, self.scan_blocks](
            added, initial, states, final, gates, before, met,
            self.chunks, self.width * self.state_dim,
            TOKENS=self.chunk_tokens, REVERSE=before is not None,
            BLOCK=SCAN_BLOCK, AHEAD=SCAN_AHEAD, num_warps=2,
        )  # fmt: skip
        return states, final, met

    def outputs(self, x: Tensor, B: Tensor, C: Tensor, gates: Tensor, states: Tensor) -> Tensor:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        kernels.outputs_kernel[self.blocks, self.heads](
            x, B, C, gates, states, y, *map(strides, (x, B, C, y)),
            self.tokens, self.chunks, self.heads_per_group, self.width, self.state_dim,
            **self.answering, num_warps=4,
        )  # fmt: skip
        return y

    def gradients(
        self,
        x: Tensor,
        B: Tensor,
        C: Tensor,
        dy: Tensor,
        gates: Tensor,
        states: Tensor,
        dstates: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Float[Tensor, "n h 4 t"]]:
        """Those of x, B, C and, in parts, of the gates."""
        partial = B.dtype if self.parts == 1 else torch.float32
        dB = torch.empty(self.parts, *B.shape, dtype=partial, device=B.device)
        dC = torch.empty_like(dB)
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        dgates = torch.empty_like(gates)
        grid = self.blocks, self.groups, self.parts
        sizes = (
            self.tokens, self.chunks, self.heads, self.heads_per_group, HEADS_AT_ONCE,
            self.width, self.state_dim,
        )  # fmt: skip
        kernels.reader_gradient_kernel[grid](
            x, B, C, dy, gates, states, dC, dgates,
            *map(strides, (x, B, C, dy, dC[0])), dC.stride(0), *sizes,
            **self.answering, **self.gradient_options,
        )  # fmt: skip
        kernels.writer_gradient_kernel[grid](
            x, B, C, dy, gates, dstates, dx, dB, dgates,
            *map(strides, (x, B, C, dy, dx, dB[0])), dB.stride(0), *sizes,
            **self.answering, **self.gradient_options,
        )  # fmt: skip
        dB, dC = (v[0] if self.parts == 1 else v.sum(0).to(B.dtype) for v in (dB, dC))
        return dx, dB, dC, dgates

    def gate_gradients(
        self, gates: Tensor, dgates: Tensor, met: Tensor
    ) -> tuple[Float[Tensor, "b t h"], ...]:
        """Those of log_decay, of a token's own weight and of its weight once it is past."""
        out = sums(3, self.batch, self.tokens, self.heads, like=gates)
        kernels.gates_gradient_kernel[self.grid](
            gates, dgates, met, *out, out[0].stride(), self.tokens, self.chunks, self.scan_blocks,
            TOKENS=self.chunk_tokens, PARTS=triton.next_power_of_2(self.scan_blocks), num_warps=1,
        )  # fmt: skip
        return out.unbind()


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        B: Tensor,
        C: Tensor,
        log_decay: Tensor,
        own: Tensor,
        past: Tensor,
        h: Tensor,
        launch: Launch,
    ) -> tuple[Tensor, Tensor]:
        x, B, C, h = (*map(readable, (x, B, C)), h.contiguous())
        ctx.save_for_backward(x, B, C, log_decay, own, past, h)
        ctx.launch = launch
        gates = launch.gates(log_decay, own, past)
        states, final, _ = launch.scan(launch.added(x, B, gates, to_end=True), h, gates)
        return launch.outputs(x, B, C, gates, states), final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:
        x, B, C, log_decay, own, past, h = ctx.saved_tensors
        launch: Launch = ctx.launch
        dy = readable(dy)
        gates = launch.gates(log_decay, own, past)
        states, _, _ = launch.scan(launch.added(x, B, gates, to_end=True), h, gates)
        asked = launch.added(dy, C, gates, to_end=False)
        dstates, dh, met = launch.scan(asked, dfinal.contiguous(), gates, before=states)
        assert met is not None
        dx, dB, dC, dgates = launch.gradients(x, B, C, dy, gates, states, dstates)
        return dx, dB, dC, *launch.gate_gradients(gates, dgates, met), dh, None


def sums(*shape: int, like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def tile_width(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


def readable(v: Float[Tensor, "b t h r n"]) -> Float[Tensor, "b t h r n"]:
    """The same tensor if its rows lie in one piece; else a copy."""
    return v if v.stride(-1) == 1 else v.contiguous()


def strides(v: Float[Tensor, "b t h r n"]) -> tuple[int, ...]:
    return v.stride()[:-1]
