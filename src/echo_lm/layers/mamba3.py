"""Mamba-3: trapezoidal steps, a data-dependent rotation of B and C, and heads of rank R."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from echo_lm.layers.conv import ConvState, ShortConv
from echo_lm.layers.documents import Documents
from echo_lm.layers.mamba2 import check_call, init_dt_bias, split_heads
from echo_lm.layers.parameters import no_weight_decay
from echo_lm.ops.ssd import SSDState, ssd
from echo_lm.ops.state import TensorState

SLOWEST_DECAY = 1e-4
"""-A is never smaller."""


@dataclass
class Mamba3State(TensorState):
    """What a Mamba-3 layer remembers; without a convolution the window of `conv` is empty."""

    conv: ConvState
    ssd: SSDState


class Mamba3(nn.Module):
    """The layer of the Mamba-3 paper.

    There are `expand * dim / head_dim` heads; give `heads` or `head_dim` (64 if neither). Tokens
    choose step size dt, decay rate A, trapezoid weight and angles. The projection gives
    z, x, B, C, dt, A, trapezoid, angle in this order.

    `rank` above 1 makes it MIMO. `conv_kernel=4` and `gate=False` make it the variant of the Echo
    paper's appendix: a short convolution with SiLU on x, and no z.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int | None = None,
        head_dim: int | None = None,
        state_dim: int = 128,
        expand: float = 2,
        rank: int = 1,
        rope_fraction: float = 0.5,
        gate: bool = True,
        conv_kernel: int = 0,
        norm_eps: float = 1e-5,
        chunk_size: int = 64,
    ) -> None:
        super().__init__()
        if not 0 <= rope_fraction <= 1:
            raise ValueError(f"rope_fraction is {rope_fraction}, but it must be between 0 and 1.")
        if rank < 1 or state_dim < 1 or conv_kernel < 0:
            raise ValueError(
                f"rank is {rank}, state_dim {state_dim} and conv_kernel {conv_kernel}, "
                "but rank and state_dim must be at least 1 and conv_kernel at least 0."
            )
        self.dim = dim
        self.heads, self.head_dim = split_heads(dim, expand, heads, head_dim)
        self.state_dim = state_dim
        self.rank = rank
        self.angles = int(state_dim * rope_fraction) // 2
        self.gate = gate
        self.norm_eps = norm_eps
        self.chunk_size = chunk_size
        inner, keys = self.heads * self.head_dim, rank * state_dim
        self.in_widths = [inner if gate else 0, inner, keys, keys, *[self.heads] * 3, self.angles]
        self.in_proj = nn.Linear(dim, sum(self.in_widths), bias=False)
        self.conv = ShortConv(inner, conv_kernel) if conv_kernel else None
        self.dt_bias = nn.Parameter(torch.empty(self.heads))
        self.B_scale = nn.Parameter(torch.empty(state_dim))
        self.C_scale = nn.Parameter(torch.empty(state_dim))
        self.B_bias = nn.Parameter(torch.empty(self.heads, rank, state_dim))
        self.C_bias = nn.Parameter(torch.empty(self.heads, rank, state_dim))
        self.D = nn.Parameter(torch.empty(self.heads))
        no_weight_decay(self.dt_bias, self.B_scale, self.C_scale, self.B_bias, self.C_bias, self.D)
        self.mimo_x, self.mimo_z, self.mimo_o = (
            nn.Parameter(torch.empty(self.heads, rank, self.head_dim)) if wanted else None
            for wanted in (rank > 1, rank > 1 and gate, rank > 1)
        )
        self.out_proj = nn.Linear(inner, dim, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Step sizes in [1e-3, 0.1]; every rank starts with an equal share of x."""
        for layer in (self.in_proj, self.conv, self.out_proj):
            if layer is not None:
                layer.reset_parameters()
        init_dt_bias(self.dt_bias)
        for parameter in (self.B_scale, self.C_scale, self.B_bias, self.C_bias, self.D):
            parameter.fill_(1)
        for mix, share in (
            (self.mimo_x, 1 / self.rank),
            (self.mimo_z, 1),
            (self.mimo_o, 1 / self.rank),
        ):
            if mix is not None:
                mix.fill_(share)

    def init_state(self, batch: int) -> Mamba3State:
        """The state of a sequence that has not begun."""
        device = self.D.device
        dtype = torch.promote_types(self.D.dtype, torch.float32)
        shapes = SSDState.shapes(
            batch,
            self.heads,
            self.head_dim,
            self.state_dim,
            groups=self.heads,
            rank=self.rank,
            trapezoid=True,
            angles=self.angles,
        )
        width = 1 if self.conv is None else self.conv.kernel_size
        return Mamba3State(
            conv=ConvState.init(
                batch, self.heads * self.head_dim, width, device=device, dtype=dtype
            ),
            ssd=SSDState.zeros(shapes, device=device, dtype=dtype),
        )

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        state: Mamba3State | None = None,
        *,
        lengths: Int[Tensor, " b"] | None = None,
        documents: Documents | None = None,
        return_state: bool = True,
        in_place: bool = False,
    ) -> tuple[Float[Tensor, "b t d"], Mamba3State | None]:
        check_call(x, self.dim, state, Mamba3State)
        state = self.init_state(x.shape[0]) if state is None else state
        z, value, *choices = self.in_proj(x).split(self.in_widths, dim=-1)
        conv = state.conv
        if self.conv is not None:
            value, conv = self.conv(value, conv, lengths=lengths, documents=documents)
        values = self._to_ranks(value, self.mimo_x).to(value.dtype)
        y, scan = self._scan(values, choices, state.ssd, lengths, documents, in_place)
        if self.gate:
            y = y * F.silu(self._to_ranks(z, self.mimo_z))
        if self.mimo_o is not None:
            y = y * self.mimo_o
        out: Tensor = self.out_proj(y.sum(dim=3).flatten(2).to(value.dtype))
        return out, Mamba3State(conv, scan) if return_state else None

    def _scan(
        self,
        x: Float[Tensor, "b t h r p"],
        choices: list[Tensor],
        state: SSDState,
        lengths: Int[Tensor, " b"] | None,
        documents: Documents | None,
        in_place: bool,
    ) -> tuple[Float[Tensor, "b t h r p"], SSDState]:
        """The recurrence with the skip D x; `choices` is B, C, dt, A, trapezoid, angle."""
        wide = torch.promote_types(x.dtype, torch.float32)
        B, C, dt, rate, trapezoid, angle = (choice.to(wide) for choice in choices)
        dt = F.softplus(dt + self.dt_bias)
        angle = math.pi * angle.tanh().unsqueeze(2) * dt.unsqueeze(-1)
        y, state = ssd(
            x,
            self._to_keys(B, self.B_scale, self.B_bias),
            self._to_keys(C, self.C_scale, self.C_bias),
            log_decay=-dt * F.softplus(rate).clamp_min(SLOWEST_DECAY),
            gamma=dt * trapezoid.sigmoid(),
            beta=dt * (-trapezoid).sigmoid(),
            angle=angle if self.angles else None,
            state=state,
            return_state=True,
            lengths=lengths,
            starts=None if documents is None else documents.starts,
            in_place=in_place,
            chunk_size=self.chunk_size,
        )
        return y.to(wide) + self.D.to(wide)[:, None, None] * x, state

    def _to_ranks(
        self, v: Float[Tensor, "b t d"], mix: Float[Tensor, "h r p"] | None
    ) -> Float[Tensor, "b t h r p"]:
        """Heads, widened to fp32, each rank with weights of its own."""
        wide = torch.promote_types(v.dtype, torch.float32)
        v = v.unflatten(-1, (self.heads, 1, self.head_dim)).to(wide)
        return v if mix is None else v * mix

    def _to_keys(
        self, v: Float[Tensor, "b t w"], scale: Float[Tensor, " n"], bias: Float[Tensor, "h r n"]
    ) -> Float[Tensor, "b t h r n"]:
        """Normalise each rank over the state, then tell the heads apart by their bias."""
        v = v.unflatten(-1, (1, self.rank, self.state_dim))
        v = v * torch.rsqrt(v.square().mean(dim=-1, keepdim=True) + self.norm_eps)
        return v * scale + bias
