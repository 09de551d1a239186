"""Attention over a cache that lies ready: a step of a model with a KV cache at its best."""

from __future__ import annotations

import os
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from echo_lm.bench.timing import on_gpu
from echo_lm.layers import Attention
from echo_lm.model.lm import Block, EchoLM

FREE = 0.9
"""The share of free memory that a cache may take."""


class AttentionWithRoom(Attention):
    """Attention at one length of a cache that lies ready: a step fills the last slot and looks at
    all.

    `layers.Attention` gives a new cache for every token, as any state of Echo is a value; to copy
    it would take longer than to read it.
    """

    keys: Float[Tensor, "b h slots p"]
    values: Float[Tensor, "b h slots p"]
    length: int

    @classmethod
    def of(cls, attention: Attention, batch: int, slots: int) -> Self:
        """The same weights over a cache of random keys and values."""
        weight = attention.k_proj.weight
        with torch.device(weight.device):
            layer = cls(attention.dim, heads=attention.heads, rope_theta=attention.rope_theta)
        layer.to(weight.dtype).load_state_dict(attention.state_dict())
        shape = batch, attention.heads, slots, attention.dim // attention.heads
        layer.keys, layer.values = (
            torch.randn(shape, device=weight.device, dtype=weight.dtype) for _ in range(2)
        )
        layer.length = slots
        return layer

    def forward(
        self, x: Float[Tensor, "b 1 d"], state: Any = None, **options: Any
    ) -> tuple[Float[Tensor, "b 1 d"], Any]:
        last = self.length - 1
        positions = torch.full_like(x[..., 0], last, dtype=torch.int64)
        q, k, v = self._project(x, positions)
        self.keys[:, :, last], self.values[:, :, last] = k[:, 0], v[:, 0]
        keys, values = (cache[:, :, : self.length] for cache in (self.keys, self.values))
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values)
        y: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(-2))
        return y, state


def give_room(model: EchoLM, batch: int, slots: int) -> list[AttentionWithRoom]:
    """Put caches under the attention layers of a model."""
    layers = []
    for block in model.blocks:
        mixers = cast(Block, block).mixers
        for i, mixer in enumerate(mixers):
            if isinstance(mixer, Attention):
                mixers[i] = layer = AttentionWithRoom.of(mixer, batch, slots)
                layers.append(layer)
    return layers


def cache_bytes(model: EchoLM, batch: int) -> int:
    """Of one token of every row: its keys and values."""
    attending = [mixer for mixer in model.mixers() if isinstance(mixer, Attention)]
    return sum(2 * batch * mixer.dim * mixer.k_proj.weight.itemsize for mixer in attending)


def free_bytes(device: torch.device) -> int:
    """On a GPU what is free, else half of what there is."""
    if on_gpu(device):
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
