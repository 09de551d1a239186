"""The Spectral Koopman MLP: lift, rotate and contract each pair, read out."""

from __future__ import annotations

import math

import torch
from jaxtyping import Complex, Float
from torch import Tensor, nn
from torch.nn import functional as F

from echo_lm.layers.parameters import no_weight_decay
from echo_lm.layers.swiglu import hidden_width


class SpectralKoopmanMLP(nn.Module):
    """`W_readout R SiLU(W_lift h)`: one step of a linear system on the lifted features.

    R is block-diagonal; block i, `[[gamma, omega], [-omega, gamma]]`, turns and shrinks the pair
    (2i, 2i+1) by the eigenvalue `gamma + i omega`, whose modulus is at most 1. The gated variant
    multiplies by `sigmoid(W_gate h)` before the readout. Two matrices (gated: three) where SwiGLU
    has three; no bias, norm or residual.

    Eigenvalues start with moduli uniform in [0.9, 1], where pairs keep nearly all their energy but
    the clamp is not yet active, and with phases uniform over the circle.
    """

    def __init__(
        self,
        dim: int,
        *,
        hidden: int | None = None,
        expansion: float = 8 / 3,
        gated: bool = False,
    ) -> None:
        super().__init__()
        self.hidden = hidden_width(dim, expansion) if hidden is None else hidden
        if self.hidden < 2 or self.hidden % 2:
            raise ValueError(f"hidden is {hidden}, but it must be even: the features go in pairs.")
        self.lift_proj = nn.Linear(dim, self.hidden, bias=False)
        self.gate_proj = nn.Linear(dim, self.hidden, bias=False) if gated else None
        self.out_proj = nn.Linear(self.hidden, dim, bias=False)
        self.gamma = nn.Parameter(torch.empty(self.hidden // 2))
        self.omega = nn.Parameter(torch.empty(self.hidden // 2))
        no_weight_decay(self.gamma, self.omega)
        self.reset_spectrum()

    @torch.no_grad()
    def reset_spectrum(self) -> None:
        """Draw the eigenvalues anew."""
        modulus = torch.empty_like(self.gamma).uniform_(0.9, 1.0)
        phase = torch.empty_like(self.gamma).uniform_(-math.pi, math.pi)
        self.gamma.copy_(modulus * phase.cos())
        self.omega.copy_(modulus * phase.sin())

    def eigenvalues(self) -> Complex[Tensor, " pairs"]:
        """The eigenvalues in use, inside the closed unit disk."""
        return torch.complex(*self._clamped())

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        z = self._rotate(F.silu(self.lift_proj(x)))
        if self.gate_proj is not None:
            z = z * torch.sigmoid(self.gate_proj(x))
        y: Tensor = self.out_proj(z)
        return y

    def _rotate(self, g: Float[Tensor, "*b k"]) -> Float[Tensor, "*b k"]:
        first, second = torch.unflatten(g, -1, (-1, 2)).unbind(-1)
        gamma, omega = self._clamped()
        pairs = torch.stack((gamma * first + omega * second, gamma * second - omega * first), -1)
        return pairs.flatten(-2).to(g.dtype)

    def _clamped(self) -> tuple[Float[Tensor, " pairs"], Float[Tensor, " pairs"]]:
        # At least fp32: rounding to bf16 would push moduli back over 1.
        dtype = torch.promote_types(self.gamma.dtype, torch.float32)
        gamma, omega = self.gamma.to(dtype), self.omega.to(dtype)
        # lambda / max(1, |lambda|) through the square: no root whose slope is infinite at zero.
        shrink = (gamma.square() + omega.square()).clamp(min=1).rsqrt()
        return gamma * shrink, omega * shrink
