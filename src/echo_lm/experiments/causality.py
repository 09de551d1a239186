"""What exact causality is worth: a token that sees its own chunk, or only the chunks before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from echo_lm.experiments.ablation import ORDER_1, Ablation, Changes, Named, mqar
from echo_lm.experiments.base import Scale


class Causality(Ablation):
    """Exact, with and without a token's own key in its memory, and in chunks of several sizes; with
    order 1 alone and with the filter bank.

    On the task without a gap everything lies within a few chunks or one.
    """

    name = "causality"
    title = "Exact causality against chunks of several sizes"
    setting = "causality"
    models: ClassVar[Mapping[Scale, str]] = {**Ablation.models, "full": "synthetic-ska"}

    def tasks(self, scale: Scale) -> Mapping[str, Named]:
        if scale == "full":
            return dict([mqar(8, 0, 4096), mqar(8, 128, 4096), mqar(32, 384, 4096)])
        return dict([mqar(4, 0, 256), mqar(4, 32, 256)])

    def variants(self, scale: Scale) -> Mapping[str, Changes]:
        sizes = (16, 64, 256) if scale == "full" else (4, 16, 64)
        causalities: dict[str, Changes] = {
            "exact": {"causal": "exact"},
            "exact, tied start": {"causal": "exact", "tied_start": True},
            "exact, not itself": {"causal": "exact", "sees_itself": False},
            "exact, not itself, tied start": {
                "causal": "exact",
                "sees_itself": False,
                "tied_start": True,
            },
            **{f"chunk {size}": {"causal": "chunk", "chunk_size": size} for size in sizes},
        }
        filters: dict[str, Changes] = {"order 1": ORDER_1}
        if scale == "full":
            filters["bank"] = {"filter": "bank", "order": 2}
        return {
            f"{causality}, {name}": {**when, **how}
            for name, how in filters.items()
            for causality, when in causalities.items()
        }
