"""One thread, so that runs in parallel do not fight for cores, and the same numbers every time."""

from __future__ import annotations

import os

import pytest
import torch

# Read when a kernel is defined: without a GPU, Triton's interpreter runs them.
os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
