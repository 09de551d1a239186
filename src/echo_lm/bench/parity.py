"""Nothing is timed before it is shown to be right: answers, every gradient, the same bits twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from echo_lm.bench.contenders import Contender, Inputs, Size
from echo_lm.bench.record import Row

ROUNDED = {torch.float32: 0.0, torch.bfloat16: 2e-2}
"""What inputs and outputs in a dtype cost besides: bf16 rounds outputs to 4e-3, and some gradients
are sums of products rounded to it."""


class ParityError(ValueError):
    """An operator is not what it is held to, so that its speed means nothing."""


def both_passes(answer: Callable[[Inputs], Tensor], given: Inputs, dy: Tensor) -> Inputs:
    """The answer and the gradient of every input."""
    y = answer(given)
    gradients = torch.autograd.grad(y, list(given.values()), dy.to(y.dtype))
    return {"y": y, **{f"d{name}": x for name, x in zip(given, gradients, strict=True)}}


def check(contender: Contender, size: Size, dtype: torch.dtype) -> Row:
    """Errors of one size; raises if one is too large, or if two runs differ by a bit."""
    truth = contender.truth
    assert truth is not None
    size = replace(size, tokens=min(size.tokens, truth.longest or size.tokens))
    given = contender.draw(size, dtype)
    dy = weights(contender.answer(given).detach())
    found, again = (both_passes(contender.answer, given, dy) for _ in range(2))
    wanted = both_passes(truth.answer, in_fp64(given), dy)
    case = f"{contender.name} in {str(dtype)[6:]}, {size.tokens} tokens, rank {size.rank}"
    errors = {name: error(x, wanted[name]) for name, x in found.items()}
    worst = max(errors, key=lambda name: badness(errors[name]))
    limit = ROUNDED[dtype] + truth.rounding(given)
    if not errors[worst] < limit:
        raise ParityError(
            f"{case} is off by {errors[worst]:.1e} in {worst}, and {limit:.0e} is what rounding "
            "may cost; no speed is reported."
        )
    for name, x in found.items():
        if not torch.equal(x, again[name]):
            raise ParityError(f"Two runs of {case} differ in {name}; no speed is reported.")
    row: Row = {"what": contender.name, "dtype": str(dtype)[6:], "tokens": size.tokens}
    row |= {"rank": size.rank, "width": size.width, "error": errors[worst], "in": worst}
    return row | {"allowed": limit}


def weights(y: Tensor) -> Tensor:
    """Of the answers in a loss. Random ones alone would let a sum over all tokens, such as the
    gradient of the ridge, cancel to what says nothing of its error."""
    return y + y.square().mean().sqrt() * torch.randn_like(y)


def in_fp64(given: Inputs) -> Inputs:
    return {name: x.detach().double().requires_grad_() for name, x in given.items()}


def error(found: Tensor, wanted: Tensor) -> float:
    """In the norm, as a part of it."""
    found, wanted = found.detach().double(), wanted.detach().double()
    size = wanted.norm().clamp_min(torch.finfo(wanted.dtype).tiny)
    return float((found - wanted).norm() / size)


def badness(error: float) -> float:
    """What is not a number is worse than any."""
    return float("inf") if error != error else error
