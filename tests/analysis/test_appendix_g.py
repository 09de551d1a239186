"""Appendix G: the two statements that are not settings, the MLP's width and the recurrence."""

from __future__ import annotations

import torch

from echo_lm import EchoConfig
from echo_lm.layers.swiglu import hidden_width
from echo_lm.ops.ssd import ssd

from .heads import assert_near


def test_swiglu_width_is_8_thirds_rounded_up_to_64() -> None:
    assert hidden_width(96) == 256
    for name in ("mamba3-tool", "mamba3-cot"):
        assert hidden_width(EchoConfig.preset(name).dim) == 256


def test_recurrence_by_the_chunked_scan() -> None:
    """H_t = alpha_t H_(t-1) + beta_t U_(t-1) + gamma_t U_t in chunks of 64, over 2 1/2 of them."""
    tokens, width, size = 160, 3, 4
    x, B, C = (torch.randn(tokens, n, dtype=torch.float64) for n in (width, size, size))
    alpha, beta, gamma = torch.rand(3, tokens, dtype=torch.float64)
    H, before, answers = x.new_zeros(width, size), x.new_zeros(width, size), []
    for t in range(tokens):
        U = torch.outer(x[t], B[t])
        H = alpha[t] * H + beta[t] * before + gamma[t] * U
        answers.append(H @ C[t])
        before = U
    # Ours has alpha_t in front of beta_t as well.
    scalars = {"log_decay": alpha.log(), "gamma": gamma, "beta": beta / alpha}
    y = ssd(
        *(z[None, :, None] for z in (x, B, C)),
        **{name: z[None, :, None] for name, z in scalars.items()},
        chunk_size=64,
        backend="chunk",
    )
    assert_near(y[0, :, 0], torch.stack(answers), 1e-11 * float(torch.stack(answers).abs().max()))
