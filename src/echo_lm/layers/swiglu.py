"""The gated feed-forward layer most language models use, and the width such layers share."""

from __future__ import annotations

from fractions import Fraction

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH_MULTIPLE = 64


def hidden_width(dim: int, expansion: float = 8 / 3) -> int:
    """`dim * expansion` rounded up to a multiple of 64, in integers: 768 * 8/3 is exactly 2048."""
    if dim < 1:
        raise ValueError(f"dim is {dim}, but a layer's width must be at least 1.")
    if not expansion > 0:
        raise ValueError(f"expansion is {expansion}, but it must be positive, for example 8/3.")
    # The simplest fraction nearby, so that 2.6666666666666665 and 2.667 are the 8/3 they stand for.
    ratio = Fraction(expansion).limit_denominator(100)
    return -(-dim * ratio.numerator // (ratio.denominator * WIDTH_MULTIPLE)) * WIDTH_MULTIPLE


class SwiGLU(nn.Module):
    """`W_down (SiLU(W_gate x) * W_up x)`, without bias, norm or residual."""

    def __init__(self, dim: int, *, hidden: int | None = None, expansion: float = 8 / 3) -> None:
        super().__init__()
        self.hidden = hidden_width(dim, expansion) if hidden is None else hidden
        if self.hidden < 1:
            raise ValueError(f"hidden is {hidden}, but a layer's width must be at least 1.")
        self.gate_proj = nn.Linear(dim, self.hidden, bias=False)
        self.up_proj = nn.Linear(dim, self.hidden, bias=False)
        self.out_proj = nn.Linear(self.hidden, dim, bias=False)

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        y: Tensor = self.out_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y
