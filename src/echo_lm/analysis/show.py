"""What was read of a model's layers, as a table, as figures, and as a record."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from rich.table import Table
from torch import Tensor

from echo_lm.analysis.filtering import filter_response
from echo_lm.analysis.model import LayerReading
from echo_lm.plots import COLOURS, band, figure, line

QUANTILES = (0.1, 0.5, 0.9)
MOST_COLUMNS = 4
"""Of disks in a row."""
FINE = 161
"""Points across a disk."""

Kinds = Mapping[str, Bool[Tensor, "b t"]]


def title_of(reading: LayerReading) -> str:
    layer = reading.layer
    sees = {"exact": "exact", "chunk": f"chunks of {layer.chunk_size}", "False": "all at once"}
    return (
        f"Block {reading.block}: SKA, rank {layer.rank}, values of width {layer.value_dim}, "
        f"{sees[str(layer.causal)]}, {layer.filter} filter"
    )


def remarks(reading: LayerReading) -> list[str]:
    """What a person should know before looking at the numbers."""
    said = []
    if reading.silent:
        said.append("It is silent: its output projection is zero, as at the start of training.")
    if reading.unread:
        said.append(
            f"No query has seen any of this: {reading.counts[-1]:,} tokens do not fill a chunk of "
            f"{reading.layer.chunk_size}."
        )
    return said


def table_of(reading: LayerReading, kinds: Kinds) -> Table:
    """A line for each head. What depends on the sequence is the mean over sequences, at the end."""
    table = Table(title=title_of(reading), title_justify="left")
    table.add_column("Head", justify="right")
    orders = reading.coefficients.shape[1]
    for name in (
        "ridge",
        "λ_min",
        "cond",
        "max |eig|",
        "σ_max",
        *(f"order {j}" for j in range(orders)),
        "gain",
        f"rank of {min(reading.layer.rank, reading.layer.value_dim)}",
        *(f"|k| {kind}" for kind in kinds),
    ):
        table.add_column(name, justify="right")
    for head in summary(reading, kinds):
        table.add_row(
            str(head["head"]),
            f"{head['ridge']:.2g}",
            f"{head['lambda_min']:.2g}",
            f"{head['condition']:.2g}",
            f"{head['largest eigenvalue']:.3f}",
            f"{head['operator norm']:.3f}",
            *(f"{share:.0%}" for share in head["order shares"]),
            f"{head['gain']:.2f}",
            f"{head['jacobian rank']:.1f}",
            *(f"{of_kind[1]:.3g}" for of_kind in head["key norms"].values()),
        )
    return table


def summary(reading: LayerReading, kinds: Kinds) -> list[dict[str, Any]]:
    """The numbers of each head at the end, means over sequences."""
    ends = {
        "ridge": reading.ridge[..., -1],
        "lambda_min": reading.smallest[..., -1],
        "condition": reading.condition[..., -1],
        "largest eigenvalue": reading.eigenvalues.abs().amax(-1),
        "operator norm": reading.operator_norm,
        "jacobian rank": reading.jacobian_rank[..., -1],
    }
    return [
        {
            "head": head,
            **{name: float(values[:, head].mean()) for name, values in ends.items()},
            "coefficients": reading.coefficients[head].tolist(),
            "order shares": reading.shares[head].tolist(),
            "gain": float(reading.gain[head]),
            "key norms": {
                kind: quantiles(reading.key_norms[..., head], where)
                for kind, where in kinds.items()
            },
        }
        for head in range(reading.layer.heads)
    ]


def quantiles(norms: Float[Tensor, "b t"], where: Bool[Tensor, "b t"]) -> list[float]:
    """A tenth of the keys of a kind is shorter, half is, nine tenths are."""
    return torch.quantile(norms[where], torch.tensor(QUANTILES, dtype=norms.dtype)).tolist()


def record(reading: LayerReading, kinds: Kinds) -> dict[str, Any]:
    """Everything of a layer, for a file."""
    layer = reading.layer
    along = {
        "ridge": reading.ridge,
        "lambda_min": reading.smallest,
        "condition": reading.condition,
        "jacobian rank": reading.jacobian_rank,
    }
    heads = summary(reading, kinds)
    for head in heads:
        place = head["head"]
        values = torch.view_as_real(reading.eigenvalues[:, place])
        head["eigenvalues"] = values.tolist()
        head["along"] = {name: curves[:, place].tolist() for name, curves in along.items()}
    return {
        "block": reading.block,
        "rank": layer.rank,
        "value width": layer.value_dim,
        "causal": layer.causal,
        "filter": layer.filter,
        "relative ridge": layer.relative_ridge,
        "remarks": remarks(reading),
        "tokens read": list(reading.counts),
        "key norm quantiles": list(QUANTILES),
        "heads": heads,
    }


def draw_spectra(reading: LayerReading, path: Path) -> None:
    """The eigenvalues x of each head's A_w, over what the filter makes of every place x."""
    heads = reading.layer.heads
    columns = min(heads, MOST_COLUMNS)
    with figure(path, rows=-(-heads // columns), columns=columns, size=(2.5, 2.6)) as axes:
        panels = axes.flatten()
        for head, ax in enumerate(panels[:heads]):
            image = draw_disk(reading, head, ax)
        for ax in panels[heads:]:
            ax.set_visible(False)
        bar = axes[0, 0].figure.colorbar(image, ax=axes, shrink=0.8)
        bar.set_label("|Σ c_j x^j|, largest = 1")


def draw_disk(reading: LayerReading, head: int, ax: Any) -> Any:
    side = torch.linspace(-1, 1, FINE, dtype=torch.float64)
    grid = torch.complex(*torch.meshgrid(side, side, indexing="xy"))
    coef, gain = reading.coefficients[head], reading.gain[head].clamp_min(1e-30)
    response = filter_response(coef.to(grid.dtype), grid.flatten()).abs().reshape(grid.shape) / gain
    response[grid.abs() > 1] = torch.nan
    image = ax.imshow(
        response.numpy(), extent=(-1, 1, -1, 1), origin="lower", cmap="cividis", vmin=0, vmax=1
    )
    angle = torch.linspace(0, 2 * torch.pi, 200).numpy()
    ax.plot(np.cos(angle), np.sin(angle), color="black", linewidth=0.8)
    values = reading.eigenvalues[:, head].flatten().numpy()
    ax.plot(
        values.real,
        values.imag,
        linestyle="none",
        marker="o",
        markersize=3,
        markerfacecolor="white",
        markeredgecolor="black",
        markeredgewidth=0.5,
    )
    orders = ", ".join(f"{share:.0%}" for share in reading.shares[head])
    ax.set(
        aspect="equal",
        xlim=(-1.08, 1.08),
        ylim=(-1.08, 1.08),
        xticks=(-1, 0, 1),
        yticks=(-1, 0, 1),
        xlabel="Re x",
        ylabel="Im x",
        title=f"head {head}\norders {orders}",
    )
    ax.grid(visible=False)
    return image


def draw_layer(reading: LayerReading, kinds: Kinds, path: Path) -> None:
    """Conditioning and query Jacobian along the sequence; filter, orders and key norms by head."""
    with figure(path, rows=2, columns=3, size=(3.3, 2.7)) as axes:
        smallest, condition, rank, response, orders, norms = axes.flatten()
        draw_along(reading, reading.smallest, smallest)
        smallest.set(yscale="log", ylabel="λ_min", title="smallest eigenvalue of G + ridge I")
        draw_along(reading, reading.condition, condition)
        condition.set(yscale="log", ylabel="λ_max / λ_min", title="condition number of G + ridge I")
        draw_along(reading, reading.jacobian_rank, rank)
        most = min(reading.layer.rank, reading.layer.value_dim)
        rank.set(ylabel="effective rank", title=f"query Jacobian, rank at most {most}")
        rank.set_ylim(bottom=0)
        draw_response(reading, response)
        draw_orders(reading, orders)
        draw_norms(reading, kinds, norms)
        smallest.legend(fontsize=7)


def draw_along(reading: LayerReading, values: Float[Tensor, "b h n"], ax: Any) -> None:
    """Over the tokens read, mean over sequences: a line for each head, while lines differ."""
    curves = values.mean(0)
    if reading.layer.heads <= len(COLOURS):
        for head, curve in enumerate(curves):
            every = max(1, len(curve) // 8)
            ax.plot(reading.counts, curve.numpy(), **line(head, f"head {head}"), markevery=every)
    else:
        band(ax, reading.counts, curves.tolist(), **line(0, "mean ± deviation of heads"))
    ax.set(xscale="log", xlabel="tokens read")


def draw_response(reading: LayerReading, ax: Any) -> None:
    """On the real line, where a mode keeps or changes its sign."""
    place = torch.linspace(-1, 1, FINE, dtype=torch.float64)
    for head, coef in enumerate(reading.coefficients):
        look = line(head) | {"marker": None}
        ax.plot(place.numpy(), filter_response(coef, place).numpy(), **look)
    ax.set(
        xlabel="eigenvalue x, on the real line",
        ylabel="Σ c_j x^j",
        title="what the filter makes of it",
    )


def draw_orders(reading: LayerReading, ax: Any) -> None:
    heads = range(reading.layer.heads)
    below = np.zeros(len(heads))
    for order, shares in enumerate(reading.shares.T.numpy()):
        ax.bar(
            heads,
            shares,
            bottom=below,
            color=COLOURS[order % len(COLOURS)],
            edgecolor="white",
            hatch=("", "//", "..", "xx")[order % 4],
            label=f"order {order}",
        )
        below = below + shares
    ax.set(
        xlabel="head",
        ylabel="|c_j| / Σ |c_j|",
        title="orders used",
        xticks=heads,
        ylim=(0, 1.25),
        yticks=(0, 0.5, 1),
    )
    ax.legend(ncols=len(reading.shares.T), loc="upper center", fontsize=7)


def draw_norms(reading: LayerReading, kinds: Kinds, ax: Any) -> None:
    """Medians, with bars from the first to the last tenth."""
    heads = range(reading.layer.heads)
    for i, (kind, where) in enumerate(kinds.items()):
        found = [quantiles(reading.key_norms[..., head], where) for head in heads]
        low, middle, high = np.array(found).T
        ax.errorbar(
            np.array(heads) + 0.2 * (i - (len(kinds) - 1) / 2),
            middle,
            yerr=(middle - low, high - middle),
            capsize=2,
            **line(i, kind) | {"linestyle": "none"},
        )
    ax.set(xlabel="head", ylabel="|k|", title="key norms (median, 80% of keys)", xticks=heads)
    ax.set_ylim(bottom=0)
    if len(kinds) > 1:
        ax.legend(fontsize=7)
