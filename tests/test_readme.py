"""What README.md says is run and looked up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
MAP = re.findall(r"^\| `([^`]+)`", README.split("## Where to find what")[-1], re.MULTILINE)


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippets_run(snippet: str) -> None:
    exec(compile(snippet, "README.md", "exec"), {})


def test_the_first_snippet_ends_in_an_assert() -> None:
    assert SNIPPETS[0].rstrip().splitlines()[-1].startswith("assert ")


@pytest.mark.parametrize("path", MAP)
def test_the_map_matches_the_tree(path: str) -> None:
    assert (ROOT / path).exists()


def test_the_map_is_complete() -> None:
    """Every part of the package and every folder at the top is on the map."""
    source = ROOT / "src" / "echo_lm"
    parts = [p for p in source.iterdir() if p.is_dir() and (p / "__init__.py").exists()]
    parts += [ROOT / name for name in ("tests", "benchmarks", "results", "docs")]
    shown = [ROOT / path for path in MAP]
    for part in parts:
        assert any(path == part or part in path.parents for path in shown), part


def test_every_link_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", README)
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert not missing
