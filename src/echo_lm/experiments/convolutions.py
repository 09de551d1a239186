"""Whether SKA wants a short convolution over queries, keys and values, as scans do."""

from __future__ import annotations

from collections.abc import Mapping

from echo_lm.experiments.ablation import ORDER_1, Ablation, Changes
from echo_lm.experiments.base import Scale


class Convolutions(Ablation):
    """None, a linear one, and one that ends in SiLU; behind the bank and behind order 0 and 1.

    A convolution can put a key beside its value within one token, which is what order 1 does by
    itself: without one, order 0 depends on the layers below for that.
    """

    name = "convolutions"
    title = "With and without short convolutions on queries, keys and values"
    setting = "convolution"

    def variants(self, scale: Scale) -> Mapping[str, Changes]:
        convolutions: dict[str, Changes] = {
            "none": {},
            "linear": {"conv_kernel": 4, "conv_silu": False},
            "SiLU": {"conv_kernel": 4, "conv_silu": True},
        }
        filters: dict[str, Changes] = {
            "order 0": {"filter": "power", "order": 0},
            "order 1": ORDER_1,
        }
        if scale == "full":
            filters["bank"] = {"filter": "bank", "order": 2}
        return {
            f"{convolution}, {name}": {**taps, **how, "tied_start": True}
            for name, how in filters.items()
            for convolution, taps in convolutions.items()
        }
