"""Cells run once, are kept, and are never mixed with those of another protocol."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from echo_lm.experiments import base
from echo_lm.experiments.base import Experiment, Finished, Table, Workbench
from echo_lm.experiments.runner import choose, parse_share, reproduce
from echo_lm.plots import figure, line


class Squares(Experiment):
    """Squares of a few numbers, and a count of how often one was computed."""

    name, title, source = "squares", "Squares", "ours"

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self.runs: list[tuple[int, int]] = []
        self.interrupt_at: int | None = None

    def protocol(self, scale: base.Scale) -> dict[str, Any]:
        return {"offset": self.offset}

    def cells(self, scale: base.Scale) -> list[base.Settings]:
        return [{"x": x} for x in range(2 if scale == "smoke" else 4)]

    def run(
        self,
        protocol: Mapping[str, Any],
        settings: base.Settings,
        seed: int,
        bench: Workbench,
    ) -> dict[str, Any]:
        if settings["x"] == self.interrupt_at:
            raise KeyboardInterrupt
        self.runs.append((settings["x"], seed))
        return {"y": settings["x"] ** 2 + seed + protocol["offset"]}

    def tables(self, done: Sequence[Finished]) -> list[Table]:
        rows = [
            [str(x), base.over_seeds(base.select(done, x=x), lambda numbers: numbers["y"])]
            for x in base.distinct(done, "x")
        ]
        return [Table("Squares", ["x", "y"], rows)]

    def draw(self, done: Sequence[Finished], path: Path) -> None:
        with figure(path) as axes:
            points = [(cell.settings["x"], cell.numbers["y"]) for cell in done]
            axes[0, 0].plot(*zip(*points, strict=True), **line(0, "y"))


def go(experiment: Squares, out: Path, **changes: Any) -> Path:
    options: dict[str, Any] = {"scale": "full", "seeds": 2, "share": "1/1"} | changes
    return reproduce(experiment, out=out, device="cpu", console=Console(quiet=True), **options)


def test_writes_records_tables_and_a_figure(tmp_path: Path) -> None:
    folder = go(Squares(), tmp_path)
    assert folder == tmp_path / "squares" / "full"
    record = json.loads((folder / "cells" / "x=3,seed=1.json").read_text())
    assert record["numbers"] == {"y": 10}
    assert {"protocol", "settings", "seed", "git", "hardware", "versions", "date"} <= set(record)
    text = (folder / "README.md").read_text()
    assert "| 3 | 9.5 ± 0.707 |" in text
    assert "have not run" not in text
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_call_goes_on_where_it_stopped(tmp_path: Path) -> None:
    experiment = Squares()
    experiment.interrupt_at = 2
    with pytest.raises(KeyboardInterrupt):
        go(experiment, tmp_path)
    assert experiment.runs == [(0, 0), (1, 0)]
    experiment.interrupt_at = None
    go(experiment, tmp_path)
    assert sorted(experiment.runs) == [(x, seed) for x in range(4) for seed in range(2)]


def test_shares_are_disjoint_and_say_what_is_missing(tmp_path: Path) -> None:
    first, second = Squares(), Squares()
    folder = go(first, tmp_path, share="1/2")
    assert "**4 of 8 have not run yet.**" in (folder / "README.md").read_text()
    go(second, tmp_path, share="2/2")
    assert not set(first.runs) & set(second.runs)
    assert len(first.runs + second.runs) == 8
    assert "have not run" not in (folder / "README.md").read_text()


def test_only_some_cells_run_and_the_report_says_what_is_missing(tmp_path: Path) -> None:
    experiment = Squares()
    folder = go(experiment, tmp_path, only=["x=1", "x=3"])
    assert sorted(experiment.runs) == [(x, seed) for x in (1, 3) for seed in range(2)]
    assert "**4 of 8 have not run yet.**" in (folder / "README.md").read_text()


def test_settings_of_different_names_must_all_fit() -> None:
    cells = [{"x": x, "y": y} for x in (1, 2) for y in ("a", "b")]
    assert choose(cells, ["x=2", "y=a"]) == [{"x": 2, "y": "a"}]
    assert choose(cells, []) == cells


@pytest.mark.parametrize(
    ("only", "said"),
    [("z=1", "No cell has a setting 'z'; there are x"), ("x=9", "No cell has x=9; x is one of 0")],
)
def test_refuses_cells_that_there_are_none_of(only: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        go(Squares(), tmp_path, only=[only])


def test_refuses_cells_of_another_protocol(tmp_path: Path) -> None:
    go(Squares(), tmp_path)
    with pytest.raises(ValueError, match=r"was run with offset=0, this version has 1"):
        go(Squares(offset=1), tmp_path)


def test_names_a_damaged_record(tmp_path: Path) -> None:
    folder = go(Squares(), tmp_path)
    (folder / "cells" / "x=3,seed=1.json").write_text("{")
    with pytest.raises(ValueError, match=r"x=3,seed=1\.json is not a cell's record"):
        go(Squares(), tmp_path)


@pytest.mark.parametrize("share", ["", "0/2", "3/2", "a/b", "1"])
def test_refuses_a_share_that_is_none(share: str) -> None:
    with pytest.raises(ValueError, match="share must be like"):
        parse_share(share)


def test_where_nothing_can_be_written_is_said_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    experiment = Squares()
    with pytest.raises(ValueError, match=r"out must be a folder to write to, got .*file"):
        go(experiment, tmp_path / "file")
    assert not experiment.runs


def test_an_unknown_experiment_is_named() -> None:
    from echo_lm.experiments import find

    with pytest.raises(ValueError, match="There is no experiment 'table-9'"):
        find("table-9")


def test_no_seed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="seeds must be at least 1, got 0"):
        go(Squares(), tmp_path, seeds=0)


def test_a_bar_inside_a_cell_does_not_end_it() -> None:
    table = Table("", ["|q|", "y"], [["1", "|k|²"]])
    assert table.markdown().splitlines()[2:] == [
        r"| \|q\| | y |",
        "| --- | ---: |",
        r"| 1 | \|k\|² |",
    ]
