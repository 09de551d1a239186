"""An `EchoState` as transformers hands it around."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import DynamicCache

from echo_lm.model.state import EchoState


class EchoCache(DynamicCache):
    """What has been read. As users of caches expect, it changes in place.

    `state` may be saved, loaded and given to `EchoLM` like any other.
    """

    def __init__(self, state: EchoState | None = None) -> None:
        super().__init__()
        self.state = state
        self.places = 0 if state is None else int(state.count.max())
        """Columns read so far, padding included: what attention masks count."""

    def advance(self, state: EchoState | None, places: int) -> None:
        """Take the state after reading that many more columns."""
        self.state = state
        self.places += places

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.places

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """There is none."""
        return -1

    def __len__(self) -> int:
        return 0 if self.state is None else len(self.state.layers)

    def __repr__(self) -> str:
        held = "empty" if self.state is None else f"{self.state.nbytes:,} bytes"
        return f"EchoCache({self.places} places, {held})"

    @property
    def batch_size(self) -> int:
        """Rows; -1 if nothing was read."""
        return -1 if self.state is None else len(self.state.count)

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return self.state is not None

    @property
    def is_croppable(self) -> bool:
        return False

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        return self.state is not None

    def reset(self) -> None:
        """Forget everything."""
        self.state, self.places = None, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing can be unread."""
        if tokens_to_remove:
            raise ValueError(
                f"An EchoCache cannot forget its last {abs(tokens_to_remove)} tokens: what was "
                "read is in its sums; keep a copy of `cache.state` from before them."
            )

    def reorder_cache(self, beam_idx: Int[Tensor, " n"]) -> None:
        """Pick rows, as beam search does."""
        if self.state is not None:
            self.state = self.state.reorder(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            rows = torch.arange(self.batch_size, device=indices.device)[indices]
            self.state = self.state.reorder(rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row so many times."""
        if self.state is not None:
            rows = torch.arange(self.batch_size, device=self.state.count.device)
            self.state = self.state.reorder(rows.repeat_interleave(repeats))
