"""SKA against things that are not SKA. What bounds its operator: tests/analysis."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from echo_lm.ops import ska
from echo_lm.ops.ska.naive import spectral_norm, whitened_readout

from .ska_cases import Inputs, assert_close, forms, make_inputs

TIGHT = 1e-11


def one_head(count: int, **sizes: Any) -> Inputs:
    return make_inputs(count, batch=1, heads=1, **sizes)


def rows_of(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    return inputs["q"][0, :, 0], inputs["k"][0, :, 0], inputs["v"][0, :, 0]


def one_hot(order: int, weight: float = 1.0) -> Tensor:
    coef = torch.zeros(1, order + 1, dtype=torch.float64)
    coef[0, order] = weight
    return coef


@pytest.mark.parametrize("form", forms("full"))
def test_order_zero_is_ridge_regression(form: str) -> None:
    """min_B |V - K B'|^2 + lam |B|^2, as least squares over K on top of sqrt(lam) I."""
    inputs = one_head(40, rank=7, width=4) | {"coef": one_hot(0), "ridge": 0.3}
    q, k, v = rows_of(inputs)
    design = torch.cat([k, 0.3**0.5 * torch.eye(7, dtype=k.dtype)])
    targets = torch.cat([v, torch.zeros(7, 4, dtype=k.dtype)])
    B = torch.linalg.lstsq(design, targets).solution.T
    y = ska(**inputs, causal=False, backend=form)
    assert_close(y[0, :, 0], q @ B.T, TIGHT)


@pytest.mark.parametrize("form", ["naive", "chunk", "recurrent"])
def test_exact_order_zero_is_a_ridge_regression_for_every_token(form: str) -> None:
    inputs = one_head(20, rank=5, width=3) | {"coef": one_hot(0), "ridge": 0.3}
    q, k, v = rows_of(inputs)
    y = ska(**inputs, backend=form, chunk_size=8)
    for t in range(20):
        design = torch.cat([k[: t + 1], 0.3**0.5 * torch.eye(5, dtype=k.dtype)])
        targets = torch.cat([v[: t + 1], torch.zeros(5, 3, dtype=k.dtype)])
        B = torch.linalg.lstsq(design, targets).solution.T
        assert_close(y[0, t, 0], B @ q[t], TIGHT)


@pytest.mark.parametrize("form", ["naive", "chunk", "recurrent"])
def test_order_one_recalls_what_followed(form: str) -> None:
    """Orthonormal keys in a cycle: M X maps a key to the next one, whose value is the answer."""
    keys = torch.eye(6, dtype=torch.float64).repeat(3, 1)[None, :, None]
    values = torch.randn(6, 4, dtype=torch.float64).repeat(3, 1)[None, :, None]
    asked = keys[:, [2]].expand_as(keys)
    y = ska(asked, keys, values, coef=one_hot(1), ridge=1e-9, backend=form, chunk_size=4)
    assert_close(y[0, -1, 0], values[0, 3, 0], 1e-8)


@pytest.mark.parametrize("gamma", [1.0, 1.3])
@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("form", forms("full"))
def test_paper_s_whitened_form_is_the_same_map(form: str, order: int, gamma: float) -> None:
    """With normalised keys and queries, whitening, power iteration, and gamma in every step."""
    inputs = one_head(50, rank=8) | {"coef": one_hot(order, gamma**order), "ridge": 1e-3}
    wanted, sigma = whitened_readout(*rows_of(inputs), ridge=1e-3, order=order, gamma=gamma)
    assert sigma <= 1
    y = ska(**inputs, relative_ridge=True, causal=False, backend=form)
    assert_close(y[0, :, 0], wanted, TIGHT)


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("form", ["naive", "chunk", "recurrent"])
def test_paper_s_chunk_causal_form_is_an_absolute_ridge(form: str, order: int) -> None:
    """The paper divides by the largest norm m of the whole sequence: a ridge of eps m^2."""
    size, eps = 8, 1e-3
    inputs = one_head(30, rank=6)
    q, k, v = rows_of(inputs)
    m = k.norm(dim=-1).max()
    answers = [
        whitened_readout(q[t : t + size], k[:t], v[:t], ridge=eps, order=order, scale=m)[0]
        for t in range(0, 30, size)
    ]
    inputs |= {"coef": one_hot(order), "ridge": float(eps * m**2)}
    y = ska(**inputs, causal="chunk", chunk_size=size, backend=form)
    assert_close(y[0, :, 0], torch.cat(answers), TIGHT)


@pytest.mark.parametrize("form", ["naive", "chunk", "recurrent"])
def test_relative_ridge_follows_the_largest_key_so_far(form: str) -> None:
    """Not the largest of the sequence, which a token may not know yet."""
    size, eps = 8, 1e-3
    inputs = one_head(30, rank=6) | {"coef": one_hot(1), "ridge": eps}
    inputs["k"] *= torch.linspace(0.5, 2.0, 30, dtype=torch.float64)[None, :, None, None]
    q, k, v = rows_of(inputs)
    answers = [torch.zeros(size, 5, dtype=torch.float64)]
    for t in range(size, 30, size):
        answers.append(whitened_readout(q[t : t + size], k[:t], v[:t], ridge=eps, order=1)[0])
    y = ska(**inputs, relative_ridge=True, causal="chunk", chunk_size=size, backend=form)
    assert_close(y[0, :, 0], torch.cat(answers), TIGHT)


@pytest.mark.parametrize("form", ["naive", "chunk", "recurrent"])
def test_a_ridge_relative_to_the_trace(form: str) -> None:
    """It is an absolute one of eps tr(G) / r for each chunk, and bounds the condition number."""
    size, eps, rank = 8, 0.03, 6
    inputs = one_head(30, rank=rank) | {"coef": one_hot(1)}
    inputs["k"] *= torch.linspace(0.5, 2.0, 30, dtype=torch.float64)[None, :, None, None]
    how: dict[str, Any] = {"causal": "chunk", "chunk_size": size, "backend": form}
    y = ska(**inputs | {"ridge": eps}, relative_ridge="trace", **how)
    for t in range(size, 30, size):
        G = inputs["k"][0, :t, 0].mT @ inputs["k"][0, :t, 0]
        lam = eps * float(G.trace()) / rank
        assert torch.linalg.cond(G + lam * torch.eye(rank, dtype=G.dtype), 2) <= 1 + rank / eps
        wanted = ska(**inputs | {"ridge": lam}, **how)
        assert_close(y[:, t : t + size], wanted[:, t : t + size], TIGHT)


@pytest.mark.parametrize("causal", ["exact", "chunk"])
def test_scaling_keys_queries_and_ridge_alike_changes_nothing(causal: Any) -> None:
    """Normalisation is a ridge: (G + lam I) / m^2 is the Gram matrix of the keys over m."""
    inputs = make_inputs(30)
    scaled = inputs | {"q": inputs["q"] / 4, "k": inputs["k"] / 4, "ridge": inputs["ridge"] / 16}
    y = ska(**inputs, causal=causal, chunk_size=8)
    assert_close(ska(**scaled, causal=causal, chunk_size=8), y, 1e-13)


def test_power_iteration_finds_the_largest_singular_value_from_below() -> None:
    a = torch.randn(6, 6, dtype=torch.float64)
    wanted = torch.linalg.svdvals(a).max()
    assert spectral_norm(a, 6) <= wanted * (1 + 1e-12)
    assert_close(spectral_norm(a, 500), wanted, 1e-9)
    assert spectral_norm(torch.zeros(3, 3), 6) == 0
