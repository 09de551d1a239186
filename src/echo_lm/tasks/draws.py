"""Random numbers that are a function of their place alone, the same on every device."""

from __future__ import annotations

from hashlib import blake2b
from math import prod

import torch
from jaxtyping import Float, Int
from torch import Tensor


def _signed(number: int) -> int:
    """The 64-bit integer with the same bits."""
    number %= 1 << 64
    return number - (1 << 64) if number >> 63 else number


GOLDEN = _signed(0x9E3779B97F4A7C15)
FIRST = _signed(0xBF58476D1CE4E5B9)
SECOND = _signed(0x94D049BB133111EB)


def mix(x: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    """SplitMix64's finaliser: a bijection of 64 bits after which neighbours are strangers."""
    x = x ^ _shift(x, 30)
    x = x.mul_(FIRST)
    x ^= _shift(x, 27)
    x = x.mul_(SECOND)
    x ^= _shift(x, 31)
    return x


def _shift(x: Int[Tensor, "*n"], places: int) -> Int[Tensor, "*n"]:
    """To the right, with zeros coming in: torch has signed integers only."""
    return (x >> places).bitwise_and_((1 << (64 - places)) - 1)


def keys(*name: object, numbers: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
    """One key for each numbered row of what is named, such as a seed and a step."""
    digest = blake2b(repr(name).encode(), digest_size=8).digest()
    return mix(GOLDEN * (numbers + 1) + int.from_bytes(digest, "big", signed=True))


class Draws:
    """Draws for the rows of a batch. A row's depend on its key alone, not on the other rows."""

    def __init__(self, keys: Int[Tensor, " b"]) -> None:
        self.keys = keys
        self.rows = len(keys)
        self.device = keys.device
        self._stream = 0

    def bits(self, *shape: int) -> Int[Tensor, "b ..."]:
        """64 random bits for each entry; every call draws anew."""
        self._stream += 1
        return self._bits(self._stream, 0, shape)

    def below(self, limit: int | Tensor, *shape: int) -> Int[Tensor, "b ..."]:
        """Uniform in 0 ... limit - 1, to within limit / 2^31."""
        return scale(self.bits(*shape), limit)

    def between(self, low: int, high: int, *shape: int) -> Int[Tensor, "b ..."]:
        """Uniform in low ... high."""
        return low + self.below(high - low + 1, *shape)

    def uniform(self, *shape: int) -> Float[Tensor, "b ..."]:
        """Uniform between 0 and 1, both excluded, in fp64."""
        return (_shift(self.bits(*shape), 11) + 0.5) * 2.0**-53

    def choose(self, among: int, count: int) -> Int[Tensor, "b count"]:
        """Different numbers below `among` in random order; all such lists are equally likely."""
        if not 0 <= count <= among:
            raise ValueError(f"Cannot choose {count} different ones among {among}.")
        if 4 * count > among:
            return self.bits(among).sort(dim=1, stable=True).indices[:, :count]
        # Few among many: draw again what is there already. The procedure treats all numbers alike,
        # hence so does the outcome.
        self._stream += 1
        picked = scale(self._bits(self._stream, 0, (count,)), among)
        attempt = 0
        while (again := _repeated(picked)).any():
            attempt += 1
            picked = torch.where(
                again, scale(self._bits(self._stream, attempt, (count,)), among), picked
            )
        return picked

    def _bits(self, stream: int, attempt: int, shape: tuple[int, ...]) -> Int[Tensor, "b ..."]:
        key = mix(self.keys + _signed((attempt << 32) + stream))
        place = torch.arange(prod(shape), device=self.device).mul_(GOLDEN)
        return mix(key[:, None] + place).view(self.rows, *shape)


def scale(bits: Int[Tensor, "*n"], limit: int | Tensor) -> Int[Tensor, "*n"]:
    """Uniform bits as uniform numbers below a limit."""
    return (_shift(bits, 33) * limit) >> 31


def _repeated(numbers: Int[Tensor, "b n"]) -> Int[Tensor, "b n"]:
    """True where a row holds the same number further left."""
    ordered, order = numbers.sort(dim=1, stable=True)
    repeats = torch.zeros_like(numbers, dtype=torch.bool)
    return repeats.scatter_(1, order[:, 1:], ordered[:, 1:] == ordered[:, :-1])
