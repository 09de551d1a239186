"""What is measured is kept, and kept apart from what another code or machine would measure."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from echo_lm.bench import runner
from echo_lm.bench.record import Row, Target
from echo_lm.bench.runner import Bench, Cell, Tables, Tell, run

from .runs import measured

Names = Sequence[str]


def bench(cells: Names, done: list[str], *, config: Any = None, stop_at: str = "") -> Bench:
    """Cells that say when they are measured."""

    def measure(name: str) -> Callable[[Tell], list[Row]]:
        def work(tell: Tell) -> list[Row]:
            tell("is measured")
            if name == stop_at:
                raise KeyboardInterrupt
            done.append(name)
            return [{"what": name, "ms": 1.5, "note": None}, {"what": "[b]", "ms": 2, "note": "x"}]

        return work

    return Bench(
        name="trial",
        device="cpu",
        config=config or {"rounds": 1},
        seed=0,
        cells=[Cell(name, measure(name)) for name in cells],
        targets=lambda tables: [Target("tables", float(len(tables)), at_least=2)],
        draw=draw,
    )


def draw(tables: Tables, path: Path) -> None:
    path.write_bytes(b"\x89PNG" + " ".join(tables).encode())


def test_writes_circumstances_numbers_and_targets(tmp_path: Path) -> None:
    record, said = measured(bench(["one", "two"], []), tmp_path)
    assert record["benchmark"] == "trial"
    assert record["device"] == "cpu"
    assert record["seed"] == 0
    assert record["config"] == {"rounds": 1}
    assert {"date", "git", "hardware", "versions", "code"} <= set(record)
    assert record["numbers"]["two"][0] == {"what": "two", "ms": 1.5, "note": None}
    assert record["targets"] == [{"name": "tables", "value": 2.0, "at_least": 2, "met": True}]
    assert set(record["measured"]) == {"one", "two"}
    assert "tables: 2 >= 2, met" in said
    assert "trial-cpu.json" in said
    assert "2/2  two" in said


def test_a_second_call_measures_what_is_missing(tmp_path: Path) -> None:
    done: list[str] = []
    measured(bench(["one", "two"], done), tmp_path)
    written = (tmp_path / "trial-cpu.json").read_bytes()
    _, said = measured(bench(["one", "two"], done), tmp_path)
    assert done == ["one", "two"]
    assert "2 of 2 tables are in" in said
    assert (tmp_path / "trial-cpu.json").read_bytes() == written
    record, _ = measured(bench(["two", "three"], done), tmp_path)
    assert done == ["one", "two", "three"]
    assert set(record["numbers"]) == {"one", "two", "three"}


def test_an_interrupted_call_keeps_what_is_done(tmp_path: Path) -> None:
    done: list[str] = []
    said = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        run(bench(["one", "two"], done, stop_at="two"), tmp_path, Console(file=said, width=160))
    assert "1 of 2 tables are kept" in said.getvalue()
    record = json.loads((tmp_path / "trial-cpu.json").read_text())
    assert set(record["numbers"]) == {"one"}
    assert record["targets"][0]["met"] is False
    measured(bench(["one", "two"], done), tmp_path)
    assert done == ["one", "two"]


def test_other_settings_or_code_begin_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    measured(bench(["one"], done), tmp_path)
    record, said = measured(bench(["two"], done, config={"rounds": 2}), tmp_path)
    assert "trial-cpu.json is of other code, settings or hardware: it will be kept as" in said
    assert set(record["numbers"]) == {"two"}
    monkeypatch.setattr(runner, "code_digest", lambda: "other")
    measured(bench(["two"], done, config={"rounds": 2}), tmp_path)
    assert done == ["one", "two", "two"]


def test_what_another_call_replaces_is_kept_with_its_plot(tmp_path: Path) -> None:
    path, full = tmp_path / "trial-cpu.json", ["one", "two"]
    measured(bench(full, []), tmp_path)
    before, plot = path.read_bytes(), path.with_suffix(".png").read_bytes()
    stopped = bench(["one"], [], config={"rounds": 2}, stop_at="one")
    with pytest.raises(KeyboardInterrupt):
        run(stopped, tmp_path, Console(file=io.StringIO()))
    assert path.read_bytes() == before  # nothing has been measured to take its place
    _, said = measured(bench(["one"], [], config={"rounds": 2}), tmp_path)
    (kept,) = set(tmp_path.glob("*.json")) - {path}
    assert f"it will be kept as {kept}." in said
    assert kept.read_bytes() == before
    assert kept.with_suffix(".png").read_bytes() == plot
    measured(bench(["one"], [], config={"rounds": 3}), tmp_path)
    assert len(list(tmp_path.glob("*.json"))) == len(list(tmp_path.glob("*.png"))) == 3


def test_load_is_not_the_machine(tmp_path: Path) -> None:
    done: list[str] = []
    measured(bench(["one"], done), tmp_path)
    path = tmp_path / "trial-cpu.json"
    record = json.loads(path.read_text())
    record["hardware"]["load"] += 10
    path.write_text(json.dumps(record))
    measured(bench(["one"], done), tmp_path)
    record["hardware"]["processor"] = "another"
    path.write_text(json.dumps(record))
    measured(bench(["one"], done), tmp_path)
    assert done == ["one", "one"]


@pytest.mark.parametrize("found", ["nothing of the kind", "[1]", '{"numbers": {}}'])
def test_a_file_that_is_no_record_is_not_overwritten(tmp_path: Path, found: str) -> None:
    (tmp_path / "trial-cpu.json").write_text(found)
    with pytest.raises(ValueError, match=r"is not the record of a benchmark; remove it"):
        run(bench(["one"], []), tmp_path, Console(file=io.StringIO()))
    assert (tmp_path / "trial-cpu.json").read_text() == found


def test_the_code_is_told_apart_without_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "__init__.py").write_text("a = 1")
    monkeypatch.setattr(runner.echo_lm, "__file__", str(tmp_path / "__init__.py"))
    before = runner.code_digest()
    assert runner.code_digest() == before
    (tmp_path / "__init__.py").write_text("a = 2")
    assert runner.code_digest() != before


@pytest.mark.parametrize("shape", ["16", "x", "0x8", "ax3", "1x2x3"])
def test_a_shape_that_is_none(shape: str) -> None:
    with pytest.raises(ValueError, match="A shape is like"):
        runner.parse_shape(shape)
    assert runner.parse_shape("16x2048") == (16, 2048)


@pytest.mark.parametrize(
    ("target", "met"),
    [
        (Target("", 1.0, at_most=1.0), True),
        (Target("", 1.1, at_most=1.0), False),
        (Target("", 1.1, at_least=1.0), True),
        (Target("", 0.9, at_least=1.0), False),
        (Target("", float("nan"), at_least=1.0), False),
    ],
)
def test_targets(target: Target, met: bool) -> None:
    assert target.met is met
