"""What the inverse buys: linear attention, ridge and filter while keys come to share directions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from echo_lm.analysis.operator import conditioning, sums
from echo_lm.analysis.ridge import distance_to_ridge, isotropy_bound
from echo_lm.experiments.base import (
    Experiment,
    Finished,
    Scale,
    Settings,
    Table,
    Workbench,
    distinct,
    over_seeds,
    select,
)
from echo_lm.ops import ska
from echo_lm.plots import band, figure, line

RECALLS = ("linear attention", "SKA order 0", "SKA order 1", "SKA order 2", "SKA bank")
TARGETS = ("own value", "successor's value")
FORMS: dict[str, dict[str, Any]] = {
    "exact, parallel": {"causal": "exact", "backend": "chunk"},
    "exact, in steps": {"causal": "exact", "backend": "recurrent"},
    "all at once": {"causal": False, "backend": "chunk"},
}


class Conditioning(Experiment):
    """r keys, read once each, whose Gram has a chosen condition number; each is then asked for."""

    name = "conditioning"
    title = "Retrieval error as the Gram's condition number grows"
    source = "Theorem I.6 and Corollary I.9, measured"

    def protocol(self, scale: Scale) -> dict[str, Any]:
        full = scale == "full"
        return {
            "rank": 48 if full else 8,
            "value width": 64 if full else 8,
            "draws": 16 if full else 2,
            "condition numbers of G": [10.0**i for i in range(0, 7, 1 if full else 3)],
            "keys": "as many as the rank; eigenvalues of G evenly spaced in the logarithm, "
            "eigenvectors and order random; the largest |k|^2 is 1",
            "values": "independent, normal",
            "calibration": "every memory's answers are scaled to fit best (the layer learns eta), "
            "and the bank's coefficients fitted, on every other key; errors are of the rest",
            "rounding": "fp32 against fp64 for the same inputs, worst entry over largest entry, "
            "all three orders weighing the same",
        }

    def cells(self, scale: Scale) -> list[Settings]:
        return [{"ridge": ridge} for ridge in (1e-6, 1e-4, 1e-2)]

    def run(
        self, protocol: Mapping[str, Any], settings: Settings, seed: int, bench: Workbench
    ) -> dict[str, Any]:
        torch.manual_seed(seed)
        ridge, rank, draws = settings["ridge"], protocol["rank"], protocol["draws"]
        found = []
        for kappa in protocol["condition numbers of G"]:
            k = keys_of_condition(kappa, draws, rank)
            v = torch.randn(draws, rank, protocol["value width"], dtype=torch.float64)
            found.append(
                {
                    "isotropy": isotropy(k, v, ridge),
                    "error": retrieval_errors(k, v, ridge),
                    "ridge by least squares": distance_to_least_squares(k, v, ridge),
                    "rounding": {form: rounding(k, v, ridge, FORMS[form]) for form in FORMS},
                }
            )
        return {"condition number": protocol["condition numbers of G"], "found": found}

    def tables(self, done: Sequence[Finished]) -> list[Table]:
        parts = [table_of_errors(done, target) for target in TARGETS]
        return [table_of_isotropy(done), *parts, table_of_rounding(done)]

    def remarks(self, done: Sequence[Finished]) -> list[str]:
        points = [(cell, point) for cell in done for point in cell.numbers["found"]]
        share = max(p["isotropy"]["largest"] / max(p["isotropy"]["bound"], 1e-9) for _, p in points)
        typical = mean(p["isotropy"]["mean"] for _, p in points if p["isotropy"]["bound"] > 0.99)
        same = max(p["ridge by least squares"] for _, p in points)
        return [
            f"Theorem I.6 bounds from above: the largest distance of a single query is {share:.2f} "
            f"of its bound, and where the bound exceeds 0.99 the mean distance is {typical:.2f}.",
            f"SKA of order 0 and ridge regression by `torch.linalg.lstsq` differ by at most "
            f"{same:.1g} in fp64 (Corollary I.9).",
            *(worst_rounding(select(done, ridge=ridge)) for ridge in distinct(done, "ridge")),
        ]

    def draw(self, done: Sequence[Finished], path: Path) -> None:
        with figure(path, rows=2, columns=2, size=(3.8, 3.0)) as axes:
            draw_isotropy(done, axes[0, 0])
            draw_rounding(done, axes[0, 1])
            for ax, target in zip(axes[1], TARGETS, strict=True):
                draw_errors(done, ax, target)
            axes[1, 0].legend(loc="lower right")


def keys_of_condition(kappa: float, draws: int, rank: int) -> Float[Tensor, "b r r"]:
    """As many keys as dimensions; the Gram's eigenvalues lie evenly between 1 and 1 / kappa."""
    root = torch.logspace(0, -0.5 * torch.tensor(kappa).log10().item(), rank, dtype=torch.float64)
    left, right = (
        torch.linalg.qr(torch.randn(draws, rank, rank, dtype=torch.float64)).Q for _ in range(2)
    )
    k = left * root @ right
    return k / k.norm(dim=-1).amax(-1)[:, None, None]


def isotropy(
    k: Float[Tensor, "b n r"], v: Float[Tensor, "b n p"], ridge: float
) -> dict[str, float]:
    """Distance of linear attention to the best multiple of ridge, over |C| |q|, random queries."""
    known = sums(k, v)
    q = torch.randn(k.shape[0], 256, k.shape[-1], dtype=k.dtype)
    distance = distance_to_ridge(q, known, ridge) / q.norm(dim=-1)
    size = torch.linalg.matrix_norm(known.value, ord=2)[:, None]
    return {
        "condition number": float(conditioning(known.gram, ridge).condition.mean()),
        "bound": float((isotropy_bound(known.gram, known.value, ridge)[:, None] / size).mean()),
        "mean": float((distance / size).mean()),
        "largest": float((distance / size).max()),
    }


def retrieval_errors(
    k: Float[Tensor, "b n r"], v: Float[Tensor, "b n p"], ridge: float
) -> dict[str, dict[str, float]]:
    """Relative error of each memory for each target, after calibration on every other key."""
    orders = torch.stack([answers(k, v, ridge, order) for order in range(3)], -1)
    linear = (k @ k.mT @ v).unsqueeze(-1)
    memories = [linear, *orders.split(1, -1), orders]
    last = k.shape[1] - 1
    wanted = (v[:, :last], v[:, 1:])
    return {
        target: {
            name: calibrated_error(memory[:, :last], value)
            for name, memory in zip(RECALLS, memories, strict=True)
        }
        for target, value in zip(TARGETS, wanted, strict=True)
    }


def answers(
    k: Float[Tensor, "b n r"], v: Float[Tensor, "b n p"], ridge: float, order: int
) -> Float[Tensor, "b n p"]:
    """What SKA answers to each of its keys once it has read them all."""
    coef = torch.zeros(1, order + 1, dtype=k.dtype)
    coef[:, order] = 1
    q, k, v = (x.unsqueeze(2) for x in (k, k, v))
    return ska(q, k, v, coef=coef, ridge=ridge, causal=False, backend="naive").squeeze(2)


def calibrated_error(
    found: Float[Tensor, "b n p features"], wanted: Float[Tensor, "b n p"]
) -> float:
    """Relative error on odd keys of the weights that fit best on even ones, mean over draws."""
    fit, rest = (found[:, i::2].flatten(1, 2) for i in (0, 1))
    fit_to, rest_to = (wanted[:, i::2].flatten(1)[..., None] for i in (0, 1))
    weights = torch.linalg.lstsq(fit, fit_to).solution
    return float(((rest @ weights - rest_to).norm(dim=1) / rest_to.norm(dim=1)).mean())


def distance_to_least_squares(
    k: Float[Tensor, "b n r"], v: Float[Tensor, "b n p"], ridge: float
) -> float:
    """SKA of order 0 against the ridge problem given to `lstsq`, which knows no Gram matrix."""
    rank = k.shape[-1]
    below = ridge**0.5 * torch.eye(rank, dtype=k.dtype).expand(len(k), -1, -1)
    nothing = v.new_zeros(len(v), rank, v.shape[-1])
    best = torch.linalg.lstsq(torch.cat([k, below], 1), torch.cat([v, nothing], 1)).solution
    return float((answers(k, v, ridge, 0) - k @ best).abs().max() / (k @ best).abs().max())


def rounding(
    k: Float[Tensor, "b n r"], v: Float[Tensor, "b n p"], ridge: float, form: Mapping[str, Any]
) -> float:
    """Error of a shipped form in fp32 when every key is asked for after all were read."""
    single = [x.float().unsqueeze(2) for x in (k, v)]
    # Zero keys behind: asking leaves nothing in the memory.
    k32, v32 = (torch.cat([x, torch.zeros_like(x)], 1) for x in single)
    q32 = single[0].repeat(1, 2, 1, 1)
    asked = slice(k.shape[1], None)
    coef = torch.full((1, 3), 1 / 3)
    y = ska(q32, k32, v32, coef=coef, ridge=ridge, **form)[:, asked].double()
    wide = (q32.double(), k32.double(), v32.double())
    truth = ska(*wide, coef=coef.double(), ridge=ridge, causal=False, backend="naive")[:, asked]
    return float((y - truth).abs().max() / truth.abs().max())


def limit(cell: Finished) -> float:
    """What the arithmetic of exact mode allows (ops/ska/README.md), up to a small factor."""
    return torch.finfo(torch.float32).eps * (1 + 1 / float(cell.settings["ridge"]))


def worst_rounding(cells: Sequence[Finished]) -> str:
    points = [point["rounding"] for cell in cells for point in cell.numbers["found"]]
    worst = {form: max(point[form] for point in points) for form in FORMS}
    return (
        f"Rounding in fp32 at ridge {cells[0].settings['ridge']:.0e}, where "
        f"eps (1 + max |k|^2 / ridge) is {limit(cells[0]):.1e}: "
        + ", ".join(f"{form} at most {error:.1e}" for form, error in worst.items())
        + "."
    )


def at(i: int, *names: str) -> Any:
    """Reads one number of the i-th condition number from a cell's numbers."""

    def value(numbers: Mapping[str, Any]) -> float:
        found = numbers["found"][i]
        for name in names:
            found = found[name]
        return float(found)

    return value


def conditions(done: Sequence[Finished]) -> list[float]:
    return list(done[0].numbers["condition number"])


def table_of_isotropy(done: Sequence[Finished]) -> Table:
    rows = [
        [
            f"{kappa:.0e}",
            f"{ridge:.0e}",
            *(
                over_seeds(select(done, ridge=ridge), at(i, "isotropy", name))
                for name in ("condition number", "bound", "mean", "largest")
            ),
        ]
        for ridge in distinct(done, "ridge")
        for i, kappa in enumerate(conditions(done))
    ]
    header = ["cond(G)", "ridge", "cond(G + ridge I)", "bound of I.6", "mean", "largest"]
    return Table("Distance of linear attention to the best multiple of ridge", header, rows)


def table_of_errors(done: Sequence[Finished], target: str) -> Table:
    rows = [
        [
            f"{kappa:.0e}",
            f"{ridge:.0e}",
            *(
                over_seeds(select(done, ridge=ridge), at(i, "error", target, recall))
                for recall in RECALLS
            ),
        ]
        for ridge in distinct(done, "ridge")
        for i, kappa in enumerate(conditions(done))
    ]
    return Table(f"Relative error of a key's {target}", ["cond(G)", "ridge", *RECALLS], rows)


def table_of_rounding(done: Sequence[Finished]) -> Table:
    rows = [
        [
            f"{kappa:.0e}",
            f"{ridge:.0e}",
            *(over_seeds(select(done, ridge=ridge), at(i, "rounding", form)) for form in FORMS),
        ]
        for ridge in distinct(done, "ridge")
        for i, kappa in enumerate(conditions(done))
    ]
    return Table("Rounding in fp32, against fp64", ["cond(G)", "ridge", *FORMS], rows)


def curve(cells: Sequence[Finished], *names: str) -> list[list[float]]:
    """One line of numbers over the condition numbers for each seed."""
    return [[at(i, *names)(c.numbers) for i in range(len(conditions(cells)))] for c in cells]


def draw_isotropy(done: Sequence[Finished], ax: Any) -> None:
    tight = select(done, ridge=min(distinct(done, "ridge")))
    where = [mean(xs) for xs in zip(*curve(tight, "isotropy", "condition number"), strict=True)]
    grid = torch.logspace(0, 6, 200).tolist()
    ax.plot(grid, [(x - 1) / (x + 1) for x in grid], color="black", linewidth=1)
    ax.text(1e6, 0.93, "Theorem I.6: (κ − 1)/(κ + 1)", ha="right", fontsize=8)
    for i, (label, name) in enumerate([("largest", "largest"), ("mean over queries", "mean")]):
        found = curve(tight, "isotropy", name)
        band(ax, where, found, **line(i))
        ax.text(1e6, found[0][-1] + 0.09, label, ha="right", color=line(i)["color"], fontsize=8)
    ax.set(
        xscale="log",
        xlabel="condition number κ of G + λI",
        ylabel="distance / (‖C‖ ‖q‖)",
        title="Linear attention to the best multiple of ridge",
        ylim=(-0.03, 1.08),
    )


def draw_errors(done: Sequence[Finished], ax: Any, target: str) -> None:
    tight = select(done, ridge=min(distinct(done, "ridge")))
    for i, recall in enumerate(RECALLS):
        # Hollow and nested, since several lie on one another.
        look = line(i, recall) | {"markerfacecolor": "none", "markersize": 10 - 1.6 * i}
        band(ax, conditions(done), curve(tight, "error", target, recall), **look)
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="condition number of G",
        ylabel="relative error (1: nothing recalled)",
        title=f"Asked for a key's {target}, λ = {tight[0].settings['ridge']:.0e}",
        ylim=(3e-7, 3),
    )


def draw_rounding(done: Sequence[Finished], ax: Any) -> None:
    ridges = sorted(distinct(done, "ridge"))[-2:]
    for ridge, filled in zip(ridges, (True, False), strict=True):
        cells = select(done, ridge=ridge)
        for i, form in enumerate(FORMS):
            look = line(i, form if filled else None)
            look |= {} if filled else {"markerfacecolor": "white"}
            band(ax, conditions(done), curve(cells, "rounding", form), **look)
        ax.axhline(limit(cells[0]), color="black", linewidth=0.8)
        name = f"ε (1 + |k|²/λ), λ = {ridge:.0e}"
        ax.text(1, 0.45 * limit(cells[0]), name, fontsize=7)
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="condition number of G",
        ylabel="error / largest answer",
        title=f"fp32 against fp64, λ = {ridges[0]:.0e} and (hollow) {ridges[1]:.0e}",
        ylim=(5e-8, 3),
    )
    ax.legend(loc="upper right", fontsize=7, ncols=2)
