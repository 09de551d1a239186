"""Appendix F: the retrieval pipeline, step by step, against the operator and its read-out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from torch import Tensor

from echo_lm.analysis.operator import sums, whitened_operator
from echo_lm.analysis.ridge import readout
from echo_lm.ops import ska
from echo_lm.ops.ska.naive import whitened_readout

from .draws import KINDS
from .heads import Head, assert_near, head, heads, norm, thorough


def all_at_once(h: Head, mask: Tensor, order: int, gamma: float, **ridge: float | bool) -> Tensor:
    """`ska` asked by every token for what the unmasked ones have said."""
    coef = torch.zeros(1, order + 1, dtype=torch.float64)
    coef[0, order] = gamma**order
    q, k, v = (x[None, :, None] for x in (h.keys, h.keys, h.values))
    return ska(q, k, v, coef=coef, mask=mask[None], causal=False, **ridge)[0, :, 0]


@given(heads)
@thorough
def test_step_5_two_forward_substitutions_give_the_whitened_operator(h: Head) -> None:
    """L Y = M and L Z = Y' give A_w = Z' = L^-1 M L^-T, for every M, a lag matrix or not."""
    lag = h.queries[:-1].mT @ h.queries[1:]
    A = whitened_operator(h.sums.gram, lag, h.ridge)
    assert_near(h.factor @ A @ h.factor.mT, lag, h.rounding * norm(lag))


@pytest.mark.parametrize("kind", KINDS)
def test_step_6_divides_by_one(kind: str) -> None:
    """The power iteration finds nothing above 1, with a mask or without, so nothing is divided."""
    h = head(kind)
    for keys in (h.keys, h.keys * (torch.arange(20) % 3 > 0)[:, None]):
        _, sigma = whitened_readout(h.queries, keys, h.values, ridge=1e-3, order=2)
        assert sigma <= 1


@pytest.mark.parametrize("gamma", [1.0, 1.3])
@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "zero"])
def test_steps_2_to_10_are_one_matrix(kind: str, order: int, gamma: float) -> None:
    """gamma^K C X (M X)^K with a ridge of eps nu^2, whatever the mask: neither nu nor L is left."""
    h = head(kind)
    mask = torch.arange(20) % 4 != 1
    heard = h.keys * mask[:, None]
    nu = h.keys.norm(dim=-1).max()  # step 2 takes it over all tokens, masked ones included
    ridge = 1e-3 * float(nu) ** 2
    wanted, _ = whitened_readout(
        h.keys, heard, h.values, ridge=1e-3, order=order, gamma=gamma, scale=nu
    )
    known = sums(heard, h.values)
    W = readout(known, gamma**order * torch.eye(order + 1, dtype=torch.float64)[order], ridge)
    assert_near(h.keys @ W.mT, wanted, 1e-11 * h.values.norm())
    assert_near(all_at_once(h, mask, order, gamma, ridge=ridge), wanted, 1e-11 * h.values.norm())


def test_step_2_lets_a_masked_token_set_the_ridge() -> None:
    """nu is a maximum over t, not over m_t = 1. Our relative ridge is of the keys in the sums."""
    h = head()
    mask = torch.arange(20) != 7
    louder = Head(h.keys.clone(), h.values, h.queries, h.ridge)
    louder.keys[7] *= 30

    def paper(which: Head) -> Tensor:
        heard, nu = which.keys * mask[:, None], which.keys.norm(dim=-1).max()
        return whitened_readout(h.queries, heard, h.values, ridge=1e-3, order=2, scale=nu)[0]

    moved = (paper(louder) - paper(h)).norm() / paper(h).norm()
    assert moved > 0.1
    ours = [
        all_at_once(x, mask, 2, 1.0, ridge=1e-3, relative_ridge=True)[mask] for x in (h, louder)
    ]
    assert torch.equal(*ours)
