"""The whitened operator is the one the paper's pipeline iterates."""

from __future__ import annotations

import torch
from torch.testing import assert_close

from echo_lm.analysis.operator import regularised, whitened_operator


def test_whitened_operator_is_the_operator_in_whitened_coordinates() -> None:
    k = torch.randn(2, 40, 6, dtype=torch.float64)
    gram, lag = k.mT @ k, k[:, 1:].mT @ k[:, :-1]
    ridge = torch.tensor([0.1, 2.0], dtype=torch.float64)
    full = regularised(gram, ridge)
    L = torch.linalg.cholesky(full)
    A = whitened_operator(gram, lag, ridge)
    assert_close(L @ A @ torch.linalg.inv(L), lag @ torch.linalg.inv(full))
    assert bool((torch.linalg.matrix_norm(A, 2) <= 1).all())
