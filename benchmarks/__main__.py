"""Run benchmarks by name, or all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from benchmarks import decode, parallel, startup
from echo_lm.bench.record import Findings, save, show
from echo_lm.results import circumstances

RESULTS = Path(__file__).parents[1] / "results"

BENCHMARKS: dict[str, Callable[[], Findings]] = {
    "startup": startup.measure,
    "parallel": parallel.measure,
    "decode": decode.measure,
}


def main(names: list[str]) -> int:
    """Measure, show and write each; 0 if every target was met."""
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(
            f"There is no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}.",
            file=sys.stderr,
        )
        return 2
    console = Console()
    met = True
    for name in names or BENCHMARKS:
        taken = circumstances()
        with console.status(f"Measuring {name}"):
            findings = BENCHMARKS[name]()
        path = RESULTS / findings.device / f"{name}.json"
        save(path, name, findings, taken)
        show(name, findings, console)
        console.print(f"Written to {path}\n")
        met = met and all(target.met for target in findings.targets)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
