"""Appendix E, statement by statement: keys divided by the largest of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.testing import assert_close

from echo_lm.analysis.normalisation import largest_norm, sequence_max
from echo_lm.analysis.operator import conditioning, sums, whitened_operator

from .draws import EPS, KINDS, Tokens, draw_keys, tokens


def sizes(keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """lambda_max, Frobenius norm and trace of G, which never fall in this order."""
    gram = keys.mT @ keys
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    return torch.linalg.eigvalsh(gram)[..., -1], gram.norm(dim=(-2, -1)), trace


@given(case=tokens(max_count=60))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_proposition_e1_bounds_the_gram_by_the_number_of_tokens(case: Tokens) -> None:
    k = sequence_max(case.keys)
    rounded = 1 + 64 * EPS
    assert k.norm(dim=-1).max() <= rounded
    largest, frobenius, trace = sizes(k)
    assert largest <= frobenius * rounded
    assert frobenius <= trace * rounded
    assert trace <= len(k) * rounded


@given(case=tokens(max_count=60))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_proposition_e1_bounds_the_condition_number_too(case: Tokens) -> None:
    """By 1 + T / eps: with the paper's 1e-3, 1.3e8 at 131,072 tokens, too much for fp32."""
    k = sequence_max(case.keys)
    condition = conditioning(k.mT @ k, 1e-3).condition
    assert condition <= (1 + len(k) / 1e-3) * (1 + 64 * EPS * len(k) / 1e-3)


def test_proposition_e1_is_attained_by_one_key_repeated() -> None:
    k = sequence_max(draw_keys("constant", 50, 4))
    for size in sizes(k):
        assert_close(size.item(), 50.0)
    assert_close(conditioning(k.mT @ k, 1e-3).condition.item(), 1 + 50 / 1e-3, rtol=1e-9, atol=0)


def test_proposition_e1_trace_is_attained_by_any_keys_of_one_length() -> None:
    k = torch.nn.functional.normalize(draw_keys("normal", 50, 4), dim=-1)
    largest, frobenius, trace = sizes(sequence_max(7 * k))
    assert_close(trace.item(), 50.0)
    assert largest < frobenius < 40


@pytest.mark.parametrize("size", [0.0, 1e-300, 1e-9, 1e-3, 1e150])
def test_proposition_e1_for_keys_that_are_zero_or_nearly(size: float) -> None:
    """Below 1e-6 nothing is left to divide by, and keys stay shorter than 1."""
    k = torch.tensor([[size, 0.0], [0.0, size / 2]], dtype=torch.float64)
    assert_close(largest_norm(k).item(), max(size, 1e-6))
    assert_close(sequence_max(k)[0, 0].item(), min(size / 1e-6, 1.0))


def test_proposition_e1_fails_for_a_maximum_that_is_frozen() -> None:
    """As the paper decodes: a louder key that comes after the prompt is longer than 1."""
    prompt, later = draw_keys("normal", 10, 4), 30 * draw_keys("normal", 1, 4, seed=1)
    frozen = torch.cat([prompt, later]) / largest_norm(prompt)
    assert frozen.norm(dim=-1).max() > 1
    assert sizes(frozen)[0] > len(frozen)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"zero"}))
def test_sequence_maximum_is_a_ridge(kind: str) -> None:
    """Keys over m with eps give the operator of raw keys with eps m^2, a batch of heads at once."""
    k = draw_keys(kind, 20, 4, batch=(2, 3))
    ridge = 1e-3 * largest_norm(k) ** 2
    k_hat = sequence_max(k)
    got = whitened_operator(*sums(k_hat, k_hat)[:2], 1e-3)
    assert_close(got, whitened_operator(*sums(k, k)[:2], ridge), rtol=0, atol=64 * EPS * 20 / 1e-3)


def test_remark_5_relative_norms_are_kept() -> None:
    """Where dividing each key by its own norm makes a whisper as loud as a fact."""
    k = torch.tensor([[2.0, 0.0], [0.0, 0.02]], dtype=torch.float64)
    whole, each = sequence_max(k), torch.nn.functional.normalize(k, dim=-1)
    assert_close(whole.norm(dim=-1), torch.tensor([1.0, 0.01], dtype=k.dtype))
    assert_close(each.norm(dim=-1), torch.ones(2, dtype=k.dtype))


def test_remark_5_but_faint_keys_are_amplified_and_many_outweigh_a_fact() -> None:
    """In a sequence of faint keys all grow, and what dominates the Gram matrix is what is frequent.

    One fact beside 101 distractors of a tenth of its length, in another direction.
    """
    faint = torch.tensor([[0.1, 0.0], [0.0, 0.01]], dtype=torch.float64)
    assert_close(sequence_max(faint)[1, 1].item(), 0.1)
    fact, distractor = torch.eye(2, dtype=torch.float64)
    k = sequence_max(torch.stack([fact] + 101 * [0.1 * distractor]))
    assert k[0].norm() == 1
    energy = (k.mT @ k).diagonal()
    assert energy[1] > energy[0]
