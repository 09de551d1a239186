"""The paper's operator as the paper computes it: in PyTorch, for all chunks at once.

`ops/ska/naive.py` has the same pipeline for one head, to hold beside the paper's appendix; the
tests hold the two together. It is here to be timed, and nothing else calls it: normalisation by the
largest key of the sequence lets a token see the future, and README.md in `ops/ska` shows what of it
cancels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

POWER_ITERATIONS = 6


def paper_form(
    q: Float[Tensor, "b t h r"],
    k: Float[Tensor, "b t h r"],
    v: Float[Tensor, "b t h p"],
    *,
    gamma: Float[Tensor, ""],
    ridge: float,
    order: int,
    chunk_size: int = 64,
) -> Float[Tensor, "b t h p"]:
    """Normalise, add up, whiten, bound the spectrum, and answer each chunk from those before it."""
    dtype, tokens = v.dtype, q.shape[1]
    wide = torch.promote_types(dtype, torch.float32)
    q, k, v = (x.to(wide).transpose(1, 2) for x in (q, k, v))
    scale = k.norm(dim=-1).amax(-1).clamp_min(1e-6)[..., None, None]
    k_before = F.pad(k, (0, 0, 1, 0))[:, :, :-1]
    z, z_before, z_q, values = (
        chunks_of(x, chunk_size) for x in (k / scale, k_before / scale, q / scale, v)
    )
    G, M, C = (before_each(a.mT @ b) for a, b in ((z, z), (z, z_before), (values, z)))

    L = torch.linalg.cholesky(G + ridge * torch.eye(G.shape[-1], dtype=wide, device=G.device))
    Y = torch.linalg.solve_triangular(L, M, upper=False)
    A_w = torch.linalg.solve_triangular(L, Y.mT, upper=False).mT
    A_w = gamma * A_w / largest_singular_value(A_w.detach()).clamp_min(1.0)

    B_v = torch.cholesky_solve(C.mT, L).mT
    w = torch.linalg.solve_triangular(L, z_q.mT, upper=False)
    for _ in range(order):
        w = A_w @ w
    y = (B_v @ L @ w).mT.flatten(2, 3)[:, :, :tokens]
    return y.transpose(1, 2).to(dtype)


def chunks_of(x: Float[Tensor, "b h t d"], size: int) -> Float[Tensor, "b h n s d"]:
    """Cut the tokens, the last chunk filled up with zeros, which add nothing."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % size)).unflatten(2, (-1, size))


def before_each(sums: Float[Tensor, "b h n i j"]) -> Float[Tensor, "b h n i j"]:
    """Of all chunks before each one."""
    return F.pad(sums.cumsum(2), (0, 0, 0, 0, 1, 0))[:, :, :-1]


def largest_singular_value(a: Float[Tensor, "*batch r r"]) -> Float[Tensor, "*batch 1 1"]:
    """By power iteration on a' a; a lower estimate."""
    u = torch.ones_like(a[..., :1])
    for _ in range(POWER_ITERATIONS):
        u = a.mT @ (a @ u)
        u = u / u.norm(dim=-2, keepdim=True).clamp_min(torch.finfo(a.dtype).tiny)
    return (a @ u).norm(dim=-2, keepdim=True)
