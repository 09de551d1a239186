"""What `echo-lm bench ops` times: the operators, each with inputs of its own kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from echo_lm.bench.paper import paper_form
from echo_lm.bench.timing import on_gpu
from echo_lm.ops import ska
from echo_lm.ops.backends import fla_operator, product_dtype, why_no_fla
from echo_lm.ops.ska.naive import whitened_readout
from echo_lm.ops.ssd import ssd

Inputs = dict[str, Any]
"""Tensors under the names of an operator's arguments, leaves that want their gradients."""

RIDGE = 0.03
"""Of the rank: the start of a learned ridge, and 3% of a random key's energy."""
PAPER_RIDGE = 1e-3
EPS = torch.finfo(torch.float32).eps
CHUNK = 64
NAIVE_UP_TO = 256
PAPER_UP_TO = 2048
"""Tokens."""
MODES: dict[str, dict[str, Any]] = {
    "ska-exact": {"causal": "exact"},
    "ska-chunk": {"causal": "chunk", "chunk_size": CHUNK},
}
FLASH = "flash"
ATTENTION = {FLASH: SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
"""Kernels of scaled_dot_product_attention."""


@dataclass(frozen=True)
class Size:
    """Of one call: queries and keys are `rank` wide, values and those of others `width`."""

    batch: int
    tokens: int
    heads: int = 12
    rank: int = 48
    width: int = 64
    order: int = 2


@dataclass(frozen=True)
class Truth:
    """What an operator of ours is held to before it is timed."""

    answer: Callable[[Inputs], Tensor]
    """The same map, for inputs in fp64."""
    rounding: Callable[[Inputs], float]
    """How far answers and gradients may be from it, in the norm, if all is computed in fp32."""
    longest: int | None = None
    """It would take too long for more tokens."""


@dataclass(frozen=True)
class Contender:
    """An operator to time."""

    name: str
    draw: Callable[[Size, torch.dtype], Inputs]
    answer: Callable[[Inputs], Tensor]
    truth: Truth | None = None
    """None: of others, who check it themselves."""
    why_not: Callable[[bool], str | None] = lambda backward: None
    """What keeps it (with its backward pass) from running here."""
    launched: bool = False
    """Whether it is timed as Python launches it, and not as a CUDA graph."""


def contenders(device: str) -> dict[str, Contender]:
    """All of them, by name."""
    fast = "triton" if on_gpu(device) else "chunk"
    found = [
        *(ours(name, device, fast) for name in MODES),
        paper(device),
        *(attention(name, device) for name in ATTENTION),
        *(of_fla(name, device) for name in ("mesa_net", "gated_delta_rule", "simple_gla")),
        *(scan(form, device) for form in ("chunk", "triton")),
    ]
    return {one.name: one for one in found}


def ours(name: str, device: str, backend: Any) -> Contender:
    """SKA, held to a slower form of it."""

    def answer(given: Inputs) -> Tensor:
        return ska(**given, **MODES[name], backend=backend)

    def slower(given: Inputs) -> Tensor:
        return ska(**given, **MODES[name], backend=slower_form(given["q"]))

    return Contender(name, partial(draw_recall, device), answer, Truth(slower, rounding_of_inverse))


def rounding_of_inverse(given: Inputs) -> float:
    """An inverse multiplies rounding by up to |k|^2 / ridge, and gradients are up to 16 of these
    units off, as the tests of SKA count."""
    energy = given["k"].detach().float().square().sum(-1).max()
    return 16 * EPS * float(1 + energy / given["ridge"].detach().min())


def slower_form(tokens: Tensor) -> Any:
    """The loop while that takes seconds; the parallel form, which the tests hold to it, beyond."""
    return "naive" if tokens.shape[1] <= NAIVE_UP_TO else "chunk"


def draw_recall(device: str, size: Size, dtype: torch.dtype) -> Inputs:
    q, k, v = draw_tokens(device, size, dtype, size.rank, size.rank, size.width)
    coef = torch.rand(size.heads, size.order + 1, device=device)
    ridge = torch.full((size.heads,), RIDGE * size.rank, device=device)
    return leaves(q=q, k=k, v=v, coef=coef, ridge=ridge)


def paper(device: str) -> Contender:
    """In eager PyTorch, as the paper has it; held to the pipeline for one head.

    Keys have norm 1 at most, so that the ridge multiplies the rounding of fp32 by up to 1000.
    """

    def draw(size: Size, dtype: torch.dtype) -> Inputs:
        q, k, v = draw_tokens(device, size, dtype, size.rank, size.rank, size.width)
        return leaves(q=q, k=k, v=v, gamma=torch.tensor(1.05, device=device))

    how: dict[str, Any] = {"ridge": PAPER_RIDGE, "order": 2}
    one_by_one = partial(written_out, **how)
    truth = Truth(one_by_one, lambda given: EPS / PAPER_RIDGE, longest=PAPER_UP_TO)

    def answer(given: Inputs) -> Tensor:
        return paper_form(**given, chunk_size=CHUNK, **how)

    return Contender("paper", draw, answer, truth, launched=True)


def written_out(given: Inputs, **how: Any) -> Tensor:
    """The paper's pipeline, chunk by chunk and head by head, on the CPU."""
    q, k, v, gamma = (given[name].cpu() for name in ("q", "k", "v", "gamma"))

    def head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = k.norm(dim=-1).max()
        parts = [
            whitened_readout(part, k[:t], v[:t], scale=scale, gamma=gamma, **how)[0]
            for t, part in zip(range(0, len(q), CHUNK), q.split(CHUNK), strict=True)
        ]
        return torch.cat(parts)

    by_row = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    heads = torch.stack([head(*one) for one in zip(*by_row, strict=True)])
    return heads.unflatten(0, (len(q), -1)).transpose(1, 2).to(given["v"].device)


def attention(name: str, device: str) -> Contender:
    """Causal attention, heads before tokens as its kernels like it."""
    missing = "needs a CUDA device" if name != FLASH and not on_gpu(device) else None

    def draw(size: Size, dtype: torch.dtype) -> Inputs:
        shape = size.batch, size.heads, size.tokens, size.width
        q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
        return leaves(q=q, k=k, v=v)

    def answer(given: Inputs) -> Tensor:
        with sdpa_kernel(ATTENTION[name]):
            q, k, v = given.values()
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return Contender(name, draw, answer, why_not=lambda backward: missing)


def of_fla(name: str, device: str) -> Contender:
    """An operator of flash-linear-attention: keys of length 1, gates near 1, as its examples."""

    def draw(size: Size, dtype: torch.dtype) -> Inputs:
        q, k, v = draw_tokens(device, size, dtype, *[size.width] * 3)
        shape = size.batch, size.tokens, size.heads
        given = {"q": q, "k": F.normalize(k, dim=-1), "v": v}
        given["g"] = F.logsigmoid(torch.randn(shape, device=device) + 3)
        if name != "simple_gla":
            given["beta"] = torch.rand(shape, device=device, dtype=dtype).sigmoid()
        if name == "mesa_net":
            lamb = torch.rand(size.heads, size.width, device=device, dtype=dtype)
            given["lamb"] = F.softplus(lamb) + 0.25
        return leaves(**given)

    def answer(given: Inputs) -> Tensor:
        y: Tensor = fla_operator(name)(**given)[0]
        return y

    return Contender(
        name, draw, answer, why_not=lambda backward: why_no_fla(name, device, backward=backward)
    )


def scan(form: Any, device: str) -> Contender:
    """The scan of Mamba-2, without the layer around it; its sums have about a chunk of terms."""

    def draw(size: Size, dtype: torch.dtype) -> Inputs:
        (x,) = draw_tokens(device, size, dtype, size.width)
        shape = size.batch, size.tokens
        B, C = (
            torch.randn(*shape, 1, size.width, device=device, dtype=dtype) / size.width**0.5
            for _ in range(2)
        )
        gamma = F.softplus(torch.randn(*shape, size.heads, device=device) - 2)
        return leaves(x=x, B=B, C=C, log_decay=-gamma.detach(), gamma=gamma)

    def answer(given: Inputs) -> Tensor:
        return ssd(**given, backend=form)

    def slower(given: Inputs) -> Tensor:
        return ssd(**given, backend=slower_form(given["x"]))

    truth = Truth(slower, lambda given: 2 * CHUNK * EPS)

    def why_not(backward: bool) -> str | None:
        """As the scan itself says it of a small call."""
        given = draw(Size(1, 2, heads=1), product_dtype(device))
        try:
            answer(given)
        except ValueError as error:
            return str(error)
        return None

    return Contender(f"scan-{form}", draw, answer, truth, why_not)


def draw_tokens(device: str, size: Size, dtype: torch.dtype, *widths: int) -> list[Tensor]:
    shape = size.batch, size.tokens, size.heads
    return [torch.randn(*shape, width, device=device, dtype=dtype) for width in widths]


def leaves(**given: Tensor) -> Inputs:
    return {name: x.detach().clone().requires_grad_() for name, x in given.items()}
