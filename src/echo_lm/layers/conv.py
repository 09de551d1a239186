"""Causal depth-wise short convolution, as in front of state-space scans."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from echo_lm.layers.documents import Documents
from echo_lm.layers.parameters import no_weight_decay
from echo_lm.ops.checks import require_finite
from echo_lm.ops.ssd.checks import check_lengths
from echo_lm.ops.state import TensorState


@dataclass
class ConvState(TensorState):
    """The inputs that later outputs still need: the last `kernel - 1`, oldest first."""

    window: Float[Tensor, "b w d"]

    @classmethod
    def init(
        cls,
        batch: int,
        channels: int,
        kernel_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> ConvState:
        """The state of someone who has read nothing, which is like having read zeros."""
        return cls(torch.zeros(batch, kernel_size - 1, channels, device=device, dtype=dtype))


class ShortConv(nn.Module):
    """y_t = sum_j weight_j x_{t-kernel+1+j} + bias for each channel by itself, SiLU if asked for.

    A sum of shifted products in fp32 rather than a library convolution: nothing but its window can
    reach an output, a step costs little, and on a CPU it is the faster one.
    """

    def __init__(
        self, channels: int, kernel_size: int = 4, *, bias: bool = True, silu: bool = True
    ) -> None:
        super().__init__()
        if channels < 1 or kernel_size < 1:
            raise ValueError(
                f"channels is {channels} and kernel_size is {kernel_size}, "
                "but both must be at least 1."
            )
        self.channels = channels
        self.kernel_size = kernel_size
        self.silu = silu
        self.weight = nn.Parameter(torch.empty(channels, kernel_size))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        no_weight_decay(self.bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within 1 / sqrt(kernel), as torch's own convolutions."""
        bound = self.kernel_size**-0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def init_state(self, batch: int) -> ConvState:
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        device = self.weight.device
        return ConvState.init(batch, self.channels, self.kernel_size, device=device, dtype=dtype)

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        state: ConvState | None = None,
        *,
        lengths: Int[Tensor, " b"] | None = None,
        documents: Documents | None = None,
    ) -> tuple[Float[Tensor, "b t d"], ConvState]:
        self._check(x, state, lengths)
        state = self.init_state(x.shape[0]) if state is None else state
        history, state = remember(state, x, lengths, documents)
        return self._convolve(history, x.shape[1], documents).to(x.dtype), state

    def _convolve(
        self, history: Float[Tensor, "b w d"], tokens: int, documents: Documents | None
    ) -> Float[Tensor, "b t d"]:
        weight = self.weight.to(history.dtype)
        y = torch.zeros_like(weight[:, 0]) if self.bias is None else self.bias.to(history.dtype)
        for j in range(self.kernel_size):
            tap, back = history[:, j : j + tokens], self.kernel_size - 1 - j
            if documents is not None and back:
                tap = _where(documents.reach(back), tap)
            y = torch.addcmul(y, tap, weight[:, j])
        return F.silu(y) if self.silu else y

    def _check(self, x: Tensor, state: ConvState | None, lengths: Tensor | None) -> None:
        if x.dim() != 3 or x.shape[1] == 0 or x.shape[2] != self.channels:
            raise ValueError(
                f"x has shape {tuple(x.shape)}, but the convolution takes "
                f"[batch, time, {self.channels}] with at least one token."
            )
        check_lengths(lengths, x)
        needed = (x.shape[0], self.kernel_size - 1, self.channels)
        if state is not None and state.window.shape != needed:
            raise ValueError(
                f"state has a window of shape {tuple(state.window.shape)}, but this call continues "
                f"one of {needed}: pass a state of this layer, or None to begin anew."
            )
        require_finite(x=x)


def remember(
    state: ConvState,
    x: Float[Tensor, "b t d"],
    lengths: Int[Tensor, " b"] | None,
    documents: Documents | None = None,
) -> tuple[Float[Tensor, "b w d"], ConvState]:
    """The window with what comes after it, at least in fp32, and the last of each row's inputs.

    A row's real ones end `lengths` after the old window. Of another document than the last one
    nothing is kept.
    """
    width = state.window.shape[1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    history = torch.cat([state.window.to(dtype), x.to(dtype)], dim=1)
    if lengths is None:
        window = history[:, history.shape[1] - width :].clone()
    else:
        rows = torch.arange(len(history), device=history.device).unsqueeze(1)
        places = lengths.unsqueeze(1) + torch.arange(width, device=history.device)
        window = history[rows, places]
    if documents is not None:
        window = _where(documents.reach_of_end(width), window)
    return history, ConvState(window)


def _where(keep: Bool[Tensor, "b t"], x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
    return torch.where(keep.unsqueeze(-1), x, 0)
