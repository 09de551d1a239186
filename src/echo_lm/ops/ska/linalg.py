"""Factor and invert batches of small positive definite matrices, come what may.

Both are custom operators so that `torch.compile` sees one node where there is a retry inside.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

log = logging.getLogger("echo_lm")

RETRIES = 12


def _robust_cholesky(a: Tensor) -> Tensor:
    """Lower Cholesky factor; what fails is retried with growing jitter, then set to NaN.

    Rounding can make a positive definite matrix fail when keys are huge beside the ridge. Jitter is
    relative to each diagonal entry and begins at the row that failed, so that a row of the factor
    depends on the rows up to it and on nothing after: rows can be tokens, and the past must not
    feel the future. It is said aloud, since it changes the answer. A matrix that never succeeds
    holds NaN or infinity, and its factor must not look finite.
    """
    factor, info = torch.linalg.cholesky_ex(a)
    failed = info > 0
    if not bool(failed.any()):
        return factor
    retried = int(failed.sum())
    diagonal = a.diagonal(dim1=-2, dim2=-1)
    row = torch.arange(a.shape[-1], device=a.device)
    smallest = 10 * a.shape[-1] * torch.finfo(a.dtype).eps
    relative = torch.zeros_like(diagonal)
    for _ in range(RETRIES):
        from_failure = row >= info[failed].unsqueeze(-1) - 1
        raised = (10 * relative[failed]).clamp_min(smallest)
        relative[failed] = torch.where(from_failure, raised, relative[failed])
        jitter = torch.diag_embed(relative[failed] * diagonal[failed])
        factor[failed], info[failed] = torch.linalg.cholesky_ex(a[failed] + jitter)
        failed = info > 0
        if not bool(failed.any()):
            break
    factor[failed] = torch.nan
    log.warning(
        "%d of %d matrices were not positive definite to rounding: %d factored with relative "
        "jitter up to %.0e, %d not at all (NaN). Raise the ridge or look at the keys.",
        retried,
        failed.numel(),
        retried - int(failed.sum()),
        float(relative.masked_fill(failed.unsqueeze(-1), 0).max()),
        int(failed.sum()),
    )
    return factor


def _inverse_factor(a: Tensor) -> Tensor:
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
    return torch.linalg.solve_triangular(_robust_cholesky(a), identity, upper=False)


@torch.library.custom_op("echo_lm::inverse_cholesky", mutates_args=())
def _inverse_cholesky(a: Tensor) -> Tensor:
    return _inverse_factor(a).contiguous()


@torch.library.custom_op("echo_lm::spd_inverse", mutates_args=())
def _spd_inverse(a: Tensor) -> Tensor:
    half = _inverse_factor(a)
    return half.mT @ half


def inverse_cholesky(a: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """L^-1 of a = L L', lower triangular; `a` symmetric positive definite."""
    inverse: Tensor = _inverse_cholesky(a)
    return inverse


def spd_inverse(a: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """a^-1 of a symmetric positive definite `a`, exactly symmetric."""
    inverse: Tensor = _spd_inverse(a)
    return inverse


@_inverse_cholesky.register_fake
@_spd_inverse.register_fake
def _(a: Tensor) -> Tensor:
    return torch.empty_like(a)


def _keep_output(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _inverse_backward(ctx: Any, grad: Tensor) -> Tensor:
    (inverse,) = ctx.saved_tensors
    return -(inverse @ grad @ inverse)


def _inverse_cholesky_backward(ctx: Any, grad: Tensor) -> Tensor:
    """dA = -H' phi(dH H') H of H = L^-1, phi = lower triangle with half the diagonal; symmetric."""
    (half,) = ctx.saved_tensors
    inner = (grad @ half.mT).tril()
    inner = inner - 0.5 * torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1))
    full = half.mT @ inner @ half
    return -0.5 * (full + full.mT)


_spd_inverse.register_autograd(_inverse_backward, setup_context=_keep_output)
_inverse_cholesky.register_autograd(_inverse_cholesky_backward, setup_context=_keep_output)
