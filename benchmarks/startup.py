"""What a user waits for before anything happens: imports beyond torch's own, and `--help`."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path
from statistics import median

from echo_lm.bench.record import Findings, Row, Target
from echo_lm.bench.timing import interleaved, seconds

ROUNDS = 9
IMPORTS = """
import time
start = time.perf_counter()
import torch
loaded = time.perf_counter()
import echo_lm
imported = time.perf_counter()
echo_lm.EchoLM
print(loaded - start, imported - loaded, time.perf_counter() - loaded)
"""
COMMAND = Path(sysconfig.get_path("scripts")) / "echo-lm"


def import_times() -> list[float]:
    """Seconds for torch, then for echo_lm, then for echo_lm and its EchoLM."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True
    )
    return [float(word) for word in done.stdout.split()]


def help_time() -> list[float]:
    return [seconds(lambda: subprocess.run([COMMAND, "--help"], capture_output=True, check=True))]


def measure() -> Findings:
    found = interleaved({"imports": import_times, "help": help_time}, ROUNDS)
    torch_s, echo_s, model_s = map(list, zip(*found["imports"], strict=True))
    help_s = [once for (once,) in found["help"]]
    rows: list[Row] = [
        {
            "what": what,
            "median ms": 1e3 * median(times),
            "fastest ms": 1e3 * min(times),
            "slowest ms": 1e3 * max(times),
        }
        for what, times in {
            "import torch": torch_s,
            "import echo_lm, after torch": echo_s,
            "the same, and use EchoLM": model_s,
            "echo-lm --help": help_s,
        }.items()
    ]
    return Findings(
        config={"rounds": ROUNDS, "times": "medians over fresh processes, files in cache"},
        seed=None,
        tables={"time": rows},
        targets=[
            Target("import echo_lm beyond torch, ms", 1e3 * median(echo_s), at_most=300),
            Target("EchoLM beyond torch, ms", 1e3 * median(model_s), at_most=300),
            Target("echo-lm --help, ms", 1e3 * median(help_s), at_most=500),
        ],
    )
