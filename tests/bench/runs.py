"""What the tests of benchmarks share."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from echo_lm.bench.runner import Bench, run


def measured(bench: Bench, out: Path) -> tuple[dict[str, Any], str]:
    """The record, and what was said."""
    said = io.StringIO()
    path = run(bench, out, Console(file=said, width=160))
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    record: dict[str, Any] = json.loads(path.read_text())
    return record, said.getvalue()
