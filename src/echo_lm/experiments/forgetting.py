"""Whether to forget: sums that fade where bindings change, and what that costs where none does."""

from __future__ import annotations

from collections.abc import Mapping

from echo_lm.experiments.ablation import ORDER_1, Ablation, Changes, Named, mqar
from echo_lm.experiments.base import Scale

FADES_EVERY = 16
"""Tokens between the places where sums fade, if they do."""


class Forgetting(Ablation):
    """No decay, and learned ones that start from one half-life or from another for each head.

    In the resource economy what an agent has changes with every step; overwritten pairs are as
    plain as a change can be; in MQAR nothing changes, and whoever forgets can only lose.
    """

    name = "forgetting"
    title = "Sums that fade, where bindings change and where they stay"
    setting = "forgetting"

    def tasks(self, scale: Scale) -> Mapping[str, Named]:
        if scale == "full":
            return {
                "economy, easy": {"task": "resource-economy", "tier": "easy", "longer": {}},
                "economy, hard": {"task": "resource-economy", "tier": "hard", "longer": {}},
                # Rounds of 56 tokens: sums that fade every 16 are not told where one ends.
                **dict([overwritten(8, 8, 40, 64), mqar(8, 128, 4096)]),
            }
        return dict([overwritten(4, 3, 8, 12), mqar(4, 32, 256)])

    def variants(self, scale: Scale) -> Mapping[str, Changes]:
        full = scale == "full"
        how: Changes = {} if full else ORDER_1
        chunked = {"causal": "chunk", "chunk_size": FADES_EVERY}
        exact = {"causal": "exact", "chunk_size": FADES_EVERY}
        lives = (16, 64, 256, 1024) if full else (16, 64)
        modes = {"exact": exact, "chunk": chunked} if full else {"chunk": chunked}
        fading: dict[str, Changes] = {
            "none": {},
            **{f"half-life {life}": {"half_life": life} for life in lives},
            f"half-lives {lives[0]} to {lives[-1]}": {"half_life": list(lives)},
        }
        return {
            f"{name}, {mode}": {**how, **when, **changes}
            for mode, when in modes.items()
            for name, changes in fading.items()
        }


def overwritten(pairs: int, rounds: int, gap: int, longer: int) -> tuple[str, Named]:
    """A task in which every pair is written so many times, and its name."""
    more = {f"with {longer} rounds": {"rounds": longer}}
    name = f"{pairs} pairs, {rounds} rounds"
    return name, {
        "task": "overwritten",
        "pairs": pairs,
        "rounds": rounds,
        "gap": gap,
        "longer": more,
    }
