"""The scan in parallel over chunks: for training and prefill. Memory grows linearly with T.

A trapezoid is a plain scan that gives the token itself another weight than the tokens before it;
README.md has the two lines of algebra.

Letters in einsum: b batch, c chunk, i and j positions in a chunk, g group, k head of a group,
r and q rank, p head width, n state size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from echo_lm.ops.ssd.problem import Problem
from echo_lm.ops.ssd.restart import running_sum, to_chunks
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
    log_decay = per_head(problem.log_decay.to(sum_dtype(x.device)))
    starts = None if problem.starts is None else to_chunks(problem.starts, size)
    sums, number = since_start(log_decay, starts)
    from_start = kept(sums.to(x.dtype), number, 0)
    to_end = kept((sums[:, :, -1:] - sums).to(x.dtype), number, -1)

    scores = torch.einsum("bcigrn,bcjgqn->bcgirjq", C, B).unsqueeze(3)
    of_heads = None if number is None else number[:, :, None, None]
    decay = decays(sums.movedim(2, -1), x.dtype, of_heads, own=False)[..., :, None, :, None]
    y = torch.einsum("bcgkirjq,bcjgkqp->bcigkrp", scores * decay, past_x)
    own_scores = torch.einsum("bcigrn,bcigqn->bcigrq", C, B)
    y = y + torch.einsum("bcigrq,bcigkqp->bcigkrp", own_scores, own_x)

    added = torch.einsum("bcjgkrp,bcjgrn->bcgkpn", past_x * to_end[..., None, None], B)
    broken = None if starts is None else starts.any(2)
    before, last = chain(sums[:, :, -1], added, h.unflatten(1, (groups, -1)), broken)
    carried = torch.einsum("bcigrn,bcgkpn->bcigkrp", C, before)
    y = y + carried * from_start[..., None, None]
    return y.flatten(1, 2)[:, :tokens].flatten(2, 3), last.flatten(1, 2).clone()


def since_start(
    log_decay: Float[Tensor, "b c i g k"], starts: Bool[Tensor, "b c i"] | None
) -> tuple[Float[Tensor, "b c i g k"], Int[Tensor, "b c i"] | None]:
    """Sums inside each chunk, and how many starts there are up to each token.

    Nothing passes a start, so its own decay is nobody's.
    """
    if starts is None:
        return log_decay.cumsum(dim=2), None
    passed = log_decay.masked_fill(starts[..., None, None], 0)
    sums = running_sum(passed.flatten(0, 1), starts.flatten(0, 1))
    return sums.view_as(passed), starts.cumsum(2)


def kept(
    log_decay: Float[Tensor, "b c i g k"], number: Int[Tensor, "b c i"] | None, end: int
) -> Float[Tensor, "b c i g k"]:
    """The decay between each token and an end of its chunk, the first (0) or the last (-1); 0 if a
    start is between them."""
    if number is None:
        return log_decay.exp()
    reached = number == (0 if end == 0 else number[:, :, -1:])
    return log_decay.masked_fill(~reached[..., None, None], -torch.inf).exp()


def decays(
    sums: Float[Tensor, "... i"],
    dtype: torch.dtype,
    number: Int[Tensor, "... i"] | None,
    *,
    own: bool,
) -> Float[Tensor, "... i i"]:
    """exp(sums_i - sums_j) for j < i, with `own` for j = i too, and 0 for the future and across
    starts."""
    hidden = torch.ones(sums.shape[-1:] * 2, dtype=torch.bool, device=sums.device)
    hidden = hidden.triu(1 if own else 0)
    if number is not None:
        hidden = hidden | (number.unsqueeze(-1) != number.unsqueeze(-2))
    between = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).to(dtype)
    return between.masked_fill(hidden, -torch.inf).exp()


def chain(
    log_decay: Float[Tensor, "b c g k"],
    added: Float[Tensor, "b c g k p n"],
    h: Float[Tensor, "b g k p n"],
    broken: Bool[Tensor, "b c"] | None = None,
) -> tuple[Float[Tensor, "b c g k p n"], Float[Tensor, "b g k p n"]]:
    """Run h <- exp(log_decay_c) h + added_c: what every chunk starts from, what the last leaves.

    A chunk that is broken by a start keeps nothing of h.
    """
    chunks = added.shape[1]
    size = min(chunks, FAN)
    log_decay, added = to_chunks(log_decay, size), to_chunks(added, size)
    starts = None if broken is None else to_chunks(broken, size)
    sums, number = since_start(log_decay, starts)
    if chunks <= FAN:
        front = (0, 0, 0, 0, 1, 0)
        of_heads = None if number is None else F.pad(number[:, 0], (1, 0))[:, None, None]
        weights = decays(F.pad(sums[:, 0], front).movedim(1, -1), h.dtype, of_heads, own=True)
        terms = torch.cat([h.unsqueeze(1), added[:, 0]], dim=1)
        states = torch.einsum("bgkcd,bdgkpn->bcgkpn", weights, terms)
        return states[:, :-1], states[:, -1]
    to_end = kept((sums[:, :, -1:] - sums).to(h.dtype), number, -1)
    added_by_all = torch.einsum("bmcgk,bmcgkpn->bmgkpn", to_end, added)
    any_broken = None if starts is None else starts.any(2)
    block_starts, last = chain(sums[:, :, -1], added_by_all, h, any_broken)
    before, _ = chain(
        log_decay.flatten(0, 1),
        added.flatten(0, 1),
        block_starts.flatten(0, 1),
        None if starts is None else starts.flatten(0, 1),
    )
    return before.unflatten(0, (-1, added.shape[1])).flatten(1, 2)[:, :chunks], last
