"""`echo-lm bench train`: a training step of Echo beside one of its baselines."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

import torch
from jaxtyping import Int
from rich.console import Console
from torch import Tensor

from echo_lm.bench.parity import ParityError
from echo_lm.bench.record import Row, Target
from echo_lm.bench.runner import Bench, Cell, Tables, Tell, clocked, parse_shape, usually
from echo_lm.bench.runner import run as run_bench
from echo_lm.bench.timing import PeakMemory, finish, interleaved, on_gpu
from echo_lm.model.config import EchoConfig
from echo_lm.model.lm import EchoLM
from echo_lm.ops.backends import product_dtype
from echo_lm.plots import COLOURS, figure
from echo_lm.tasks.base import Batch, Split
from echo_lm.train.config import TrainConfig
from echo_lm.train.loop import Run
from echo_lm.train.parallel import Alone
from echo_lm.train.speed import matrix_rate

BASELINE = "transformer"
SIZES = ("50m", "180m")
GROUPS: dict[str, list[tuple[str, ...]]] = {
    "gpu": [
        (f"echo-{size}", f"echo-{size}-paper", f"mamba2-{size}", f"{BASELINE}-{size}")
        for size in SIZES
    ],
    "cpu": [("synthetic-ska", "synthetic-ssm", "synthetic-attention")],
}
"""Models of one size, which are compared."""
SHAPES = {"gpu": ((16, 2048), (2, 16384)), "cpu": ((4, 256), (1, 1024))}
ROUNDS = {"gpu": 15, "cpu": 5}
STEPS = {"gpu": 4, "cpu": 1}
"""Of a round."""
WARM_STEPS = 2
RATE = "matrix product"
LOSS_ERROR = 1e-2
"""Relative: a compiler may round bf16 elsewhere, by 4e-3 each time."""
SHARE = 0.4
FASTER = {2048: 1.0, 16384: 2.0}
"""Tokens a second over those of the Transformer, at each length."""
GRAPHS = 256
"""How often torch may compile one function of the code, which all these models and layers share,
before it would silently run as it is."""


@dataclass(frozen=True)
class SameText:
    """A source that gives the same random tokens for every step."""

    tokens: Int[Tensor, "b t"]

    def batch(
        self,
        rows: int,
        *,
        seed: int,
        step: int = 0,
        split: Split = "train",
        device: torch.device | str = "cpu",
    ) -> Batch:
        return Batch(self.tokens, self.tokens, torch.ones_like(self.tokens, dtype=torch.bool))


@dataclass(frozen=True)
class Trained:
    """A run that is warm."""

    run: Run
    gib: float | None
    loss: float
    """Of the first step."""


def run(
    presets: Sequence[str],
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
    return run_bench(
        bench(
            [tuple(dict.fromkeys(presets))] if presets else GROUPS[usual],
            [parse_shape(shape) for shape in shapes] or SHAPES[usual],
            rounds=ROUNDS[usual] if rounds is None else rounds,
            seed=seed,
            device=device,
        ),
        out,
        console or Console(),
    )


def bench(
    groups: Sequence[Sequence[str]],
    shapes: Sequence[tuple[int, int]],
    *,
    rounds: int,
    seed: int,
    device: str,
) -> Bench:
    """A table for each group and shape, in which all models take turns, compiled or not."""
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}.")
    for preset in (preset for group in groups for preset in group):
        EchoConfig.preset(preset)
    cells = [
        Cell(title_of(group, shape), partial(compare, group, shape, rounds, seed, device))
        for group in groups
        for shape in shapes
    ]
    dtype = product_dtype(device)
    return Bench(
        name="train",
        device=device,
        config={
            "products": str(dtype)[6:],
            "rounds": rounds,
            "steps of a round": STEPS[usually(device)],
            "threads": torch.get_num_threads(),
            "step": "as echo-lm train takes it: forward, backward, clipping, AdamW; the same "
            "random tokens every time",
            "ms": "of a step: median over rounds in which all take turns",
            "TFLOP/s": "6 floating-point operations for each weight that a token meets",
            "share": f"of the rate of a large product of matrices in {str(dtype)[6:]}",
            "GiB": "peak of allocated memory, weights and moments too; a CPU does not tell",
        },
        seed=seed,
        cells=cells,
        targets=targets if on_gpu(device) else lambda tables: [],
        draw=draw,
        remarks=[] if on_gpu(device) else ["The targets are for a GPU; a CPU compiles nothing."],
    )


def title_of(group: Sequence[str], shape: tuple[int, int]) -> str:
    return f"{', '.join(group)}; {named(shape)}"


def named(shape: tuple[int, int]) -> str:
    return f"{shape[0]} x {shape[1]:,} tokens"


def compare(
    group: Sequence[str],
    shape: tuple[int, int],
    rounds: int,
    seed: int,
    device: str,
    tell: Tell,
) -> list[Row]:
    """A row for each model, compiled and not, and one for the matrix product."""
    warm: dict[tuple[str, bool], Trained] = {}
    rows: list[Row] = []
    with compiling(device) as variants:
        for preset, compiled in product(group, variants):
            tell(f"{preset}{', compiled' if compiled else ''}")
            row: Row = {"what": preset, "compiled": "yes" if compiled else "no"}
            row |= dict.fromkeys(
                ("ms", "tokens/s", "TFLOP/s", "share", "GiB", "first loss", "note")
            )
            rows.append(row)
            found = begin(preset, shape, compiled, seed, device)
            if isinstance(found, Trained):
                warm[preset, compiled] = found
                row["first loss"] = found.loss
                check_loss(preset, warm.get((preset, False)), found)
            else:
                row["note"] = f"did not run: {found}"
        tell("timing")
        works = {key: partial(step_seconds, one.run, device) for key, one in warm.items()}
        times = interleaved(works, rounds)
    rate = matrix_rate(device, product_dtype(device))
    for row in rows:
        key = row["what"], row["compiled"] == "yes"
        if key in warm:
            row["ms"] = 1e3 * median(times[key])
            row["tokens/s"] = shape[0] * shape[1] / median(times[key])
            row["TFLOP/s"] = row["tokens/s"] * warm[key].run.flops_per_token / 1e12
            row["share"] = row["TFLOP/s"] * 1e12 / rate
            row["GiB"] = warm[key].gib
    best = {"what": RATE, "TFLOP/s": rate / 1e12, "share": 1.0}
    return [*rows, dict.fromkeys(rows[0]) | best]


@contextmanager
def compiling(device: str) -> Iterator[tuple[bool, ...]]:
    """Which variants there are, compiled or not, with room to compile all of them; each shape anew,
    so that none is compiled for any length."""
    if not on_gpu(device):
        yield (False,)
        return
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=GRAPHS):
        yield False, True


def begin(
    preset: str, shape: tuple[int, int], compiled: bool, seed: int, device: str
) -> Trained | str:
    """A run that is warm, or why there is none."""
    try:
        return warm_up(preset, shape, compiled, seed, device)
    except torch.OutOfMemoryError:
        return "out of memory"
    except Exception as error:
        if not compiled:
            raise
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def warm_up(preset: str, shape: tuple[int, int], compiled: bool, seed: int, device: str) -> Trained:
    memory = PeakMemory(device)
    torch.manual_seed(seed)
    model = EchoLM(EchoConfig.preset(preset)).to(device)
    text = SameText(torch.randint(model.config.vocab_size, shape, device=device))
    config = TrainConfig(
        steps=10**9, lr=1e-4, batch=shape[0], warmup=0, seed=seed, compile=compiled
    )
    run = Run(model, text, text, config, None, Alone())
    for _ in range(WARM_STEPS):
        run.take_step()
    loss = float(run.unread[0][1][0])
    return Trained(run, memory.of(run.take_step), loss)


def check_loss(preset: str, plain: Trained | None, compiled: Trained) -> None:
    """What a compiler makes of a model must still be that model."""
    if plain is not None and not abs(compiled.loss - plain.loss) < LOSS_ERROR * plain.loss:
        raise ParityError(
            f"{preset} has a loss of {plain.loss:.4f} in its first step, and compiled of "
            f"{compiled.loss:.4f}; no speed is reported."
        )


def step_seconds(run: Run, device: str) -> float:
    """Of one step, over a few that the device is given at once."""
    steps = STEPS[usually(device)]
    finish(device)
    start = time.perf_counter()
    for _ in range(steps):
        run.take_step()
    finish(device)
    run.restart_clock()
    return (time.perf_counter() - start) / steps


def fastest(rows: Sequence[Row]) -> dict[str, Row]:
    """Each model as it is fastest, compiled or not."""
    ran = [row for row in rows if row["ms"] is not None]
    return {row["what"]: row for row in sorted(ran, key=lambda row: -row["ms"])}


def targets(tables: Tables) -> list[Target]:
    """A share of the matrix rate, and the speed of the Transformer of that size."""
    found = []
    for title, rows in tables.items():
        best = fastest(rows)
        for size in SIZES:
            echo, other = best.get(f"echo-{size}"), best.get(f"{BASELINE}-{size}")
            for batch, tokens in SHAPES["gpu"]:
                if echo is None or not title.endswith(f"; {named((batch, tokens))}"):
                    continue
                name = f"echo-{size}, {named((batch, tokens))}"
                if tokens == min(FASTER):
                    found.append(
                        Target(f"{name}: share of the matrix rate", echo["share"], at_least=SHARE)
                    )
                if other is not None:
                    times = echo["tokens/s"] / other["tokens/s"]
                    found.append(
                        Target(f"{name}: tokens/s over {BASELINE}", times, at_least=FASTER[tokens])
                    )
    return found


def draw(tables: Tables, path: Path) -> None:
    """Tokens a second of each model as it is fastest, with the share of the matrix rate."""
    columns = min(2, len(tables))
    rows = -(-len(tables) // columns)
    with figure(path, rows=rows, columns=columns, size=(4.2, 2.2)) as axes:
        for ax in axes.flat[len(tables) :]:
            ax.set_axis_off()
        for ax, (title, found) in zip(axes.flat, tables.items(), strict=False):
            best = fastest(found)
            names = list(dict.fromkeys(row["what"] for row in found if row["what"] in best))[::-1]
            colours = [
                COLOURS[0 if name.startswith(("echo", "synthetic-ska")) else 5] for name in names
            ]
            bars = ax.barh(names, [best[name]["tokens/s"] for name in names], color=colours)
            shares = [f"{best[name]['share']:.0%}" for name in names]
            ax.bar_label(bars, shares, padding=2, fontsize=7)
            ax.set_xlabel("tokens/s; share of the matrix rate")
            ax.set_title(title.partition("; ")[2])
            ax.margins(x=0.15)
