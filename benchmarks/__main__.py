"""Run benchmarks by name, or all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console

from benchmarks import decode, parallel, startup, steps
from echo_lm.bench.record import Findings, save, show
from echo_lm.results import circumstances

RESULTS = Path(__file__).parents[1] / "results"

BENCHMARKS: dict[str, Callable[[], Findings]] = {
    "startup": startup.measure,
    "parallel": parallel.measure,
    "decode": decode.measure,
}
ON_A_GPU: dict[str, Callable[[], Findings]] = {"steps": steps.measure}


def main(names: list[str]) -> int:
    """Measure, show and write each; 0 if every target was met."""
    known = BENCHMARKS | ON_A_GPU
    unknown = [name for name in names if name not in known]
    if unknown:
        print(
            f"There is no benchmark {', '.join(unknown)}; there are {', '.join(known)}.",
            file=sys.stderr,
        )
        return 2
    on_a_gpu = [name for name in names if name in ON_A_GPU]
    if on_a_gpu and not torch.cuda.is_available():
        print(f"For {', '.join(on_a_gpu)} a CUDA device is needed; none is here.", file=sys.stderr)
        return 2
    console = Console()
    met = True
    for name in names or BENCHMARKS:
        taken = circumstances()
        with console.status(f"Measuring {name}"):
            findings = known[name]()
        path = RESULTS / findings.device / f"{name}.json"
        save(path, name, findings, taken)
        show(name, findings, console)
        console.print(f"Written to {path}\n")
        met = met and all(target.met for target in findings.targets)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
