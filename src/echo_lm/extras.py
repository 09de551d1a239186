"""Optional packages: imported when they are needed, and missed in one clear sentence."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def need(module: str, extra: str) -> Any:
    """Import `module`, which `pip install echo-lm[extra]` brings."""
    try:
        return import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise ValueError(
            f"This needs {package}, which is not installed: pip install 'echo-lm[{extra}]'."
        ) from None
