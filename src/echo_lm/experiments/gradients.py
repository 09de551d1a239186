"""What of a gradient reaches the lower layers of stacks of softmax attention and of SKA."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from sys import float_info
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from echo_lm.analysis.gradients import effective_rank
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
from echo_lm.layers import Attention, SpectralKoopmanAttention
from echo_lm.layers.rotary import rotary_tables, rotate
from echo_lm.plots import band, figure, line

SHARPNESS = [0.1, 1.0, 3.0, 10.0, 30.0, 100.0, 1000.0]
MODEST = 1.0
"""How sharp the other layers are where one is sharp."""
FLOOR = 1e-12
"""Where the figure ends: smaller norms are drawn there."""


@dataclass(frozen=True)
class View:
    """Which paths a gradient may take, and which layers are sharp."""

    queries_only: bool
    """Keys and values are constants: Propositions J.2 and J.4, chained by Theorem J.9."""
    residual: bool
    one_sharp: bool = False


VIEWS = {
    "query paths": View(queries_only=True, residual=False),
    "branches": View(queries_only=False, residual=False),
    "blocks": View(queries_only=False, residual=True),
    "blocks, one sharp": View(queries_only=False, residual=True, one_sharp=True),
}
SHOWN = ("query paths", "blocks")
FORMS: dict[str, Callable[[float], str]] = {"rank": "{:.1f}".format, "norm": "{:.2g}".format}


class Gradients(Experiment):
    """The Jacobian of the last token's output in the stream below each layer, by autograd."""

    name = "gradients"
    title = "Rank and norm of the gradient below each layer, as attention saturates"
    source = "section 3.2.3 (gradient flow) and Appendix J, measured"

    def protocol(self, scale: Scale) -> dict[str, Any]:
        full = scale == "full"
        return {
            "dim": 32 if full else 16,
            "heads": 2,
            "depth": 8 if full else 3,
            "tokens": 64 if full else 6,
            "draws": 2 if full else 1,
            "sharpness": SHARPNESS if full else SHARPNESS[1::3],
            "layers": "as at the start of training, with orthogonal projections; each behind an "
            "RMS norm, its output scaled to the size of the stream; keys and values as wide as "
            "dim / heads",
            "inputs": "independent, normal",
            "sharp": "attention: the standard deviation of its logits. SKA: mean |k|^2 / ridge",
            "gradient": "dy/dH of the last token's output y in all that the layer reads (width "
            "dim x tokens dim), as many directions of y as survive: effective rank (exp of the "
            "entropy of the singular values), and the norm of what a random direction becomes",
            "views": "query paths: no residual, keys and values constant, which Theorem J.9 is "
            "about; branches: no residual; blocks: x + branch, as in a model; one sharp: only the "
            f"middle layer, the others at {MODEST:g}",
        }

    def cells(self, scale: Scale) -> list[Settings]:
        return [{"mixer": mixer} for mixer in MIXERS]

    def run(
        self, protocol: Mapping[str, Any], settings: Settings, seed: int, bench: Workbench
    ) -> dict[str, Any]:
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in VIEWS}
        for sharpness in protocol["sharpness"]:
            for name, view in VIEWS.items():
                torch.manual_seed(seed)
                draws = [
                    measure(protocol, settings["mixer"], sharpness, view)
                    for _ in range(protocol["draws"])
                ]
                found[name].append(averaged(draws))
        return {"dim": protocol["dim"], "sharpness": protocol["sharpness"], "found": found}

    def tables(self, done: Sequence[Finished]) -> list[Table]:
        return [table_of_saturation(done), *(table_below(done, view) for view in VIEWS)]

    def remarks(self, done: Sequence[Finished]) -> list[str]:
        return [remark(done, view) for view in VIEWS]

    def draw(self, done: Sequence[Finished], path: Path) -> None:
        with figure(path, rows=len(SHOWN), columns=3, size=(3.5, 2.9)) as axes:
            for row, view in zip(axes, SHOWN, strict=True):
                draw_over_sharpness(done, view, "rank", row[0])
                draw_over_sharpness(done, view, "norm", row[1])
                draw_over_depth(done, view, row[2])
            axes[1, 0].legend(fontsize=7, loc="lower left")


def attention(dim: int, heads: int, sharpness: float) -> nn.Module:
    """Queries and keys have entries of variance 1, so that logits begin with deviation 1."""
    layer = orthogonal(Attention(dim, heads=heads).double())
    layer.q_proj.weight.data *= sharpness
    return layer


def ska_of(**filter: Any) -> Callable[[int, int, float], nn.Module]:
    def build(dim: int, heads: int, sharpness: float) -> nn.Module:
        rank = dim // heads
        layer = SpectralKoopmanAttention(
            dim, heads=heads, rank=rank, ridge=rank / sharpness, **filter
        )
        return orthogonal(layer.double())

    return build


MIXERS: dict[str, Callable[[int, int, float], nn.Module]] = {
    "attention": attention,
    "SKA order 0": ska_of(filter="power", order=0),
    "SKA order 1": ska_of(filter="power", order=1),
    "SKA order 2": ska_of(filter="power", order=2),
    "SKA bank": ska_of(filter="bank", order=2),
}


def orthogonal(layer: Any) -> Any:
    """No projection favours a direction."""
    for proj in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj):
        nn.init.orthogonal_(proj.weight)
    return layer


def measure(
    protocol: Mapping[str, Any], mixer: str, sharpness: float, view: View
) -> dict[str, Any]:
    """One draw of weights and inputs: rank and norm below every layer, from the lowest on."""
    dim, depth, tokens = protocol["dim"], protocol["depth"], protocol["tokens"]
    sharp = [sharpness if i == depth // 2 or not view.one_sharp else MODEST for i in range(depth)]
    layers = [MIXERS[mixer](dim, protocol["heads"], s) for s in sharp]
    if view.queries_only:
        for layer in layers:
            hold(layer.k_proj, layer.v_proj)
    x = torch.randn(1, tokens, dim, dtype=torch.float64)
    streams = read(layers, x.expand(dim, -1, -1), view.residual)
    found = jacobians(streams)
    saturation = [peak_and_count(layer, h) for layer, h in zip(layers, streams, strict=False)]
    return {
        "rank": [float(effective_rank(scaled(J))) for J in found],
        "norm": [float(torch.linalg.matrix_norm(J)) / math.sqrt(dim) for J in found],
        "largest weight": mean(peak for peak, _ in saturation),
        "tokens attended to": mean(count for _, count in saturation),
    }


def hold(*projections: Any) -> None:
    """Take what these projections give for constants."""
    for proj in projections:
        proj.register_forward_hook(lambda module, inputs, y: y.detach())


def normed(x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
    return F.rms_norm(x, x.shape[-1:], eps=1e-5)


def read(
    layers: Sequence[nn.Module], x: Float[Tensor, "b t d"], residual: bool
) -> list[Float[Tensor, "b t d"]]:
    """The stream below every layer, and what the last one leaves."""
    streams = [x.requires_grad_()]
    for layer in layers:
        y, _ = layer(normed(x), return_state=False)
        y = y / y.detach().square().mean().sqrt().clamp_min(FLOOR)
        x = x + y if residual else y
        streams.append(x)
    return streams


def jacobians(streams: Sequence[Float[Tensor, "d t d"]]) -> list[Float[Tensor, "d td"]]:
    """Of the last token's output in every stream below it; each row has one direction of its own.

    The rows are copies of one sequence, so that one backward pass serves all directions.
    """
    last = streams[-1][:, -1]
    every_direction = torch.eye(len(last), dtype=last.dtype)
    found = torch.autograd.grad(last, streams[:-1], every_direction)
    return [grad.flatten(1) for grad in found]


def scaled(J: Float[Tensor, "d td"]) -> Float[Tensor, "d td"]:
    """Of the size of 1, lest squares of tiny numbers vanish."""
    return J / J.abs().max().clamp_min(torch.finfo(J.dtype).tiny)


@torch.no_grad()
def peak_and_count(layer: Any, stream: Float[Tensor, "b t d"]) -> tuple[float, float]:
    """The last token's largest weight and exp of its entropy, mean over heads; SKA has neither."""
    if not isinstance(layer, Attention):
        return 0.0, 0.0
    x = normed(stream[:1])
    q, k = (proj(x).unflatten(-1, (layer.heads, -1)) for proj in (layer.q_proj, layer.k_proj))
    cos, sin = rotary_tables(torch.arange(x.shape[1])[None], q.shape[-1], dtype=q.dtype)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    logits = torch.einsum("hd,thd->ht", q[0, -1], k[0]) / math.sqrt(q.shape[-1])
    weights = logits.softmax(-1)
    return float(weights.amax(-1).mean()), float(torch.special.entr(weights).sum(-1).exp().mean())


def averaged(draws: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean over draws; of norms in the logarithm."""
    ranks = [mean(each) for each in zip(*(draw["rank"] for draw in draws), strict=True)]
    norms = [
        math.exp(mean(math.log(max(norm, float_info.min)) for norm in each))
        for each in zip(*(draw["norm"] for draw in draws), strict=True)
    ]
    rest = ("largest weight", "tokens attended to")
    return {"rank": ranks, "norm": norms, **{name: mean(d[name] for d in draws) for name in rest}}


def below(view: str, i: int, name: str, layer: int = 0) -> Callable[[Mapping[str, Any]], float]:
    """Reads a number of the i-th sharpness below a layer, the lowest unless said."""
    return lambda numbers: float(numbers["found"][view][i][name][layer])


def at(view: str, i: int, name: str) -> Callable[[Mapping[str, Any]], float]:
    return lambda numbers: float(numbers["found"][view][i][name])


def sharpness_of(done: Sequence[Finished]) -> list[float]:
    return list(done[0].numbers["sharpness"])


def table_of_saturation(done: Sequence[Finished]) -> Table:
    cells = select(done, mixer="attention")
    columns = [(view, name) for view in VIEWS for name in ("largest weight", "tokens attended to")]
    rows = [
        [f"{s:g}", *(over_seeds(cells, at(view, i, name)) for view, name in columns)]
        for i, s in enumerate(sharpness_of(done))
    ]
    header = ["deviation of the logits", *(f"{view}: {name}" for view, name in columns)]
    return Table("How saturated attention is (last token, mean over layers)", header, rows)


def table_below(done: Sequence[Finished], view: str) -> Table:
    rows = [
        [
            f"{s:g}",
            *(
                over_seeds(select(done, mixer=mixer), below(view, i, name), form)
                for mixer in distinct(done, "mixer")
                for name, form in FORMS.items()
            ),
        ]
        for i, s in enumerate(sharpness_of(done))
    ]
    header = [
        "sharpness",
        *(f"{mixer}: {name}" for mixer in distinct(done, "mixer") for name in FORMS),
    ]
    return Table(f"Effective rank and norm below the lowest layer, {view}", header, rows)


def remark(done: Sequence[Finished], view: str) -> str:
    """The range over sharpness for each mixer."""
    told = []
    for mixer in distinct(done, "mixer"):
        cells = select(done, mixer=mixer)
        ranges = []
        for name, form in FORMS.items():
            means = [
                mean(below(view, i, name)(cell.numbers) for cell in cells)
                for i in range(len(sharpness_of(done)))
            ]
            ranges.append(f"{name} {form(min(means))} to {form(max(means))}")
        told.append(f"{mixer} {', '.join(ranges)}")
    return f"{view}, below the lowest layer, over all sharpness: {'; '.join(told)}."


def draw_over_sharpness(done: Sequence[Finished], view: str, name: str, ax: Any) -> None:
    sharpness = sharpness_of(done)
    for i, mixer in enumerate(distinct(done, "mixer")):
        curves = [
            [max(below(view, j, name)(cell.numbers), FLOOR) for j in range(len(sharpness))]
            for cell in select(done, mixer=mixer)
        ]
        band(ax, sharpness, curves, **line(i, mixer))
    ax.set(
        xscale="log",
        xlabel="sharpness: deviation of logits; |k|² / λ",
        title=f"{view}, below the lowest layer",
    )
    if name == "norm":
        ax.set(yscale="log", ylabel="norm of the gradient")
        if ax.get_ylim()[0] < FLOOR:
            ax.text(0.98, 0.09, f"cut at {FLOOR:.0e}", transform=ax.transAxes, ha="right")
    else:
        ax.set(ylabel="effective rank", ylim=(0, 1.05 * width(done)))


def draw_over_depth(done: Sequence[Finished], view: str, ax: Any) -> None:
    """At the sharpest."""
    last = len(sharpness_of(done)) - 1
    depth = len(done[0].numbers["found"][view][last]["rank"])
    for i, mixer in enumerate(distinct(done, "mixer")):
        curves = [
            [below(view, last, "rank", layer)(cell.numbers) for layer in range(depth)]
            for cell in select(done, mixer=mixer)
        ]
        band(ax, range(depth), curves, **line(i, mixer))
    ax.set(
        xlabel="layer (the gradient comes from the right)",
        ylabel="effective rank below it",
        title=f"{view}, sharpness {sharpness_of(done)[last]:g}",
        xticks=range(depth),
        ylim=(0, 1.05 * width(done)),
    )


def width(done: Sequence[Finished]) -> int:
    """Of the stream, which no rank exceeds."""
    return int(done[0].numbers["dim"])
