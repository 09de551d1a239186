"""`echo-lm bench ops`: SKA beside its competitors, one call of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

import torch
from rich.console import Console

from echo_lm.bench import precision
from echo_lm.bench.contenders import FLASH, MODES, Contender, Inputs, Size, contenders
from echo_lm.bench.parity import both_passes, check
from echo_lm.bench.record import Row, Target
from echo_lm.bench.runner import Bench, Cell, Tables, Tell, clocked, parse_shape, usually
from echo_lm.bench.runner import run as run_bench
from echo_lm.bench.timing import (
    PeakMemory,
    copy_rate,
    interleaved,
    on_gpu,
    ratio,
    replayable,
    seconds,
    warm,
)
from echo_lm.ops.backends import installed, product_dtype
from echo_lm.plots import COLOURS, figure

PASSES = {"forward": False, "forward and backward": True}
FLOOR = "floor"
ROUNDS = {"gpu": 30, "cpu": 5}
SHAPES = {"gpu": ((16, 2048), (2, 16384)), "cpu": ((1, 512), (1, 2048))}
CASES = (
    Size(1, 500),
    Size(1, 300, rank=24, width=32),
    Size(1, 300, rank=56, width=60),
    Size(1, 200, rank=50),
)
"""What is checked besides the sizes that are timed."""
AT_MOST = {
    ("ska-chunk", FLASH, 2048): 1.0,
    ("ska-chunk", FLASH, 16384): 1 / 6,
    ("ska-exact", FLASH, 2048): 2.0,
    ("ska-exact", FLASH, 16384): 1 / 3,
    ("ska-exact", "mesa_net", 2048): 1.0,
}
"""Time over that of another, forward and backward, at the sizes of a GPU."""


@dataclass(frozen=True)
class Ready:
    """A contender that is warm."""

    run: Callable[[], object]
    gib: float | None
    note: str | None


def run(
    names: Sequence[str],
    *,
    shapes: Sequence[str],
    rounds: int | None,
    seed: int,
    device: str,
    out: Path,
    console: Console | None = None,
) -> Path:
    """What the command does."""
    device = clocked(device)
    usual = usually(device)
    sizes = [Size(*shape) for shape in map(parse_shape, shapes)]
    return run_bench(
        bench(
            pick(names, contenders(device)),
            sizes or [Size(*shape) for shape in SHAPES[usual]],
            device=device,
            cases=CASES,
            rounds=ROUNDS[usual] if rounds is None else rounds,
            seed=seed,
        ),
        out,
        console or Console(),
    )


def bench(
    who: Sequence[Contender],
    sizes: Sequence[Size],
    *,
    device: str,
    cases: Sequence[Size],
    rounds: int,
    seed: int,
) -> Bench:
    """First what must be right, then the times, then what each precision costs."""
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}.")
    dtype = product_dtype(device)
    checked = [*cases, *(replace(size, batch=1) for size in sizes)]
    mine = [one for one in who if one.truth is not None and not one.why_not(True)]
    cells = [
        Cell(parity_title(one.name, sizes), partial(check_sizes, one, checked, dtype))
        for one in mine
    ]
    for size in sizes:
        for title, backward in PASSES.items():
            work = partial(time_all, who, size, dtype, device, backward, rounds)
            cells.append(Cell(title_of(title, size), work))
    remarks = []
    if on_gpu(device):
        splits = [one for one in mine if one.name in MODES]
        cells += precision.cells(splits, sizes[0], device, rounds)
    else:
        remarks = [
            "The targets are for a GPU, and so is the table of what each precision costs: on a CPU "
            "SKA computes in fp32."
        ]
    shared = {key: x for key, x in asdict(sizes[0]).items() if key not in ("batch", "tokens")}
    return Bench(
        name="ops",
        device=device,
        config={
            **shared,
            "contenders": [one.name for one in who],
            "dtype": str(dtype)[6:],
            "rounds": rounds,
            "threads": torch.get_num_threads(),
            "packages": {name: installed(name) for name in ("triton", "flash-linear-attention")},
            "times": "medians over rounds in which all take turns; on a GPU as CUDA graphs, but "
            "for what is launched from Python as its note says",
            "x flash": "the median of the rounds' ratios",
            "GiB": "peak of allocated memory, inputs and gradients included; a CPU does not tell",
            "floor": "queries, keys, values and answers of SKA, with a backward pass their "
            "gradients too, once each at the rate of a large copy",
            "others": "take queries, keys and values of `width`",
            "parity": "to slower forms in fp64, in the norm",
            "precision": "errors likewise, the largest of answers and gradients, whose rounding to "
            "bf16 is in them and costs 2e-3",
        },
        seed=seed,
        cells=cells,
        targets=targets if on_gpu(device) else lambda tables: [],
        draw=draw,
        remarks=remarks,
    )


def parity_title(name: str, sizes: Sequence[Size]) -> str:
    """Other sizes are to be checked anew."""
    return f"parity of {name} at {', '.join(f'{size.tokens:,}' for size in sizes)} tokens"


def title_of(what: str, size: Size) -> str:
    return f"{what}, {size.batch} x {size.tokens:,} tokens"


def pick(names: Sequence[str], known: dict[str, Contender]) -> list[Contender]:
    """Those named, or all; flash attention is always there to compare with."""
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"There is no operator {unknown[0]!r}; there are {', '.join(known)}.")
    wanted = {*names, FLASH} if names else set(known)
    return [one for name, one in known.items() if name in wanted]


def check_sizes(one: Contender, cases: Sequence[Size], dtype: torch.dtype, tell: Tell) -> list[Row]:
    """An operator of ours at every size, in fp32 and in what is timed."""
    rows = []
    for narrow, size in product(dict.fromkeys((torch.float32, dtype)), cases):
        tell(f"{str(narrow)[6:]}, {size.tokens:,} tokens")
        rows.append(check(one, size, narrow))
    return rows


def time_all(
    who: Sequence[Contender],
    size: Size,
    dtype: torch.dtype,
    device: str,
    backward: bool,
    rounds: int,
    tell: Tell,
) -> list[Row]:
    """A row for each contender, those that did not run with the reason, and the floor."""
    rate = copy_rate(device)
    ready: dict[str, Ready] = {}
    why: dict[str, str] = {}
    for one in who:
        tell(f"{one.name} warms up")
        found = prepare(one, size, dtype, device, backward)
        if isinstance(found, Ready):
            ready[one.name] = found
        else:
            why[one.name] = found
    tell("timing")
    times = interleaved(
        {name: partial(seconds, one.run, device) for name, one in ready.items()}, rounds
    )
    moved = least_bytes(size, dtype, backward)
    floor = moved / rate
    rows: list[Row] = []
    for one in who:
        row: Row = dict.fromkeys(("what", "ms", "fastest ms", "GiB", "x flash", "x floor", "note"))
        row["what"] = one.name
        if one.name in ready:
            taken = times[one.name]
            row["ms"], row["fastest ms"] = 1e3 * median(taken), 1e3 * min(taken)
            row["GiB"], row["note"] = ready[one.name].gib, ready[one.name].note
            row["x flash"] = ratio(taken, times[FLASH]) if FLASH in times else None
            row["x floor"] = median(taken) / floor
        else:
            row["note"] = f"did not run: {why[one.name]}"
        rows.append(row)
    note = f"{moved / 1e9:.3g} GB at {rate / 1e9:,.0f} GB/s"
    return [*rows, dict.fromkeys(rows[0]) | {"what": FLOOR, "ms": 1e3 * floor, "note": note}]


def least_bytes(size: Size, dtype: torch.dtype, backward: bool) -> int:
    """What SKA must read and write: q, k, v and y, and their gradients, once."""
    numbers = size.batch * size.tokens * size.heads * 2 * (size.rank + size.width)
    return numbers * dtype.itemsize * (2 if backward else 1)


def prepare(
    one: Contender, size: Size, dtype: torch.dtype, device: str, backward: bool
) -> Ready | str:
    """The work of one run, warm, and what it takes; or why it does not run."""
    reason = one.why_not(backward)
    if reason is not None:
        return reason
    try:
        return warm_up(one, size, dtype, device, backward)
    except torch.OutOfMemoryError:
        return "out of memory"
    except Exception as error:
        if one.truth is not None:
            raise
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def warm_up(one: Contender, size: Size, dtype: torch.dtype, device: str, backward: bool) -> Ready:
    memory = PeakMemory(device)
    given = one.draw(size, dtype)
    work = work_of(one, given, backward)
    gib = memory.of(warm(work, device))
    if one.launched and on_gpu(device):
        return Ready(work, gib, "launched from Python")
    again, note = replayable(work, device)
    return Ready(again, gib, note)


def work_of(one: Contender, given: Inputs, backward: bool) -> Callable[[], object]:
    with torch.no_grad():
        dy = torch.randn_like(one.answer(given))
    if backward:
        return lambda: both_passes(one.answer, given, dy)

    def forward() -> object:
        with torch.no_grad():
            return one.answer(given)

    return forward


def targets(tables: Tables) -> list[Target]:
    """What is promised of the sizes that were timed."""
    found = []
    for batch, tokens in SHAPES["gpu"]:
        rows = {
            row["what"]: row
            for row in tables.get(title_of("forward and backward", Size(batch, tokens)), [])
            if row["ms"] is not None
        }
        for (name, other, length), limit in AT_MOST.items():
            if length == tokens and {name, other} <= set(rows):
                took = rows[name]["x flash"]
                if other != FLASH:
                    took = rows[name]["ms"] / rows[other]["ms"]
                title = f"{name} over {other}, T={tokens}"
                found.append(Target(f"{title}, time", took, at_most=limit))
                if other == FLASH:
                    share = rows[name]["GiB"] / rows[other]["GiB"]
                    found.append(Target(f"{title}, peak", share, at_most=1.0))
    return found


def draw(tables: Tables, path: Path) -> None:
    """Bars of time, the floor a line."""
    timed = {title: rows for title, rows in tables.items() if rows[-1].get("what") == FLOOR}
    if not timed:
        return
    columns = len(PASSES)
    with figure(path, rows=-(-len(timed) // columns), columns=columns, size=(3.6, 2.6)) as axes:
        for ax in axes.flat[len(timed) :]:
            ax.set_axis_off()
        for ax, (title, rows) in zip(axes.flat, timed.items(), strict=False):
            ran = [row for row in rows[:-1] if row["ms"] is not None][::-1]
            names = [row["what"] for row in ran]
            colours = [COLOURS[0 if name.startswith("ska") else 5] for name in names]
            bars = ax.barh(names, [row["ms"] for row in ran], color=colours)
            ax.bar_label(bars, fmt="{:.3g}", padding=2, fontsize=7)
            ax.axvline(rows[-1]["ms"], color=COLOURS[1], linestyle="--")
            ax.set_xscale("log")
            ax.set_xlabel(f"ms; dashed: the {FLOOR}")
            ax.set_title(title)
            ax.margins(x=0.15)
