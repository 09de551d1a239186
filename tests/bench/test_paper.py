"""The paper's form for all chunks at once is the pipeline that is written out for one head."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from echo_lm.bench.paper import paper_form
from echo_lm.ops.ska.naive import whitened_readout

BATCH, HEADS, RANK, WIDTH, SIZE, RIDGE = 2, 2, 6, 5, 8, 1e-3


def written_out(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, order: int) -> Tensor:
    """Chunk by chunk, head by head, with the scale of the whole sequence."""
    rows = []
    for b in range(BATCH):
        heads = []
        for h in range(HEADS):
            scale = k[b, :, h].norm(dim=-1).max()
            answers = [
                whitened_readout(
                    q[b, t : t + SIZE, h], k[b, :t, h], v[b, :t, h],
                    ridge=RIDGE, order=order, gamma=gamma, scale=scale,
                )[0]
                for t in range(0, q.shape[1], SIZE)
            ]  # fmt: skip
            heads.append(torch.cat(answers))
        rows.append(torch.stack(heads, dim=1))
    return torch.stack(rows)


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("tokens", [5, 32, 35])
def test_answers_and_every_gradient(tokens: int, order: int) -> None:
    shapes = [(BATCH, tokens, HEADS, RANK)] * 2 + [(BATCH, tokens, HEADS, WIDTH), ()]
    given = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    given[3] = 1 + 0.5 * given[3].sigmoid()
    given = [x.requires_grad_() for x in given]
    q, k, v, gamma = given
    dy = torch.randn_like(v)
    found = paper_form(q, k, v, gamma=gamma, ridge=RIDGE, order=order, chunk_size=SIZE)
    wanted = written_out(q, k, v, gamma, order)
    gradients = (
        torch.autograd.grad(y, given, dy, allow_unused=True, materialize_grads=True)
        for y in (found, wanted)
    )
    for a, b in zip((found, *next(gradients)), (wanted, *next(gradients)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-8)


def test_takes_and_gives_the_dtype_of_the_values() -> None:
    q, k, v = torch.randn(3, 1, 20, 2, 6, dtype=torch.bfloat16)
    y = paper_form(q, k, v, gamma=torch.tensor(1.0), ridge=RIDGE, order=2, chunk_size=SIZE)
    assert y.dtype == torch.bfloat16
    assert not y[:, :SIZE].any(), "nothing has been read before the first chunk"
    assert y[:, SIZE:].any(dim=-1).all()
