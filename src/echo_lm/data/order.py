"""A random order that is nowhere written down: each place is computed from its number alone."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from echo_lm.tasks.draws import keys, mix

ROUNDS = 6


def shuffled(places: Int[Tensor, " b"], size: int, *name: object) -> Int[Tensor, " b"]:
    """Which of `size` things stands at each place of an endless row of epochs.

    Every epoch, `size` places in a row, holds each of them once, in an order of its own which is
    a function of the name, such as a seed, and of the epoch.
    """
    epochs = places // size
    rounds = (epochs[:, None] * ROUNDS + torch.arange(ROUNDS)).flatten()
    secrets = list(keys(*name, numbers=rounds).view(-1, ROUNDS).unbind(1))
    bits = max(1, (size - 1).bit_length())
    found = _feistel(places % size, bits, secrets)
    # A permutation of 2^bits; what falls outside walks on its cycle until it is inside again.
    while (outside := found >= size).any():
        found = torch.where(outside, _feistel(found, bits, secrets), found)
    return found


def _feistel(
    x: Int[Tensor, " b"], bits: int, secrets: list[Int[Tensor, " b"]]
) -> Int[Tensor, " b"]:
    """Each half of the bits is changed by a function of the other, which can be undone."""
    low = bits // 2
    low_mask, high_mask = (1 << low) - 1, (1 << (bits - low)) - 1
    for i, secret in enumerate(secrets):
        if i % 2:
            x = x ^ (mix((x >> low) + secret) & low_mask)
        else:
            x = x ^ ((mix((x & low_mask) + secret) & high_mask) << low)
    return x
