"""DeltaNet: the delta rule behind short convolutions, a baseline."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from echo_lm.layers.conv import ConvState, ShortConv
from echo_lm.layers.documents import Documents
from echo_lm.layers.mamba2 import check_call
from echo_lm.ops.delta import DeltaState, delta_rule
from echo_lm.ops.state import TensorState


@dataclass
class DeltaNetState(TensorState):
    """What a DeltaNet layer remembers."""

    conv: ConvState
    delta: DeltaState


class DeltaNet(nn.Module):
    """Keys and queries of length 1, and a share of correction that tokens choose.

    Values are `dim / heads` wide, keys `key_dim` (as wide if None). The projection gives q, k, v,
    beta in this order, the convolution covers q, k and v and ends in SiLU.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        key_dim: int | None = None,
        conv_kernel: int = 4,
        norm_eps: float = 1e-5,
        chunk_size: int = 64,
    ) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise ValueError(f"dim must be a multiple of heads, got dim={dim} and heads={heads}.")
        self.dim = dim
        self.heads, self.value_dim = heads, dim // heads
        self.key_dim = self.value_dim if key_dim is None else key_dim
        if self.key_dim < 1:
            raise ValueError(f"key_dim is {key_dim}, but it must be at least 1.")
        self.chunk_size = chunk_size
        self.widths = [heads * self.key_dim, heads * self.key_dim, dim]
        self.in_proj = nn.Linear(dim, sum(self.widths) + heads, bias=False)
        self.conv = ShortConv(sum(self.widths), conv_kernel, bias=False)
        self.norm = nn.RMSNorm(self.value_dim, eps=norm_eps)
        self.out_proj = nn.Linear(dim, dim, bias=False)

    def init_state(self, batch: int) -> DeltaNetState:
        """The state of a sequence that has not begun."""
        conv = self.conv.init_state(batch)
        like = conv.window
        sums = DeltaState.zeros(
            batch, self.heads, self.value_dim, self.key_dim, device=like.device, dtype=like.dtype
        )
        return DeltaNetState(conv, sums)

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        state: DeltaNetState | None = None,
        *,
        lengths: Int[Tensor, " b"] | None = None,
        documents: Documents | None = None,
        return_state: bool = True,
    ) -> tuple[Float[Tensor, "b t d"], DeltaNetState | None]:
        check_call(x, self.dim, state, DeltaNetState)
        state = self.init_state(x.shape[0]) if state is None else state
        mixed, beta = self.in_proj(x).split([sum(self.widths), self.heads], dim=-1)
        mixed, conv = self.conv(mixed, state.conv, lengths=lengths, documents=documents)
        wide = torch.promote_types(mixed.dtype, torch.float32)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).to(wide)
            for part in mixed.split(self.widths, dim=-1)
        )
        y, sums = delta_rule(
            F.normalize(q, dim=-1),
            F.normalize(k, dim=-1),
            v,
            beta.to(wide).sigmoid(),
            state=state.delta,
            return_state=True,
            lengths=lengths,
            starts=None if documents is None else documents.starts,
            chunk_size=self.chunk_size,
        )
        y = self.norm(y.to(self.norm.weight.dtype)).flatten(2)
        out: Tensor = self.out_proj(y.to(x.dtype))
        return out, DeltaNetState(conv, sums) if return_state else None
