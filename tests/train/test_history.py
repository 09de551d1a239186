"""A metrics file is JSON, whatever the numbers, and gives back what was written."""

from __future__ import annotations

import json
from math import inf, isnan, nan
from pathlib import Path

from echo_lm.train.history import METRICS_FILE, append_records, records_until, write_records


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def test_what_is_not_finite_is_null_in_the_file_and_no_number_when_read(tmp_path: Path) -> None:
    layer = {"lambda_min": nan, "coefficients": [[1.0, -inf]]}
    append_records(tmp_path, [{"step": 1, "loss": 2.5}, {"step": 2, "ska": {"blocks.0": layer}}])
    lines = (tmp_path / METRICS_FILE).read_text().splitlines()
    told = [json.loads(line, parse_constant=refuse) for line in lines]
    empty = {"lambda_min": None, "coefficients": [[1.0, None]]}
    assert told == [{"step": 1, "loss": 2.5}, {"step": 2, "ska": {"blocks.0": empty}}]
    first, second = records_until(tmp_path, 2)
    assert first == {"step": 1, "loss": 2.5}
    assert isnan(second["ska"]["blocks.0"]["lambda_min"])
    assert isnan(second["ska"]["blocks.0"]["coefficients"][0][1])
    write_records(tmp_path, [first, second])
    assert (tmp_path / METRICS_FILE).read_text().splitlines() == lines
