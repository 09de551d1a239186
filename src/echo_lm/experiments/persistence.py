"""When the power filter helps: a persistent signal in transient noise, and what is predicted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from echo_lm.analysis.operator import (
    departure_from_normality,
    regularised,
    sums,
    whitened_operator,
)
from echo_lm.analysis.ridge import contraction_crossover, filter_crossover
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
from echo_lm.plots import band, figure, line

ORDERS = (1, 2, 3, 4)
SHOWN_GAP = 0.1
LINKS, PAUSE = 6, 10
CLEAR = 0.1
LEVELS = [10 ** (i / 8 - 3) for i in range(37)]


class Persistence(Experiment):
    """A query is a persistent part plus noise; wanted is what ridge answers to the part alone."""

    name = "persistence"
    title = "Error of the power filter for a persistent signal in transient noise"
    source = "Theorem I.11 and Corollary I.12, measured"

    def protocol(self, scale: Scale) -> dict[str, Any]:
        full = scale == "full"
        return {
            "rank": 32 if full else 14,
            "persistent": 8 if full else 2,
            "value width": 32 if full else 4,
            "tokens": 512 if full else 64,
            "draws": 64 if full else 4,
            "gaps": [0.01, 0.03, 0.1, 0.3] if full else [0.1],
            "noise": "8 levels a decade, from 1e-3 to 32",
            "ridge": 1e-4,
            "normal": "A_w drawn as the theorem has it: orthogonal eigenvectors, |1 - lambda| <= "
            "gap for persistent and |lambda| <= 0.5 for transient ones, all |lambda| <= 1",
            "drift": "keys of a sequence, in random orthonormal coordinates: persistent components "
            "keep 1 - gap of themselves from token to token, the others are independent; all have "
            "variance 1, and the largest |k|^2 is 1",
            "chain": f"the same, but each other direction is in the key of one token only, "
            f"{LINKS} tokens in a row and then none for {PAUSE}: phrases, read once",
            "noise of a query": "drawn as the noise of the keys; for the chain the first key of a "
            "phrase. Lengths are in whitened coordinates, that of the signal is 1",
            "predicted": "from the eigenvalues of each A_w: those nearest to 1 are persistent",
        }

    def cells(self, scale: Scale) -> list[Settings]:
        return [{"keys": kind} for kind in SETTINGS]

    def run(
        self, protocol: Mapping[str, Any], settings: Settings, seed: int, bench: Workbench
    ) -> dict[str, Any]:
        torch.manual_seed(seed)
        draw = SETTINGS[settings["keys"]]
        found = [measure(draw(protocol, gap), protocol) for gap in protocol["gaps"]]
        return {"gap": protocol["gaps"], "noise": LEVELS, "found": found}

    def tables(self, done: Sequence[Finished]) -> list[Table]:
        return [table_of_settings(done), table_of_crossovers(done)]

    def remarks(self, done: Sequence[Finished]) -> list[str]:
        lines = []
        for kind in distinct(done, "keys"):
            kept = [
                kept
                for cell in select(done, keys=kind)
                for point in cell.numbers["found"]
                for kept in point["kept"]
                if kept is not None
            ]
            lines.append(
                f"{kind}: where the noise is above what Corollary I.12 predicts, order K has the "
                f"smaller error than order 0 in {min(kept):.0%} to {max(kept):.0%} of the draws "
                "(over K, gaps and seeds)."
            )
        return lines

    def draw(self, done: Sequence[Finished], path: Path) -> None:
        with figure(path, rows=2, columns=2, size=(3.8, 3.0)) as axes:
            panels = axes.flatten()
            for ax, kind in zip(panels, distinct(done, "keys"), strict=False):
                draw_errors(select(done, keys=kind), ax)
            panels[0].legend(loc="upper left")
            draw_crossovers(done, panels[-1])


@dataclass(frozen=True)
class Scene:
    """A whitened operator and read-out, and for each draw a signal and a noise of length 1."""

    operator: Float[Tensor, "b r r"]
    readout: Float[Tensor, "b p r"]
    """C L^-T, which answers whitened queries."""
    signal: Float[Tensor, "b r"]
    noise: Float[Tensor, "b r"]


def normal_scene(protocol: Mapping[str, Any], gap: float) -> Scene:
    """Normal by construction: blocks of conjugate pairs in random orthonormal coordinates."""
    draws, rank, persistent = (protocol[name] for name in ("draws", "rank", "persistent"))
    pairs, slow = rank // 2, persistent // 2
    near_one = 1 - gap * disk(draws, slow)
    # Into the unit circle, where every A_w is; neither step takes lambda further away from 1.
    near_one = torch.where(near_one.abs() > 1, 2 - near_one, near_one)
    near_one = near_one / near_one.abs().clamp_min(1)
    small = 0.5 * disk(draws, pairs - slow)
    blocks = pair_blocks(torch.cat([near_one, small], -1))
    turn = rotation(draws, rank)
    signal, noise = normal(draws, rank), normal(draws, rank)
    signal[:, persistent:], noise[:, :persistent] = 0, 0
    return Scene(
        operator=turn @ blocks @ turn.mT,
        readout=normal(draws, protocol["value width"], rank),
        signal=apply(turn, unit(signal)),
        noise=apply(turn, unit(noise)),
    )


def drift_scene(protocol: Mapping[str, Any], gap: float) -> Scene:
    """White noise around slow components."""
    slow, rank = slow_components(protocol, gap), protocol["rank"]
    fast = normal(*slow.shape[:2], rank - slow.shape[-1])
    return scene_of_keys(protocol, slow, fast, normal(len(slow), fast.shape[-1]))


def chain_scene(protocol: Mapping[str, Any], gap: float) -> Scene:
    """Each of the other directions belongs to one token: phrases with pauses between them."""
    slow, rank = slow_components(protocol, gap), protocol["rank"]
    draws, tokens, persistent = slow.shape
    words = torch.eye(rank - persistent, dtype=slow.dtype)
    fast = torch.zeros(tokens, len(words), dtype=slow.dtype)
    firsts = range(0, len(words), LINKS)
    for i, first in enumerate(firsts):
        start = i * (LINKS + PAUSE)
        phrase = words[first : first + LINKS]
        fast[start : start + len(phrase)] = phrase
    asked = words[torch.tensor(firsts)[torch.randint(len(firsts), (draws,))]]
    return scene_of_keys(protocol, slow, fast.expand(draws, -1, -1), asked)


SETTINGS: dict[str, Callable[[Mapping[str, Any], float], Scene]] = {
    "normal": normal_scene,
    "drift": drift_scene,
    "chain": chain_scene,
}


def slow_components(protocol: Mapping[str, Any], gap: float) -> Float[Tensor, "b t slow"]:
    """Of variance 1, each keeping 1 - gap of itself from token to token."""
    draws, tokens, persistent = (protocol[name] for name in ("draws", "tokens", "persistent"))
    keep = 1 - gap
    now, all_of_them = normal(draws, persistent), []
    for _ in range(tokens):
        all_of_them.append(now)
        now = keep * now + math.sqrt(1 - keep**2) * normal(draws, persistent)
    return torch.stack(all_of_them, 1)


def scene_of_keys(
    protocol: Mapping[str, Any],
    slow: Float[Tensor, "b t slow"],
    fast: Float[Tensor, "b t fast"],
    asked: Float[Tensor, "b fast"],
) -> Scene:
    """What a sequence of keys makes of a query: a token's slow part, and noise like `asked`."""
    draws, tokens = slow.shape[:2]
    mixing = rotation(draws, protocol["rank"])
    k = torch.cat([slow, fast], -1) @ mixing
    k = k / k.norm(dim=-1).amax(-1)[:, None, None]
    known = sums(k, normal(draws, tokens, protocol["value width"]))
    L = torch.linalg.cholesky(regularised(known.gram, protocol["ridge"]))
    here = slow[torch.arange(draws), torch.randint(tokens, (draws,))]
    nothing_slow, nothing_fast = torch.zeros_like(here), torch.zeros_like(asked)
    signal = apply(mixing.mT, torch.cat([here, nothing_fast], -1))
    noise = apply(mixing.mT, torch.cat([nothing_slow, asked], -1))
    return Scene(
        operator=whitened_operator(known.gram, known.lag, protocol["ridge"]),
        readout=torch.linalg.solve_triangular(L, known.value.mT, upper=False).mT,
        signal=unit(apply(torch.linalg.inv(L), signal)),
        noise=unit(apply(torch.linalg.inv(L), noise)),
    )


def measure(scene: Scene, protocol: Mapping[str, Any]) -> dict[str, Any]:
    """Errors of every order at every noise level, and where the corollary expects them to cross."""
    delta, rho = split_eigenvalues(scene.operator, protocol["persistent"])
    levels = torch.tensor(LEVELS, dtype=torch.float64)
    errors = torch.stack([errors_of(scene, order, levels) for order in (0, *ORDERS)])
    mean_errors = errors.mean(1)
    predicted = [
        [filter_crossover(d, p, order) for d, p in zip(delta, rho, strict=True)] for order in ORDERS
    ]
    tighter = [
        [contraction_crossover(d, p, order) for d, p in zip(delta, rho, strict=True)]
        for order in ORDERS
    ]
    return {
        "departure from normality": float(departure_from_normality(scene.operator).mean()),
        "delta": sum(delta) / len(delta),
        "rho": sum(rho) / len(rho),
        "rho^K": [sum(p**order for p in rho) / len(rho) for order in ORDERS],
        "norm of the transient part": transient_norm(scene),
        "error": mean_errors.tolist(),
        "predicted": [sum(each) / len(each) for each in predicted],
        "predicted for |A_w| <= 1": [sum(each) / len(each) for each in tighter],
        "measured": [crossing(levels, mean_errors[0], mean_errors[order]) for order in ORDERS],
        "in loud noise": (mean_errors[1:, -1] / mean_errors[0, -1]).tolist(),
        "kept": [
            share_kept(levels, errors[0], errors[order], torch.tensor(where))
            for order, where in zip(ORDERS, predicted, strict=True)
        ],
    }


def errors_of(scene: Scene, order: int, levels: Float[Tensor, " n"]) -> Float[Tensor, "b n"]:
    """|C L^-T (A_w^K q_w - q_pers)| over |C L^-T q_pers| for each level of noise."""
    wanted = apply(scene.readout, scene.signal)
    powered = torch.linalg.matrix_power(scene.operator, order)
    q = scene.signal[:, None] + levels[:, None] * scene.noise[:, None]
    answers = q @ powered.mT @ scene.readout.mT
    return (answers - wanted[:, None]).norm(dim=-1) / wanted.norm(dim=-1)[:, None]


def split_eigenvalues(
    operator: Float[Tensor, "b r r"], persistent: int
) -> tuple[list[float], list[float]]:
    """delta and rho of each operator: its eigenvalues nearest to 1, and all the others."""
    values = torch.linalg.eigvals(operator)
    away = (1 - values).abs()
    order = away.argsort(-1)
    delta = away.gather(-1, order)[:, persistent - 1]
    rho = values.abs().gather(-1, order[:, persistent:]).amax(-1)
    return delta.tolist(), rho.tolist()


def transient_norm(scene: Scene) -> float:
    """|A_w q_trans| / |q_trans|: what the theorem takes to be at most rho."""
    return float(apply(scene.operator, scene.noise).norm(dim=-1).mean())


def crossing(
    levels: Float[Tensor, " n"], plain: Float[Tensor, " n"], filtered: Float[Tensor, " n"]
) -> float | None:
    """The noise from which on the filter's error is the smaller one.

    None if it never is, or only by chance: less than a tenth smaller where noise is all there is.
    """
    helps = (filtered < plain).tolist()
    if filtered[-1] > (1 - CLEAR) * plain[-1]:
        return None
    gain = (filtered / plain).log().tolist()
    where = levels.log().tolist()
    for i, (before, after) in reversed(list(enumerate(pairwise(helps)))):
        if after and not before:
            share = gain[i] / (gain[i] - gain[i + 1])
            return math.exp(where[i] + share * (where[i + 1] - where[i]))
    return float(levels[0])


def share_kept(
    levels: Float[Tensor, " n"],
    plain: Float[Tensor, "b n"],
    filtered: Float[Tensor, "b n"],
    predicted: Float[Tensor, " b"],
) -> float | None:
    """Above the predicted crossover, the share of draws and levels with the smaller error."""
    above = levels[None] > predicted[:, None]
    return float((filtered < plain)[above].double().mean()) if bool(above.any()) else None


def disk(*shape: int) -> Tensor:
    """Complex numbers, uniform in the unit disk."""
    radius = torch.rand(shape, dtype=torch.float64).sqrt()
    return torch.polar(radius, 2 * math.pi * torch.rand(shape, dtype=torch.float64))


def pair_blocks(values: Tensor) -> Float[Tensor, "b r r"]:
    """A real normal matrix with these eigenvalues and their conjugates."""
    re, im = values.real, values.imag
    blocks = torch.stack([re, im, -im, re], -1).unflatten(-1, (2, 2))
    return torch.stack([torch.block_diag(*each) for each in blocks])


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def rotation(draws: int, rank: int) -> Float[Tensor, "b r r"]:
    return torch.linalg.qr(normal(draws, rank, rank)).Q


def unit(x: Float[Tensor, "b r"]) -> Float[Tensor, "b r"]:
    return x / x.norm(dim=-1, keepdim=True)


def apply(matrix: Float[Tensor, "b m n"], x: Float[Tensor, "b n"]) -> Float[Tensor, "b m"]:
    return (matrix @ x[..., None])[..., 0]


def at(i: int, name: str, order: int | None = None) -> Callable[[Mapping[str, Any]], Any]:
    """Reads one number of the i-th gap."""

    def value(numbers: Mapping[str, Any]) -> Any:
        found = numbers["found"][i][name]
        return found if order is None else found[ORDERS.index(order)]

    return value


def table_of_settings(done: Sequence[Finished]) -> Table:
    what = ("departure from normality", "delta", "rho", "norm of the transient part")
    rows = [
        [kind, str(gap), *(over_seeds(select(done, keys=kind), at(i, name)) for name in what)]
        for kind in distinct(done, "keys")
        for i, gap in enumerate(done[0].numbers["gap"])
    ]
    header = ["keys", "gap", "departure from normality", "δ", "ρ", "|A_w q_trans| / |q_trans|"]
    return Table("The operators (the last column is at most ρ if A_w is normal)", header, rows)


def table_of_crossovers(done: Sequence[Finished]) -> Table:
    rows = [
        [
            kind,
            str(gap),
            str(order),
            over_seeds(cells, at(i, "predicted", order)),
            over_seeds(cells, at(i, "predicted for |A_w| <= 1", order)),
            measured_crossing(cells, i, order),
            over_seeds(cells, at(i, "rho^K", order)),
            over_seeds(cells, at(i, "in loud noise", order)),
        ]
        for kind in distinct(done, "keys")
        for cells in [select(done, keys=kind)]
        for i, gap in enumerate(done[0].numbers["gap"])
        for order in ORDERS
    ]
    header = [
        "keys",
        "gap",
        "K",
        "crossover by I.12",
        "with |A_w| <= 1",
        "measured",
        "ρ^K",
        "error / order 0's in the loudest noise",
    ]
    title = "Order K against order 0 (crossover: |q_trans| / |q_pers| above which it is better)"
    return Table(title, header, rows)


def measured_crossing(cells: Sequence[Finished], i: int, order: int) -> str:
    read = at(i, "measured", order)
    crossed = [cell for cell in cells if read(cell.numbers) is not None]
    if not crossed:
        return "never"
    never = len(cells) - len(crossed)
    return over_seeds(crossed, read) + (f" (never in {never} of {len(cells)})" if never else "")


def draw_errors(cells: Sequence[Finished], ax: Any) -> None:
    gaps = cells[0].numbers["gap"]
    i = gaps.index(SHOWN_GAP)
    levels = cells[0].numbers["noise"]
    for j, order in enumerate((0, *ORDERS)):
        look = line(j, f"K = {order}") | {"markevery": (2 * j, 10)}
        curves = [cell.numbers["found"][i]["error"][j] for cell in cells]
        band(ax, levels, curves, **look)
        if order:
            where = cells[0].numbers["found"][i]["predicted"][j - 1]
            ax.axvline(where, color=look["color"], linewidth=0.8, linestyle=look["linestyle"])
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="noise |q_trans| / |q_pers|",
        ylabel="relative error",
        title=f"{cells[0].settings['keys']}, gap {SHOWN_GAP} (vertical: predicted crossover)",
    )


def draw_crossovers(done: Sequence[Finished], ax: Any) -> None:
    """Predicted against measured; what never crosses stands at the upper edge."""
    low, high = (done[0].numbers["noise"][end] for end in (0, -1))
    ax.plot([low, high], [low, high], color="black", linewidth=0.8)
    ax.text(2 * low, 3.2 * low, "as predicted", rotation=38, fontsize=7)
    for j, kind in enumerate(distinct(done, "keys")):
        points = [
            (point["predicted"][o], high if point["measured"][o] is None else point["measured"][o])
            for cell in select(done, keys=kind)
            for point in cell.numbers["found"]
            for o in range(len(ORDERS))
        ]
        look = line(j, kind) | {"linestyle": "none", "markerfacecolor": "none"}
        ax.plot(*zip(*points, strict=True), **look)
    ax.set(
        xscale="log",
        yscale="log",
        xlim=(low, high),
        ylim=(low, 1.5 * high),
        xlabel="crossover predicted by Corollary I.12",
        ylabel="measured (upper edge: never)",
        title="K = 1 to 4, all gaps and seeds",
    )
    ax.legend(loc="lower right")
