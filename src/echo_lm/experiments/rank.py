"""How large a memory must be for how many pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from echo_lm.experiments.ablation import ORDER_1, Ablation, Changes, Named, mqar
from echo_lm.experiments.base import Finished, Scale, distinct, select
from echo_lm.plots import band, figure, line


class Rank(Ablation):
    """Ranks below and above the number of pairs, which all heads of two layers share."""

    name = "rank"
    title = "Rank against number of pairs"
    setting = "rank"

    def tasks(self, scale: Scale) -> Mapping[str, Named]:
        if scale == "full":
            return dict(mqar(pairs, 128, 4096) for pairs in (4, 8, 16, 32))
        return dict(mqar(pairs, 32, 256) for pairs in (2, 8))

    def variants(self, scale: Scale) -> Mapping[str, Changes]:
        ranks = (4, 8, 16, 24, 32, 48, 64) if scale == "full" else (4, 8, 24)
        # What counts is how much fits, not how long it takes to find out.
        return {str(rank): {"rank": rank, **ORDER_1, "tied_start": True} for rank in ranks}

    def draw(self, done: Sequence[Finished], path: Path) -> None:
        with figure(path, columns=2, size=(3.6, 2.8)) as axes:
            for ax, (name, value) in zip(axes[0], shown(done).items(), strict=True):
                for i, task in enumerate(distinct(done, "task")):
                    draw_over_ranks(select(done, task=task), value, ax, line(i, task))
                ax.set(
                    xscale="log", xlabel="rank", ylabel="accuracy", title=name, ylim=(-0.02, 1.02)
                )
                ranks = [int(rank) for rank in distinct(done, "rank")]
                ax.set_xticks(ranks, [str(rank) for rank in ranks])
                ax.set_xticks([], minor=True)
            axes[0, 0].legend(fontsize=7)


def shown(done: Sequence[Finished]) -> dict[str, Any]:
    """What the panels show."""
    (longer,) = {point["read"] for cell in done for point in cell.numbers["readings"]}
    return {
        "as trained": lambda numbers: numbers["accuracy"],
        f"read {longer}": lambda numbers: numbers["readings"][0]["accuracy"],
    }


def draw_over_ranks(
    cells: Sequence[Finished], value: Any, ax: Any, look: Mapping[str, Any]
) -> None:
    """Mean over seeds; as many as every rank has."""
    by_rank = {rank: select(cells, rank=rank) for rank in distinct(cells, "rank")}
    seeds = zip(*by_rank.values(), strict=False)
    band(
        ax,
        [int(rank) for rank in by_rank],
        [[value(c.numbers) for c in one] for one in seeds],
        **look,
    )
