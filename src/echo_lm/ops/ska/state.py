"""The memory of one SKA layer: sums over the tokens read, and what is derived from them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from echo_lm.ops.state import TensorState


@dataclass
class SKAState(TensorState):
    """Fixed-size memory of everything read so far.

    The sums are the memory. `inverse` and `readout` follow from them and are kept because they
    are dear to compute: `inverse` serves exact steps, `readout` the rest of a chunk that has
    begun in chunk mode (its sums already hold tokens which that chunk may not see).
    """

    gram: Float[Tensor, "b h r r"]
    """G = sum k_t k_t'"""
    lag: Float[Tensor, "b h r r"]
    """M = sum k_t k_{t-1}'"""
    value: Float[Tensor, "b h p r"]
    """C = sum v_t k_t'"""
    first_key: Float[Tensor, "b h r"]
    """Kept for the lag pair at the seam when states merge."""
    last_key: Float[Tensor, "b h r"]
    key_energy: Float[Tensor, "b h"]
    """m2 = max |k_t|^2, the scale of a relative ridge."""
    count: Int[Tensor, " b"]
    """Tokens read, those left out of the statistics by a mask included."""
    inverse: Float[Tensor, "b h r r"] | None = None
    """X = (G + ridge I)^-1"""
    inverse_ridge: Float[Tensor, "b h"] | None = None
    """The ridge `inverse` was made with; another one means it must be made again."""
    readout: Float[Tensor, "b h p r"] | None = None
    """W of the chunk that has begun."""
    chunk_size: int | None = None
    """The chunk size `readout` belongs to, or at which the sums have faded."""

    @classmethod
    def init(
        cls,
        batch: int,
        heads: int,
        rank: int,
        value_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> SKAState:
        """The state of someone who has read nothing."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(batch, *shape, device=device, dtype=dtype)

        return cls(
            gram=zeros(heads, rank, rank),
            lag=zeros(heads, rank, rank),
            value=zeros(heads, value_dim, rank),
            first_key=zeros(heads, rank),
            last_key=zeros(heads, rank),
            key_energy=zeros(heads),
            count=torch.zeros(batch, device=device, dtype=torch.int64),
        )

    @staticmethod
    def bytes_per_row(heads: int, rank: int, value_dim: int, causal: str | bool) -> int:
        """Bytes of one sequence's state after a call in `causal` mode, in fp32."""
        sums = 2 * rank**2 + value_dim * rank + 2 * rank + 1
        derived = {"exact": rank**2 + 1, "chunk": value_dim * rank}.get(str(causal), 0)
        return 4 * heads * (sums + derived) + 8

    def read(
        self,
        k: Float[Tensor, "b h r"],
        v: Float[Tensor, "b h p"],
        active: Bool[Tensor, " b"],
        *,
        in_place: bool = False,
    ) -> SKAState:
        """Add one token to the sums of the rows that have one; G, M and C may be written over.

        G += k_t k_t',  M += k_t k_{t-1}',  C += v_t k_t'.
        """
        here = active.view(-1, 1, 1)
        first = here & (self.count == 0).view(-1, 1, 1)
        k = torch.where(here, k, torch.zeros_like(k))
        return replace(
            self,
            gram=add_outer(self.gram, k, k, in_place=in_place),
            lag=add_outer(self.lag, k, self.last_key, in_place=in_place),
            value=add_outer(self.value, v, k, in_place=in_place),
            first_key=torch.where(first, k, self.first_key),
            last_key=torch.where(here, k, self.last_key),
            key_energy=self.key_energy.maximum(k.square().sum(-1)),
            count=self.count + active,
        )

    def fade(self, left: Float[Tensor, "b h"] | None) -> SKAState:
        """Keep this share of the sums: as if keys and values so far had been scaled by its root."""
        if left is None:
            return self
        of_matrix = left[..., None, None]
        return replace(
            self,
            gram=of_matrix * self.gram,
            lag=of_matrix * self.lag,
            value=of_matrix * self.value,
            last_key=left.sqrt()[..., None] * self.last_key,
            key_energy=left * self.key_energy,
        )

    def merge(self, later: SKAState, decay: Float[Tensor, " h"] | None = None) -> SKAState:
        """The state of reading what `self` read and then what `later` read.

        Both must have started from nothing. In chunk mode the tokens of both together must fill
        whole chunks, since sums cannot tell which of them a half-read chunk may see. Where sums
        fade, `decay` is that of the calls, and `self` too must end with a chunk.
        """
        if self.value.shape != later.value.shape or self.gram.shape != later.gram.shape:
            raise ValueError(
                f"Only states of equal shape merge; got gram {tuple(self.gram.shape)}, value "
                f"{tuple(self.value.shape)} and gram {tuple(later.gram.shape)}, value "
                f"{tuple(later.value.shape)}."
            )
        count = self.count + later.count
        self._check_whole_chunks(later, count)
        earlier, first_key, chunk_size = self, later.first_key, None
        if decay is not None:
            chunk_size = self._chunk_size_of_faded(later)
            chunks = later.count[:, None] // chunk_size
            earlier = self.fade(decay**chunks)
            first_key = (decay ** ((chunks - 1) / 2))[..., None] * first_key
        seam = outer(first_key, earlier.last_key)
        read_before, read_after = ((state.count > 0).view(-1, 1, 1) for state in (self, later))
        return replace(
            self,
            gram=earlier.gram + later.gram,
            lag=earlier.lag + later.lag + seam,
            value=earlier.value + later.value,
            first_key=torch.where(read_before, self.first_key, later.first_key),
            last_key=torch.where(read_after, later.last_key, self.last_key),
            key_energy=torch.maximum(earlier.key_energy, later.key_energy),
            count=count,
            inverse=None,
            inverse_ridge=None,
            readout=None,
            chunk_size=chunk_size,
        )

    def _chunk_size_of_faded(self, later: SKAState) -> int:
        """That of two states whose sums have faded, the first of them up to a chunk's end."""
        size = self.chunk_size or later.chunk_size
        if size is None:
            raise ValueError(
                "decay was given, but neither state has faded: neither was made with one; merge "
                "them without."
            )
        if bool((self.count % size).any()):
            raise ValueError(
                f"States whose sums fade merge only where a chunk of {size} ends; got counts "
                f"{self.count.tolist()} before the seam. Cut the sequence there."
            )
        return size

    def _check_whole_chunks(self, later: SKAState, count: Int[Tensor, " b"]) -> None:
        for size in (self.chunk_size, later.chunk_size):
            if size is not None and bool((count % size).any()):
                raise ValueError(
                    f"States of chunk mode merge only when their tokens together fill whole "
                    f"chunks of {size}; got counts {count.tolist()}. Cut the sequence so that "
                    f"they do, or merge states of exact mode."
                )


def outer(
    a: Float[Tensor, "*batch m"], b: Float[Tensor, "*batch n"]
) -> Float[Tensor, "*batch m n"]:
    return a.unsqueeze(-1) * b.unsqueeze(-2)


def add_outer(
    matrix: Float[Tensor, "*batch m n"],
    a: Float[Tensor, "*batch m"],
    b: Float[Tensor, "*batch n"],
    *,
    in_place: bool = False,
) -> Float[Tensor, "*batch m n"]:
    """matrix + a b'"""
    out = matrix if in_place else None
    return torch.addcmul(matrix, a.unsqueeze(-1), b.unsqueeze(-2), out=out)
