"""How every figure looks: legible in print, in grey, and to colour-blind readers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from echo_lm.extras import need

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, which differ to every eye; markers and dashes repeat the difference."""
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))

STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "savefig.dpi": 200,
}


@contextmanager
def figure(
    path: str | Path, *, rows: int = 1, columns: int = 1, size: tuple[float, float] = (3.4, 2.6)
) -> Iterator[Any]:
    """A grid of axes (an array `[rows, columns]`), each `size` inches, written to `path`.

    >>> with figure("decay.png") as axes:
    ...     axes[0, 0].plot(x, y, **line(0, "SKA"))
    """
    matplotlib = need("matplotlib", "plot")
    with matplotlib.rc_context(STYLE):
        # A Figure of its own: no window, no global state, nothing to close.
        drawn = need("matplotlib.figure", "plot").Figure(
            figsize=(columns * size[0], rows * size[1]), layout="constrained"
        )
        yield drawn.subplots(rows, columns, squeeze=False)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        drawn.savefig(path)


def line(i: int, label: str | None = None) -> dict[str, Any]:
    """Colour, marker and dash of the i-th line of a figure."""
    style = {"color": COLOURS, "marker": MARKERS, "linestyle": DASHES}
    picked: dict[str, Any] = {key: options[i % len(options)] for key, options in style.items()}
    return {**picked, "label": label}


def band(ax: Any, x: Sequence[float], curves: Sequence[Sequence[float]], **look: Any) -> None:
    """The mean of the curves of several seeds, and a standard deviation to either side."""
    middle = [mean(points) for points in zip(*curves, strict=True)]
    spread = [stdev(points) if len(points) > 1 else 0.0 for points in zip(*curves, strict=True)]
    ax.plot(x, middle, **look)
    low, high = ([m + sign * s for m, s in zip(middle, spread, strict=True)] for sign in (-1, 1))
    # On a logarithmic axis a band must not reach zero.
    low = [max(at, 0.05 * m) if m > 0 else at for at, m in zip(low, middle, strict=True)]
    ax.fill_between(x, low, high, color=look.get("color"), alpha=0.2, linewidth=0)
