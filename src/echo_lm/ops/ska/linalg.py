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


def _robust_cholesky(a: Tensor) -> Tensor:
    """Lower Cholesky factor; what fails is retried with growing jitter, then set to NaN.

    Rounding can make a positive definite matrix fail when keys are huge beside the ridge. Jitter
    is relative to the largest diagonal entry and said aloud, since it changes the answer. A matrix
    that never succeeds holds NaN or infinity, and its factor must not look finite.
    """
    factor, info = torch.linalg.cholesky_ex(a)
    failed = info > 0
    if not bool(failed.any()):
        return factor
    scale = a.diagonal(dim1=-2, dim2=-1).amax(-1)
    relative = 10 * a.shape[-1] * torch.finfo(a.dtype).eps
    retried = int(failed.sum())
    while relative < 1 and bool(failed.any()):
        jittered = a[failed]
        jittered.diagonal(dim1=-2, dim2=-1).add_((relative * scale[failed]).unsqueeze(-1))
        again, info = torch.linalg.cholesky_ex(jittered)
        factor[failed] = again
        failed[failed.clone()] = info > 0
        relative *= 10
    factor[failed] = torch.nan
    log.warning(
        "%d of %d matrices were not positive definite to rounding: %d factored with relative "
        "jitter up to %.0e, %d not at all (NaN). Raise the ridge or look at the keys.",
        retried,
        failed.numel(),
        retried - int(failed.sum()),
        relative / 10,
        int(failed.sum()),
    )
    return factor


@torch.library.custom_op("echo_lm::cholesky", mutates_args=())
def cholesky(a: Tensor) -> Tensor:
    """R with R R' = a, lower triangular; see `_robust_cholesky` for what happens on failure."""
    return _robust_cholesky(a)


@torch.library.custom_op("echo_lm::spd_inverse", mutates_args=())
def _spd_inverse(a: Tensor) -> Tensor:
    factor = _robust_cholesky(a)
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    half = torch.linalg.solve_triangular(factor, identity.expand_as(a), upper=False)
    return half.mT @ half


def spd_inverse(a: Float[Tensor, "*batch r r"]) -> Float[Tensor, "*batch r r"]:
    """a^-1 of a symmetric positive definite `a`, exactly symmetric."""
    inverse: Tensor = _spd_inverse(a)
    return inverse


@cholesky.register_fake
@_spd_inverse.register_fake
def _(a: Tensor) -> Tensor:
    return torch.empty_like(a)


def _keep_output(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _inverse_backward(ctx: Any, grad: Tensor) -> Tensor:
    (inverse,) = ctx.saved_tensors
    return -(inverse @ grad @ inverse)


def _cholesky_backward(ctx: Any, grad: Tensor) -> Tensor:
    """dA = R^-T phi(R' dR) R^-1, phi = lower triangle with half the diagonal; made symmetric."""
    (factor,) = ctx.saved_tensors
    inner = (factor.mT @ grad).tril()
    inner = inner - 0.5 * torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1))
    left = torch.linalg.solve_triangular(factor.mT, inner, upper=True)
    full = torch.linalg.solve_triangular(factor, left, upper=False, left=False)
    return 0.5 * (full + full.mT)


_spd_inverse.register_autograd(_inverse_backward, setup_context=_keep_output)
cholesky.register_autograd(_cholesky_backward, setup_context=_keep_output)
