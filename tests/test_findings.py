"""Every number in docs/findings.md stands in the report that its section names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
SECTIONS = re.findall(r"^## (.+)\n((?:(?!## ).*\n)+)", TEXT, re.MULTILINE)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?")


@pytest.mark.parametrize(("title", "text"), SECTIONS, ids=[title for title, _ in SECTIONS])
def test_numbers_are_those_of_the_reports(title: str, text: str) -> None:
    named = re.findall(r"`(results/[^`]+)`", text)
    assert named, f"{title} names no report."
    reports = " ".join((ROOT / name / "README.md").read_text(encoding="utf-8") for name in named)
    known = {number.rstrip(",") for number in NUMBER.findall(reports)}
    said = {number.rstrip(",") for number in NUMBER.findall(re.sub(r"`[^`]*`", "", text))}
    assert not said - known, f"{sorted(said - known)} of {title!r} are not in {named}."
