"""The scan in parallel over chunks: for training and prefill. Memory grows linearly with T.

A trapezoid is a plain scan that gives the token itself another weight than the tokens before it;
README.md has the two lines of algebra.

Letters in einsum: b batch, c chunk, i and j positions in a chunk, g group, k head of a group,
r and q rank, p head width, n state size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from echo_lm.ops.ssd.problem import Problem
from echo_lm.ops.ssd.state import sum_dtype

FAN = 16
"""Chunks whose states are chained by one product; more of them are chained in a tree."""


def ssd_chunk(problem: Problem) -> tuple[Float[Tensor, "b t h r p"], Float[Tensor, "b h p n"]]:
    """Inside a chunk as masked attention, from chunk to chunk through the state."""
    tokens, rank = problem.x.shape[1], problem.x.shape[3]
    groups = problem.B.shape[2]
    size = min(tokens, max(1, problem.chunk_size // rank))
    past_weight, h = problem.as_plain_scan()

    def per_head(v: Tensor) -> Tensor:
        return to_chunks(v, size).unflatten(3, (groups, -1))

    x = per_head(problem.x)
    B, C = to_chunks(problem.B, size), to_chunks(problem.C, size)
    past_x = x * per_head(past_weight)[..., None, None]
    own_x = x * per_head(problem.gamma)[..., None, None]
    # In fp64: behind one huge decay, differences of fp32 sums would lose the small ones.
    sums = per_head(problem.log_decay.to(sum_dtype(x.device))).cumsum(dim=2)
    from_start = sums.to(x.dtype).exp()
    to_end = (sums[:, :, -1:] - sums).to(x.dtype).exp()

    scores = torch.einsum("bcigrn,bcjgqn->bcgirjq", C, B).unsqueeze(3)
    decay = decays(sums.movedim(2, -1), x.dtype, own=False)[..., :, None, :, None]
    y = torch.einsum("bcgkirjq,bcjgkqp->bcigkrp", scores * decay, past_x)
    own_scores = torch.einsum("bcigrn,bcigqn->bcigrq", C, B)
    y = y + torch.einsum("bcigrq,bcigkqp->bcigkrp", own_scores, own_x)

    added = torch.einsum("bcjgkrp,bcjgrn->bcgkpn", past_x * to_end[..., None, None], B)
    starts, last = chain(sums[:, :, -1], added, h.unflatten(1, (groups, -1)))
    carried = torch.einsum("bcigrn,bcgkpn->bcigkrp", C, starts)
    y = y + carried * from_start[..., None, None]
    return y.flatten(1, 2)[:, :tokens].flatten(2, 3), last.flatten(1, 2).clone()


def to_chunks(v: Float[Tensor, "b t ..."], size: int) -> Float[Tensor, "b c i ..."]:
    """Cut time into chunks, the last filled up with zeros."""
    missing = -v.shape[1] % size
    if missing:
        v = F.pad(v, (0, 0) * (v.dim() - 2) + (0, missing))
    return v.unflatten(1, (-1, size))


def decays(
    sums: Float[Tensor, "... i"], dtype: torch.dtype, *, own: bool
) -> Float[Tensor, "... i i"]:
    """exp(sums_i - sums_j) for j < i, with `own` for j = i too, and 0 for the future."""
    future = torch.ones(sums.shape[-1:] * 2, dtype=torch.bool, device=sums.device)
    future = future.triu(1 if own else 0)
    between = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).to(dtype)
    return between.masked_fill(future, -torch.inf).exp()


def chain(
    log_decay: Float[Tensor, "b c g k"],
    added: Float[Tensor, "b c g k p n"],
    h: Float[Tensor, "b g k p n"],
) -> tuple[Float[Tensor, "b c g k p n"], Float[Tensor, "b g k p n"]]:
    """Run h <- exp(log_decay_c) h + added_c: what every chunk starts from, what the last leaves."""
    chunks = added.shape[1]
    if chunks <= FAN:
        sums = F.pad(log_decay.cumsum(dim=1), (0, 0, 0, 0, 1, 0)).movedim(1, -1)
        weights = decays(sums, h.dtype, own=True)
        terms = torch.cat([h.unsqueeze(1), added], dim=1)
        states = torch.einsum("bgkcd,bdgkpn->bcgkpn", weights, terms)
        return states[:, :-1], states[:, -1]
    log_decay, added = to_chunks(log_decay, FAN), to_chunks(added, FAN)
    sums = log_decay.cumsum(dim=2)
    to_end = (sums[:, :, -1:] - sums).to(h.dtype).exp()
    added_by_all = torch.einsum("bmcgk,bmcgkpn->bmgkpn", to_end, added)
    block_starts, last = chain(sums[:, :, -1], added_by_all, h)
    starts, _ = chain(log_decay.flatten(0, 1), added.flatten(0, 1), block_starts.flatten(0, 1))
    return starts.unflatten(0, (-1, added.shape[1])).flatten(1, 2)[:, :chunks], last
