"""The loss in pieces is the loss, gradients included, and holds few logits at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from echo_lm.model.loss import next_token_loss, next_token_loss_in_pieces

from .families import padded, random_tokens, small_model

VOCAB, WIDTH, ROWS, TIME = 37, 12, 3, 11


def parts(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(ROWS, TIME, WIDTH, dtype=dtype, requires_grad=True)
    head = torch.randn(VOCAB, WIDTH, dtype=dtype, requires_grad=True)
    labels = torch.randint(VOCAB, (ROWS, TIME)).masked_fill(torch.rand(ROWS, TIME) < 0.3, -100)
    return x, head, labels


@pytest.mark.parametrize("at_once", [1, VOCAB, 7 * VOCAB, 10**6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_pieces_of_any_size_give_the_loss_and_its_gradients(
    at_once: int, dtype: torch.dtype
) -> None:
    x, head, labels = parts(dtype)
    whole = 3 * next_token_loss(F.linear(x, head), labels)
    in_pieces = 3 * next_token_loss_in_pieces(x, head, labels, at_once)
    # Sums of at most 37 numbers near 1, in another order.
    allowed = {"rtol": 0.0, "atol": 64 * torch.finfo(dtype).eps}
    assert_close(in_pieces, whole, **allowed)
    wanted = torch.autograd.grad(whole, (x, head))
    assert_close(torch.autograd.grad(in_pieces, (x, head)), wanted, **allowed)


def test_gradcheck() -> None:
    x, head, labels = parts()
    assert torch.autograd.gradcheck(
        lambda x, head: next_token_loss_in_pieces(x, head, labels, 2 * VOCAB), (x, head)
    )


@pytest.mark.parametrize("frozen", ["x", "head", "both"])
def test_what_needs_no_gradient_gets_none(frozen: str) -> None:
    x, head, labels = parts()
    free = [t for name, t in (("x", x), ("head", head)) if frozen not in (name, "both")]
    for t in (x, head):
        t.requires_grad_(any(t is one for one in free))
    loss = next_token_loss_in_pieces(x, head, labels, VOCAB)
    assert loss.requires_grad == bool(free)
    if free:
        whole = next_token_loss(F.linear(x, head), labels)
        assert_close(torch.autograd.grad(loss, free), torch.autograd.grad(whole, free))


def test_a_loss_of_nothing_is_nothing_and_moves_nothing() -> None:
    x, head, labels = parts()
    nothing = torch.full_like(labels, -100)
    for loss in (
        next_token_loss(F.linear(x, head), nothing),
        next_token_loss_in_pieces(x, head, nothing),
    ):
        assert loss == 0
        for gradient in torch.autograd.grad(loss, (x, head)):
            assert not gradient.any()


def test_a_second_derivative_is_refused_not_wrong() -> None:
    x, head, labels = parts()
    loss = next_token_loss_in_pieces(x, head, labels).square()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


class LargestTensor(TorchDispatchMode):
    """The most numbers a tensor held."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.seen = max(self.seen, *sizes, 0)
        return out


def test_logits_never_exist_at_once() -> None:
    vocab, tokens, at_once = 1000, 401, 8000
    x = torch.randn(1, tokens, 4, requires_grad=True)
    head = torch.randn(vocab, 4, requires_grad=True)
    labels = torch.randint(vocab, (1, tokens))
    with LargestTensor() as whole:
        next_token_loss(F.linear(x, head), labels).backward()
    with LargestTensor() as in_pieces:
        next_token_loss_in_pieces(x, head, labels, at_once).backward()
    assert in_pieces.seen == at_once < whole.seen == vocab * tokens


@pytest.mark.parametrize("name", ["echo-50m", "synthetic-attention"])
@pytest.mark.parametrize("kind", ["none", "left"])
def test_a_model_keeps_the_logits_asked_for(name: str, kind: str) -> None:
    model = small_model(name)
    tokens = random_tokens(model, 3, 12)
    mask = None if kind == "none" else padded(kind, 3, 12)
    everything = model(tokens, labels=tokens, attention_mask=mask)
    for keep in (0, 1, 5, 12, 20):
        out = model(tokens, labels=tokens, attention_mask=mask, logits_to_keep=keep)
        kept = min(keep, 12)
        assert out.logits.shape == (3, kept, model.config.vocab_size)
        assert_close(out.logits, everything.logits[:, 12 - kept :])
        assert_close(out.loss, everything.loss)
    with pytest.raises(ValueError, match="logits_to_keep must be 0 or more, got -1"):
        model(tokens, logits_to_keep=-1)


def test_autocast_rounds_the_logits_either_way() -> None:
    model = small_model("echo-50m", torch.float32).requires_grad_()
    tokens = random_tokens(model, 2, 20)
    parameters = list(model.parameters())
    found = []
    for keep in (None, 0):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens, labels=tokens, logits_to_keep=keep).loss
        assert loss.dtype == torch.float32
        found.append((loss, torch.autograd.grad(loss, parameters)))
    (whole, wanted), (in_pieces, got) = found
    # The same logits, rounded to bf16 alike; gradients are rounded at other places.
    assert_close(in_pieces, whole, rtol=1e-5, atol=0)
    for a, b in zip(got, wanted, strict=True):
        assert float((a - b).norm()) <= 2.0**-6 * float(b.norm()) + 1e-6


# torch.compile itself makes one to look at it.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiles_to_one_graph() -> None:
    x, head, labels = parts()
    compiled = torch.compile(next_token_loss_in_pieces, backend="aot_eager", fullgraph=True)
    ours = compiled(x, head, labels, 4 * VOCAB)
    theirs = next_token_loss_in_pieces(x, head, labels, 4 * VOCAB)
    assert_close(ours, theirs)
    assert_close(torch.autograd.grad(ours, (x, head)), torch.autograd.grad(theirs, (x, head)))
