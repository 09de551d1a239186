"""The record of a measurement: what was run, where, and what came out."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any

import torch

import echo_lm

HERE = Path(__file__).parent


def circumstances() -> dict[str, Any]:
    """When, on what and of which code. Taken before measuring, so that `load` is that of others."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": {
            "commit": os.environ.get("GIT_COMMIT") or _git("rev-parse", "HEAD") or "unknown",
            "dirty": bool(_git("status", "--porcelain", "--", ":/", ":!/results")),
        },
        "hardware": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory_gib": round(
                os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1
            ),
            "load": round(os.getloadavg()[0], 2),
            "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "versions": {
            "echo_lm": echo_lm.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def writable_folder(out: Path) -> Path:
    """The folder for what comes out, made if need be; found out before the work."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"out must be a folder to write to, got {out} ({error}).") from None
    if not os.access(out, os.W_OK):
        raise ValueError(f"out must be a folder to write to, got {out}, which is read-only.")
    return out


def writable_file(out: Path) -> Path:
    """The same for a single file."""
    if out.is_dir():
        raise ValueError(f"out must be a file to write, got the folder {out}.")
    return writable_folder(out.parent) / out.name


def rounded(value: float) -> float:
    """Four digits: curves are for reading."""
    return float(f"{value:.4g}")


def sayable(value: Any) -> Any:
    """The same for JSON, which has no word for a number that is not finite but null."""
    if isinstance(value, Mapping):
        return {name: sayable(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [sayable(entry) for entry in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def write_json(path: Path, entries: dict[str, Any]) -> None:
    """Write a record whole or not at all, so that a full disk costs no earlier one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    text = json.dumps(sayable(entries), indent=2, allow_nan=False)
    unfinished.write_text(text + "\n", encoding="utf-8")
    unfinished.replace(path)


def _git(*arguments: str) -> str:
    """What git says of the repository this file belongs to; an installed copy belongs to none."""
    if not _run_git("ls-files", Path(__file__).name):
        return ""
    return _run_git(*arguments)


def _run_git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=HERE, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
