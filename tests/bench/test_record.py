"""What a user reads in a terminal of 80 columns."""

from __future__ import annotations

import io
import re

from rich.console import Console

from echo_lm.bench.record import Findings, Row, show


def shown(rows: list[Row], width: int = 80) -> list[str]:
    said = io.StringIO()
    show("trial", Findings({}, 0, {"[all] sizes": rows}, []), Console(file=said, width=width))
    return said.getvalue().splitlines()


def decoding(name: str, **told: object) -> Row:
    numbers = {"context": 1048576, "ms": 0.00123, "tokens/s": 123456.0, "MiB": 98765.4}
    return {"what": name, **numbers, "x shortest": 1.05, "x attention": 12.3, "note": None, **told}


def test_a_reason_is_told_whole_once() -> None:
    reason = "did not run: " + "backend [triton] needs a GPU that is not there, " * 4 + "or less"
    rows = [decoding("a"), decoding("b", ms=None, note=reason), decoding("c", ms=None, note=reason)]
    lines = shown([*rows, decoding("d", note="launched from Python")])
    assert lines[1].rstrip() == "trial: [all] sizes"
    assert lines[-3:-1] == [f"(1) {reason}", "(2) launched from Python"]
    numbers = {line[:1]: line.split()[-1] for line in lines if re.match("[a-d] ", line)}
    assert numbers == {"a": "12.3", "b": "1", "c": "1", "d": "2"}


def test_numbers_and_headings_are_whole_and_names_are_folded() -> None:
    name = "a-name-that-takes-as-much-room-as-half-of-all"
    lines = shown([decoding(name, note="x")])
    assert all(len(line) <= 80 for line in lines)
    text = "\n".join(lines)
    assert "…" not in text
    for part in ("1,048,576", "0.00123", "123,456", "98,765", "tokens/s", "shortest", "attention"):
        assert part in text
    assert "".join(re.findall(r"^[a-z-]+", "\n".join(lines[4:]), re.MULTILINE)) == name


def test_columns_that_tell_nothing_are_left_out() -> None:
    lines = shown([decoding("a", MiB=None), decoding("b", MiB=None)])
    assert not any("MiB" in line or "note" in line for line in lines)
    assert any("tokens/s" in line for line in lines)
