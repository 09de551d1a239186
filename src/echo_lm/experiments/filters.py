"""Which order of the filter finds a key's value, and what it costs a bank to learn that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from echo_lm.experiments.ablation import Ablation, Changes, apart
from echo_lm.experiments.base import Finished, Scale


class Filters(Ablation):
    """One power of the operator for all heads, or a learned weight for every power; with queries
    that start at random, and as the keys do."""

    name = "filters"
    title = "Filter orders 0 to 4, and banks that learn their weights"
    setting = "filter"
    models: ClassVar[Mapping[Scale, str]] = {**Ablation.models, "full": "synthetic-ska"}

    def variants(self, scale: Scale) -> Mapping[str, Changes]:
        powers: dict[str, Changes] = {
            f"order {order}": {"filter": "power", "order": order} for order in range(5)
        }
        banks: dict[str, Changes] = {
            f"bank up to {order}": {"filter": "bank", "order": order} for order in (1, 2, 4)
        }
        # The paper's causality, whose chunks can be no longer than what is read.
        chunked = {"causal": "chunk", "chunk_size": 64 if scale == "full" else 16}
        starts: dict[str, Changes] = {"": {}, ", tied start": {"tied_start": True}}
        return {
            f"{name}{start}": {**how, **chunked, **first}
            for start, first in starts.items()
            for name, how in {**powers, **banks}.items()
        }

    def panels(self, done: Sequence[Finished]) -> dict[str, dict[str, list[Finished]]]:
        """One for each task and start."""
        return apart(super().panels(done))
