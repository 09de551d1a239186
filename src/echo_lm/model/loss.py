"""The loss of the next token, with or without the logits of all tokens at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED_LABEL = -100

LOGITS_AT_ONCE = 2**24
"""Numbers: 64 MiB in fp32, where a kernel is busy enough."""


def next_token_loss(
    logits: Float[Tensor, "b t vocab"], labels: Int[Tensor, "b t"]
) -> Float[Tensor, ""]:
    """Mean cross-entropy of the labels under the logits one place before; 0 if there are none."""
    targets = next_tokens(labels)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    total = F.cross_entropy(
        logits[:, :-1].flatten(0, 1).to(dtype),
        targets,
        ignore_index=IGNORED_LABEL,
        reduction="sum",
    )
    return total / (targets != IGNORED_LABEL).sum().clamp_min(1)


def next_token_loss_in_pieces(
    x: Float[Tensor, "b t d"],
    head: Float[Tensor, "vocab d"],
    labels: Int[Tensor, "b t"],
    at_once: int = LOGITS_AT_ONCE,
) -> Float[Tensor, ""]:
    """The same from what the head reads; no more than `at_once` logits exist at a time."""
    targets = next_tokens(labels)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, head = x.to(dtype), head.to(dtype)
    hidden = x[:, :-1].flatten(0, 1)
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        # Where something is asked; how many places that are, another device would have to tell.
        asked = targets != IGNORED_LABEL
        hidden, targets = hidden[asked], targets[asked]
    return PiecewiseCrossEntropy.apply(hidden, head, targets, at_once)


def next_tokens(labels: Int[Tensor, "b t"]) -> Int[Tensor, " n"]:
    """What each place but a row's last is to predict."""
    if labels.shape[1] < 2:
        raise ValueError("labels need at least two tokens: each is predicted by the one before.")
    return labels[:, 1:].flatten().long()


class PiecewiseCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of `x @ head.T`, whose gradients are ready when the loss is.

    A piece's logits turn into their own gradient, softmax minus target, and are let go.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Float[Tensor, "n d"],
        head: Float[Tensor, "vocab d"],
        targets: Int[Tensor, " n"],
        at_once: int,
    ) -> Float[Tensor, ""]:
        wide = torch.promote_types(x.dtype, torch.float32)
        asked = targets != IGNORED_LABEL
        share = 1 / asked.sum().clamp_min(1).to(wide)
        loss = torch.zeros((), dtype=wide, device=x.device)
        needs_x, needs_head = ctx.needs_input_grad[:2]
        dx = torch.empty_like(x) if needs_x else None
        dhead = torch.zeros(head.shape, dtype=wide, device=x.device) if needs_head else None
        rows = max(1, at_once // len(head))
        for start in range(0, len(x), rows):
            here = slice(start, start + rows)
            target = targets[here].masked_fill(~asked[here], 0)[:, None]
            weight = asked[here].to(wide) * share
            with torch.autocast(x.device.type, enabled=False):
                log_p = (x[here] @ head.mT).to(wide).log_softmax(-1)
                loss = loss - (weight * log_p.gather(1, target)[:, 0]).sum()
                if dx is None and dhead is None:
                    continue
                slope = log_p.exp_().scatter_add_(1, target, -torch.ones_like(target, dtype=wide))
                slope = (slope * weight[:, None]).to(x.dtype)
                if dx is not None:
                    dx[here] = slope @ head
                if dhead is not None:
                    dhead += slope.mT @ x[here]
        ctx.save_for_backward(dx, dhead)
        ctx.head_dtype = head.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dloss,) = gradients
        dx, dhead = ctx.saved_tensors
        return (
            None if dx is None else dx * dloss.to(dx.dtype),
            None if dhead is None else (dhead * dloss).to(ctx.head_dtype),
            None,
            None,
        )
