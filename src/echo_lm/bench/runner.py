"""Measure the cells of a benchmark that are not measured yet, and keep each as soon as it is."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import echo_lm
from echo_lm.bench.record import Findings, Row, Target, save, show
from echo_lm.bench.timing import on_gpu
from echo_lm.extras import need
from echo_lm.ops.backends import pick_device
from echo_lm.results import circumstances, writable_folder

Tell = Callable[[str], None]
"""Says what is going on."""
Tables = dict[str, list[Row]]
"""What has been measured, by the titles of the cells."""
SAME = ("config", "seed", "code", "hardware", "versions")
"""What must be the same for one call to go on where another stopped."""


@dataclass(frozen=True)
class Cell:
    """What is measured together, each with the others' disturbances; a table of the record."""

    title: str
    measure: Callable[[Tell], list[Row]]


@dataclass(frozen=True)
class Bench:
    """A benchmark on one device."""

    name: str
    device: str
    config: dict[str, Any]
    """All that its numbers depend on, but for what the titles of its cells say."""
    seed: int
    cells: Sequence[Cell]
    targets: Callable[[Tables], list[Target]]
    draw: Callable[[Tables, Path], None]
    remarks: Sequence[str] = field(default=())


def run(bench: Bench, out: Path, console: Console) -> Path:
    """Write `OUT/NAME-DEVICE.json` and a plot beside it; returns the path of the record.

    A call that is interrupted leaves the cells that are done; the same call goes on with the rest,
    unless the code or the machine is another by then: then the old record is moved aside.
    """
    path = writable_folder(out) / f"{bench.name}-{kind(bench.device)}.json"
    now = {**circumstances(), "code": code_digest()}
    record = kept(path, bench, now)
    tables, measured = record["numbers"], record["measured"]
    missing = [cell for cell in bench.cells if cell.title not in tables]
    for remark in (f"bench {bench.name} on {hardware_name(bench.device)}.", *bench.remarks):
        say(console, remark)
    if len(missing) < len(bench.cells):
        say(
            console,
            f"{len(bench.cells) - len(missing)} of {len(bench.cells)} tables are in {path} "
            "already, by the same code on the same machine; remove it to measure them again.",
        )

    if path.exists() and not tables:
        say(
            console,
            f"{path} is of other code, settings or hardware: it will be kept as {aside(path)}.",
        )

    def found() -> Findings:
        return Findings(bench.config, bench.seed, tables, bench.targets(tables))

    with progress(console, len(missing)) as (tell, advance):
        for cell in missing:
            tell(cell.title)
            taken, started = circumstances(), time.perf_counter()
            torch.manual_seed(bench.seed)
            try:
                rows = cell.measure(partial(tell_of, tell, cell.title))
            except KeyboardInterrupt:
                done = sum(cell.title in tables for cell in bench.cells)
                say(
                    console,
                    f"Stopped. {done} of {len(bench.cells)} tables are kept; the same again "
                    "measures the rest.",
                )
                raise
            if not tables:
                set_aside(path)
            tables[cell.title] = rows
            measured[cell.title] = {
                "date": taken["date"],
                "load": taken["hardware"]["load"],
                "seconds": round(time.perf_counter() - started, 1),
            }
            told = {**now, "device": bench.device, "measured": measured}
            save(path, bench.name, found(), told)
            advance()
    show(bench.name, found(), console)
    say(console, f"The record is {path}")
    draw_beside(bench, tables, path, console)
    return path


def tell_of(tell: Tell, title: str, what: str) -> None:
    tell(f"{title}: {what}")


def kept(path: Path, bench: Bench, now: Mapping[str, Any]) -> dict[str, Any]:
    """The record of an earlier call, if it can be gone on with; else an empty one."""
    empty: dict[str, Any] = {"numbers": {}, "measured": {}}
    if not path.exists():
        return empty
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        same = comparable(before) == comparable({"config": bench.config, "seed": bench.seed, **now})
        return before if same else empty
    except (json.JSONDecodeError, KeyError, TypeError):
        raise ValueError(
            f"{path} is not the record of a benchmark; remove it, or choose another --out."
        ) from None


def aside(path: Path) -> Path:
    """Where a record goes that another takes the place of: a name for what is in it."""
    return path.with_suffix(f".{hashlib.sha256(path.read_bytes()).hexdigest()[:8]}.json")


def set_aside(path: Path) -> None:
    """Move a record and its plot, if there are any."""
    if not path.exists():
        return
    there = aside(path)
    if path.with_suffix(".png").exists():
        path.with_suffix(".png").replace(there.with_suffix(".png"))
    path.replace(there)


def comparable(record: Mapping[str, Any]) -> Any:
    """What must be the same. The load of a machine is not the machine."""
    parts = {name: record[name] for name in SAME}
    parts["hardware"] = {key: x for key, x in parts["hardware"].items() if key != "load"}
    return json.loads(json.dumps(parts))


def code_digest() -> str:
    """Of every source file of the package: also what is not committed tells itself apart."""
    home = Path(echo_lm.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(home.rglob("*.py")):
        digest.update(f"{file.relative_to(home)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def parse_shape(shape: str) -> tuple[int, int]:
    """`"16x2048"` as (16, 2048)."""
    batch, _, tokens = shape.partition("x")
    if not (batch.isdecimal() and tokens.isdecimal() and int(batch) and int(tokens)):
        raise ValueError(f'A shape is like "16x2048", rows and tokens of each; got {shape!r}.')
    return int(batch), int(tokens)


def clocked(requested: str) -> str:
    """A device that is there and that the clocks know how to wait for."""
    device = pick_device(requested)
    if torch.device(device).type not in ("cpu", "cuda"):
        raise ValueError(f"Benchmarks run on cpu or cuda; got device {requested!r}.")
    return device


def kind(device: str) -> str:
    """What records of a device are filed under."""
    return "gpu" if on_gpu(device) else torch.device(device).type


def usually(device: str) -> Literal["gpu", "cpu"]:
    """Whose sizes a device is given if none are named."""
    return "gpu" if on_gpu(device) else "cpu"


def hardware_name(device: str) -> str:
    if on_gpu(device):
        return torch.cuda.get_device_name(device)
    return f"a CPU ({torch.get_num_threads()} threads)"


@contextmanager
def progress(console: Console, cells: int) -> Iterator[tuple[Tell, Callable[[], None]]]:
    """A bar in a terminal, a line for each cell elsewhere."""
    if not console.is_terminal:
        said: list[str] = []

        def once(what: str) -> None:
            title = what.partition(":")[0]
            if title not in said:
                said.append(title)
                say(console, f"{len(said)}/{cells}  {title}")

        yield once, lambda: None
        return
    told = TextColumn("{task.fields[what]}", markup=False)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), told)
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task("", total=cells, what="")
        yield (lambda what: bars.update(bar, what=what)), (lambda: bars.advance(bar))


def draw_beside(bench: Bench, tables: Tables, path: Path, console: Console) -> None:
    """The plot, if there is something to draw and something to draw with."""
    try:
        need("matplotlib", "plot")
    except ValueError as error:
        say(console, f"The plot is left out. {error}")
        return
    plot = path.with_suffix(".png")
    bench.draw(tables, plot)
    say(console, f"The plot is in {plot}")


def say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
