"""What the SKA layers of a model hold after reading, and what they make of a query."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from echo_lm.analysis.filtering import filter_gain, order_shares
from echo_lm.analysis.gradients import effective_rank
from echo_lm.analysis.operator import Sums, conditioning, whitened_operator
from echo_lm.analysis.perturbation import norm
from echo_lm.analysis.ridge import readout
from echo_lm.layers import SpectralKoopmanAttention
from echo_lm.layers.ska import LayerState, memory_of
from echo_lm.model.lm import EchoLM
from echo_lm.model.state import EchoState
from echo_lm.ops import SKAState
from echo_lm.ops.ska.problem import SMALLEST_KEY_ENERGY, relative_scale

LONGEST_PIECE = 1024
"""Tokens read at once, so that a long text takes no more memory than a short one."""


@dataclass(frozen=True)
class LayerReading:
    """One SKA layer over some sequences (b): what each head (h) holds after `counts` tokens (n)."""

    block: int
    """The block it is in, counted from 0."""
    layer: SpectralKoopmanAttention
    counts: tuple[int, ...]
    ridge: Float[Tensor, "b h n"]
    """lam, as it is added to the Gram matrix."""
    smallest: Float[Tensor, "b h n"]
    """lambda_min(G + lam I)"""
    condition: Float[Tensor, "b h n"]
    """lambda_max / lambda_min"""
    jacobian_rank: Float[Tensor, "b h n"]
    """Effective rank of a head's answers as a function of the query, at most min(r, P)."""
    eigenvalues: Complex[Tensor, "b h r"]
    """Of A_w, at the end."""
    operator_norm: Float[Tensor, "b h"]
    """sigma_max(A_w) at the end, never above 1."""
    key_norms: Float[Tensor, "b t h"]
    """|k_t|, as the memory takes it."""

    @property
    def coefficients(self) -> Float[Tensor, "h order"]:
        """c_j of each head."""
        return wide(self.layer.coefficients)

    @property
    def shares(self) -> Float[Tensor, "h order"]:
        """Which orders each head uses."""
        return order_shares(self.coefficients)

    @property
    def gain(self) -> Float[Tensor, " h"]:
        """What |sum_j c_j A_w^j| cannot exceed."""
        return filter_gain(self.coefficients)

    @property
    def silent(self) -> bool:
        """Nothing of its answers reaches the stream, as at the start of training."""
        return not bool(self.layer.out_proj.weight.any())

    @property
    def unread(self) -> bool:
        """No query has seen what was read: it does not fill a chunk."""
        return self.layer.causal == "chunk" and self.counts[-1] < self.layer.chunk_size


@torch.no_grad()
def read_layers(
    model: EchoLM, tokens: Int[Tensor, "b t"], points: int = 24
) -> tuple[LayerReading, ...]:
    """Read the tokens and look at every SKA layer on the way, at up to `points` places.

    These are evenly spaced in the logarithm. In chunk mode they are chunk ends, since a query sees
    nothing between; with causal=False there is only the end. A model in fp64 shows its own
    numbers, one in fp32 also their rounding.
    """
    layers = ska_layers(model)
    if not layers:
        raise ValueError("The model has no SKA layer, so that there is nothing to look at.")
    if points < 1:
        raise ValueError(f"points must be at least 1, got {points}.")
    counts = places(tokens.shape[1], layers, points)
    looks: list[list[dict[str, Tensor]]] = [[] for _ in layers]
    was_training = model.training
    with listening(layers) as heard:
        for state in states_after(model.eval(), tokens, counts):
            memories = [memory_of(cast(LayerState, state.layers[place])) for place, _, _ in layers]
            for look, (_, block, layer), memory in zip(looks, layers, memories, strict=True):
                look.append(look_at(block, layer, memory))
    model.train(was_training)
    return tuple(
        LayerReading(
            block=block,
            layer=layer,
            counts=counts,
            **{
                name: torch.stack([one[name] for one in look], -1)
                for name in ("ridge", "smallest", "condition", "jacobian_rank")
            },
            eigenvalues=look[-1]["eigenvalues"],
            operator_norm=look[-1]["operator_norm"],
            key_norms=torch.cat(norms, 1),
        )
        for (_, block, layer), look, norms in zip(layers, looks, heard, strict=True)
    )


Placed = tuple[int, int, SpectralKoopmanAttention]
"""Where a layer's state is in an `EchoState`, the block it is in, and the layer."""


def ska_layers(model: EchoLM) -> list[Placed]:
    blocks: Sequence[Any] = list(model.blocks)
    of_blocks = [i for i, block in enumerate(blocks) for _ in block.mixers]
    return [
        (place, block, mixer)
        for place, (block, mixer) in enumerate(zip(of_blocks, model.mixers(), strict=True))
        if isinstance(mixer, SpectralKoopmanAttention)
    ]


def places(tokens: int, layers: Sequence[Placed], points: int) -> tuple[int, ...]:
    """The numbers of tokens after which to look."""
    _, _, layer = layers[0]
    if layer.causal is False:
        return (tokens,)
    step = layer.chunk_size if layer.causal == "chunk" else 1
    last = tokens // step
    if last == 0:
        return (tokens,)
    spaced = torch.logspace(0, torch.tensor(float(last)).log10().item(), points)
    return tuple(step * n for n in sorted({1, *spaced.round().long().tolist(), last}))


def states_after(
    model: EchoLM, tokens: Int[Tensor, "b t"], counts: Sequence[int]
) -> Iterator[EchoState]:
    """What the model remembers after each number of tokens. The rest is read too."""
    state: EchoState | None = None
    for start, end in pairwise(sorted({0, *counts, tokens.shape[1]})):
        # With causal=False there is one count only, which must be read in one go.
        size = LONGEST_PIECE if len(counts) > 1 else end
        for piece in tokens[:, start:end].split(size, dim=1):
            state = model(piece, state=state, return_state=True, logits_to_keep=0).state
        if end in counts:
            assert state is not None
            yield state


@contextmanager
def listening(layers: Sequence[Placed]) -> Iterator[list[list[Float[Tensor, "b t h"]]]]:
    """Collects the norms of all keys that the layers take in."""
    heard: list[list[Tensor]] = [[] for _ in layers]

    def listen(
        norms: list[Tensor], layer: SpectralKoopmanAttention, given: tuple[Any, ...]
    ) -> None:
        _, keys, _, _ = layer.project(*given)
        norms.append(wide(keys).norm(dim=-1))

    hooks = [
        layer.register_forward_pre_hook(partial(listen, norms))
        for norms, (_, _, layer) in zip(heard, layers, strict=True)
    ]
    try:
        yield heard
    finally:
        for hook in hooks:
            hook.remove()


def look_at(
    block: int, layer: SpectralKoopmanAttention, memory: SKAState
) -> dict[str, Float[Tensor, "b h ..."]]:
    """Everything that follows from the sums of a layer."""
    known = Sums(wide(memory.gram), wide(memory.lag), wide(memory.value))
    if not all(bool(x.isfinite().all()) for x in known):
        raise ValueError(
            f"The memory of block {block} is not finite: the weights of the checkpoint are broken."
        )
    ridge = ridge_of(layer, memory)
    operator = whitened_operator(known.gram, known.lag, ridge)
    found = conditioning(known.gram, ridge)
    return {
        "ridge": ridge,
        "smallest": found.smallest,
        "condition": found.condition,
        "jacobian_rank": effective_rank(readout(known, wide(layer.coefficients), ridge)),
        "eigenvalues": torch.linalg.eigvals(operator),
        "operator_norm": norm(operator),
    }


def ridge_of(layer: SpectralKoopmanAttention, memory: SKAState) -> Float[Tensor, "b h"]:
    """What is added to the Gram matrix of each head."""
    ridge = torch.as_tensor(layer.ridge, dtype=torch.float64)
    if not layer.relative_ridge:
        return wide(ridge).expand(memory.key_energy.shape)
    scale = relative_scale(layer.relative_ridge, wide(memory.gram), wide(memory.key_energy))
    return ridge * scale.clamp_min(SMALLEST_KEY_ENERGY)


def wide(x: Tensor) -> Tensor:
    """In fp64, on the CPU: small matrices, whose eigenvalues want every digit."""
    return x.detach().double().cpu()
