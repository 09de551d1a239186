"""Figures are written, and each line of one looks different."""

from __future__ import annotations

from pathlib import Path

from echo_lm.plots import COLOURS, figure, line


def test_writes_a_figure(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "figure.png"
    with figure(path, rows=2, columns=2) as axes:
        assert axes.shape == (2, 2)
        axes[0, 0].plot([0, 1], [0, 1], **line(0, "a"))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_lines_differ() -> None:
    looks = [line(i) for i in range(len(COLOURS))]
    for key in ("color", "marker", "linestyle"):
        assert len({look[key] for look in looks}) == len(looks)
    assert line(len(COLOURS)) == looks[0]
