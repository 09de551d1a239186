"""Mamba-2: gated state-space scan behind a short convolution."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from echo_lm.layers.conv import ConvState, ShortConv
from echo_lm.layers.documents import Documents
from echo_lm.layers.parameters import no_weight_decay
from echo_lm.ops.checks import require_finite
from echo_lm.ops.ssd import SSDState, ssd
from echo_lm.ops.state import TensorState


@dataclass
class Mamba2State(TensorState):
    """What a Mamba-2 layer remembers."""

    conv: ConvState
    ssd: SSDState


class Mamba2(nn.Module):
    """Every head decays at its own rate A, faster or slower by a step size dt that tokens choose.

    There are `expand * dim / head_dim` heads; give `heads` or `head_dim` (64 if neither). The
    projection gives z, x, B, C, dt in this order, the convolution covers x, B and C.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int | None = None,
        head_dim: int | None = None,
        state_dim: int = 64,
        expand: float = 2,
        groups: int = 1,
        conv_kernel: int = 4,
        conv_bias: bool = True,
        bias: bool = False,
        norm_eps: float = 1e-5,
        chunk_size: int = 64,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.heads, self.head_dim = split_heads(dim, expand, heads, head_dim)
        if groups < 1 or self.heads % groups:
            raise ValueError(
                f"groups is {groups}, but the {self.heads} heads must divide into groups evenly."
            )
        if state_dim < 1:
            raise ValueError(f"state_dim is {state_dim}, but it must be at least 1.")
        self.state_dim = state_dim
        self.groups = groups
        self.chunk_size = chunk_size
        inner = self.heads * self.head_dim
        self.in_widths = [inner, inner + 2 * groups * state_dim, self.heads]
        self.in_proj = nn.Linear(dim, sum(self.in_widths), bias=bias)
        self.conv = ShortConv(self.in_widths[1], conv_kernel, bias=conv_bias)
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.D = nn.Parameter(torch.empty(self.heads))
        self.dt_bias = nn.Parameter(torch.empty(self.heads))
        self.norm = GatedRMSNorm(inner, groups, eps=norm_eps)
        self.out_proj = nn.Linear(inner, dim, bias=bias)
        no_weight_decay(self.A_log, self.D, self.dt_bias, self.in_proj.bias, self.out_proj.bias)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Decay rates -A in [1, 16], step sizes in [1e-3, 0.1]."""
        for layer in (self.in_proj, self.conv, self.norm, self.out_proj):
            layer.reset_parameters()
        self.A_log.uniform_(1, 16).log_()
        self.D.fill_(1)
        init_dt_bias(self.dt_bias)

    def init_state(self, batch: int) -> Mamba2State:
        """The state of a sequence that has not begun."""
        conv = self.conv.init_state(batch)
        shapes = SSDState.shapes(batch, self.heads, self.head_dim, self.state_dim)
        like = conv.window
        return Mamba2State(conv, SSDState.zeros(shapes, device=like.device, dtype=like.dtype))

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        state: Mamba2State | None = None,
        *,
        lengths: Int[Tensor, " b"] | None = None,
        documents: Documents | None = None,
        return_state: bool = True,
        in_place: bool = False,
    ) -> tuple[Float[Tensor, "b t d"], Mamba2State | None]:
        check_call(x, self.dim, state, Mamba2State)
        state = self.init_state(x.shape[0]) if state is None else state
        z, mixed, dt = self.in_proj(x).split(self.in_widths, dim=-1)
        mixed, conv = self.conv(mixed, state.conv, lengths=lengths, documents=documents)
        y, scan = self._scan(mixed, dt, state.ssd, lengths, documents, in_place)
        out: Tensor = self.out_proj(self.norm(y.flatten(2), z))
        return out, Mamba2State(conv, scan) if return_state else None

    def _scan(
        self,
        mixed: Float[Tensor, "b t w"],
        dt: Float[Tensor, "b t h"],
        state: SSDState,
        lengths: Int[Tensor, " b"] | None,
        documents: Documents | None,
        in_place: bool,
    ) -> tuple[Float[Tensor, "b t h p"], SSDState]:
        wide = torch.promote_types(dt.dtype, torch.float32)
        keys = self.groups * self.state_dim
        x, B, C = mixed.split([mixed.shape[-1] - 2 * keys, keys, keys], dim=-1)
        x = x.unflatten(-1, (self.heads, self.head_dim))
        B, C = (v.unflatten(-1, (self.groups, self.state_dim)) for v in (B, C))
        dt = F.softplus(dt.to(wide) + self.dt_bias)
        y, state = ssd(
            x,
            B,
            C,
            log_decay=-dt * self.A_log.to(wide).exp(),
            gamma=dt,
            state=state,
            return_state=True,
            lengths=lengths,
            starts=None if documents is None else documents.starts,
            in_place=in_place,
            chunk_size=self.chunk_size,
        )
        return y.to(wide) + self.D.to(wide).unsqueeze(-1) * x, state


class GatedRMSNorm(nn.Module):
    """RMSNorm of y * silu(z), each group of channels by itself."""

    def __init__(self, channels: int, groups: int = 1, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.groups = groups
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(channels))
        no_weight_decay(self.weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, y: Float[Tensor, "b t d"], z: Float[Tensor, "b t d"]) -> Tensor:
        """In the precision of y; the answer has the dtype of z."""
        y = (y * F.silu(z.to(y.dtype))).unflatten(-1, (self.groups, -1))
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y.flatten(-2) * self.weight).to(z.dtype)


def split_heads(
    dim: int, expand: float, heads: int | None, head_dim: int | None
) -> tuple[int, int]:
    """Number and width of the heads that share expand * dim channels."""
    inner = round(expand * dim)
    if heads is None:
        head_dim = 64 if head_dim is None else head_dim
        heads = inner // max(head_dim, 1)
    elif head_dim is None:
        head_dim = inner // max(heads, 1)
    if heads < 1 or head_dim < 1 or heads * head_dim != inner:
        raise ValueError(
            f"heads is {heads} and head_dim is {head_dim}, but together they must cover the "
            f"{inner} inner channels of dim {dim} expanded {expand} times."
        )
    return heads, head_dim


def init_dt_bias(bias: Tensor, low: float = 1e-3, high: float = 0.1, floor: float = 1e-4) -> None:
    """Such that softplus(bias) is log-uniform between `low` and `high`."""
    dt = torch.empty_like(bias).uniform_(math.log(low), math.log(high)).exp_().clamp_min_(floor)
    bias.copy_(dt + torch.log(-torch.expm1(-dt)))


def check_call(x: Tensor, dim: int, state: TensorState | None, kind: type[TensorState]) -> None:
    """Refuse an input of another width, one without tokens, and the state of another layer."""
    if x.dim() != 3 or x.shape[1] == 0 or x.shape[2] != dim:
        raise ValueError(
            f"x has shape {tuple(x.shape)}, but the layer takes [batch, time, {dim}] "
            "with at least one token."
        )
    if state is not None and not isinstance(state, kind):
        raise ValueError(
            f"state is a {type(state).__name__}, but this layer continues a {kind.__name__}."
        )
    require_finite(x=x)
