"""Every check in docs/paper-notes.md runs: a block's claims are its assertions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

NOTES = Path(__file__).parents[1] / "docs" / "paper-notes.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", NOTES.read_text("utf-8"), re.DOTALL | re.MULTILINE)


@pytest.fixture(autouse=True)
def _default_dtype_restored() -> object:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("block", BLOCKS[1:])
def test_check(block: str) -> None:
    """Each needs only the first block before it."""
    exec(compile(f"{BLOCKS[0]}\n{block}", str(NOTES), "exec"), {})


def test_every_block_checks_something() -> None:
    assert all("assert" in block for block in BLOCKS[1:])
