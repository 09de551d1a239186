"""Run the cells of an experiment that have not run yet, then write its report."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from echo_lm.experiments.base import (
    Experiment,
    Finished,
    OnMaterial,
    Scale,
    Settings,
    Workbench,
)
from echo_lm.results import circumstances, writable_folder, write_json

CELLS = "cells"
UNFINISHED = "unfinished"
WEIGHTS = "weights"
REPORT = "README.md"
FIGURE = "figure.png"


def reproduce(
    experiment: Experiment,
    *,
    scale: Scale,
    seeds: int,
    out: Path,
    device: str,
    share: str = "1/1",
    only: Sequence[str] = (),
    console: Console,
) -> Path:
    """Run what is missing and write `out/NAME/SCALE`: a JSON file for each cell, tables, a figure.

    Each cell is kept as soon as it is done, so that an interrupted call goes on where it stopped;
    the checkpoints of one that is not lie in `unfinished` there, and hold on any machine.
    `share="2/4"` runs every fourth cell from the second on, for several processes or machines;
    `only=["model=SSM", "gap=64", "gap=256"]` those with one of the values given of each setting.
    """
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}.")
    part, parts = parse_share(share)
    folder = writable_folder(out) / experiment.name / scale
    cells = experiment.cells(scale)
    chosen = choose(cells, only)
    wanted = [(settings, seed) for seed in range(seeds) for settings in cells]
    missing = [
        (settings, seed)
        for settings, seed in wanted[part - 1 :: parts]
        if settings in chosen and not is_done(experiment, scale, settings, seed, folder)
    ]
    console.print(
        f"[bold]{experiment.name}[/bold]: {experiment.title} ({experiment.source}). "
        f"{len(missing)} of {len(wanted)} cells to run on {device}."
    )
    for i, (settings, seed) in enumerate(missing, start=1):
        console.print(f"{i}/{len(missing)}  {cell_name(settings, seed)}")
        run_cell(experiment, scale, settings, seed, folder, device, console)
    report(experiment, scale, seeds, folder)
    console.print(f"Written to {folder}")
    return folder


def parse_share(share: str) -> tuple[int, int]:
    """`"2/4"` as (2, 4)."""
    part, _, parts = share.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise ValueError(f'share must be like "2/4", the second of four; got {share!r}.')
    return int(part), int(parts)


def choose(cells: Sequence[Settings], only: Sequence[str]) -> list[Settings]:
    """The cells that have, of every setting named, one of the values given."""
    known = {name: {str(cell.get(name)) for cell in cells} for cell in cells for name in cell}
    values: dict[str, set[str]] = {}
    for word in only:
        name, _, value = word.partition("=")
        if name not in known:
            raise ValueError(f"No cell has a setting {name!r}; there are {', '.join(known)}.")
        if value not in known[name]:
            there = ", ".join(sorted(known[name]))
            raise ValueError(f"No cell has {name}={value}; {name} is one of {there}.")
        values.setdefault(name, set()).add(value)
    return [c for c in cells if all(str(c.get(name)) in values[name] for name in values)]


def cell_name(settings: Settings, seed: int) -> str:
    """`model=echo,length=64,seed=0`, which is also its file's name."""
    named = [*(f"{key}={value}" for key, value in settings.items()), f"seed={seed}"]
    return ",".join(named).replace("/", "-").replace(" ", "")


def cell_path(folder: Path, settings: Settings, seed: int) -> Path:
    return folder / CELLS / f"{cell_name(settings, seed)}.json"


def weights_path(folder: Path, settings: Settings, seed: int) -> Path:
    """Where a cell keeps what others go on from."""
    return folder / WEIGHTS / cell_name(settings, seed)


def is_done(
    experiment: Experiment, scale: Scale, settings: Settings, seed: int, folder: Path
) -> bool:
    """True if a cell was run under today's protocol; refuses to mix it with another one."""
    path = cell_path(folder, settings, seed)
    if not path.exists():
        return False
    before, now = read_cell(path)["protocol"], as_json(experiment.protocol(scale))
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if changed:
        key = changed[0]
        raise ValueError(
            f"{path} was run with {key}={before.get(key)!r}, this version has {now.get(key)!r}; "
            "choose another --out, or remove that file to run it again."
        )
    return True


def run_cell(
    experiment: Experiment,
    scale: Scale,
    settings: Settings,
    seed: int,
    folder: Path,
    device: str,
    console: Console,
) -> None:
    """Run one cell and keep its record."""
    protocol = experiment.protocol(scale)
    scratch = folder / UNFINISHED / cell_name(settings, seed)
    bench = Workbench(device, scratch, weights_path(folder, settings, seed), console)
    taken, started = circumstances(), time.perf_counter()
    numbers = experiment.run(protocol, settings, seed, bench)
    record = {
        "experiment": experiment.name,
        "scale": scale,
        "protocol": protocol,
        "settings": dict(settings),
        "seed": seed,
        **taken,
        "device": device,
        "seconds": round(time.perf_counter() - started, 1),
        "numbers": numbers,
    }
    write_json(cell_path(folder, settings, seed), record)
    shutil.rmtree(scratch, ignore_errors=True)
    if scratch.parent.is_dir() and not any(scratch.parent.iterdir()):
        scratch.parent.rmdir()


def report(experiment: Experiment, scale: Scale, seeds: int, folder: Path) -> None:
    """Write tables and figure of all cells that have run."""
    total = seeds * len(experiment.cells(scale))
    records = list(finished_records(experiment, scale, seeds, folder))
    if not records:
        return
    done = [Finished(r["settings"], r["seed"], r["numbers"]) for r in records]
    experiment.draw(done, folder / FIGURE)
    text = render(experiment, scale, seeds, done, records, total)
    (folder / REPORT).write_text(text, encoding="utf-8")


def finished_records(
    experiment: Experiment, scale: Scale, seeds: int, folder: Path
) -> Iterator[dict[str, Any]]:
    """Records in the order of the cells, seeds apart."""
    for settings in experiment.cells(scale):
        for seed in range(seeds):
            if is_done(experiment, scale, settings, seed, folder):
                yield read_cell(cell_path(folder, settings, seed))


def render(
    experiment: Experiment,
    scale: Scale,
    seeds: int,
    done: Sequence[Finished],
    records: Sequence[dict[str, Any]],
    total: int,
) -> str:
    """The report as Markdown."""
    again = f"echo-lm reproduce {experiment.name} --scale {scale} --seeds {seeds}"
    if isinstance(experiment, OnMaterial):
        again += f" --{experiment.reads} ..."
    missing = "" if len(done) == total else f" **{total - len(done)} of {total} have not run yet.**"
    machines = {r["hardware"]["accelerator"] or r["hardware"]["processor"] for r in records}
    protocol = "\n".join(f"- {k}: {v}" for k, v in experiment.protocol(scale).items())
    parts = [
        f"# {experiment.title}",
        f"{experiment.source}. {len(done)} cells on {', '.join(sorted(machines))}; each is a file "
        f"in `{CELLS}` with its settings, seed, commit, machine and curves.{missing}",
        f"    {again}",
        "Protocol:",
        protocol,
        *(table.markdown() for table in experiment.tables(done)),
        *experiment.remarks(done),
        f"![{experiment.title}]({FIGURE})",
    ]
    return "\n\n".join(parts) + "\n"


def read_cell(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is not a cell's record: {error}; remove it to run again."
        ) from None


def as_json(value: Any) -> Any:
    """What a value becomes on its way through a file."""
    return json.loads(json.dumps(value))
