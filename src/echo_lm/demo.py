"""`echo-lm demo`: three models learn to recall, side by side, and then read far longer texts."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from echo_lm.evaluate import Recall, recall
from echo_lm.extras import need
from echo_lm.model.config import EchoConfig, Mamba2Config, Mixer, SKAConfig
from echo_lm.model.lm import EchoLM
from echo_lm.plots import figure, line
from echo_lm.results import writable_folder
from echo_lm.tasks import MQAR
from echo_lm.tasks.base import Batch, check
from echo_lm.tasks.show import show_example
from echo_lm.train import History, Record, TrainConfig, train

MODELS: dict[str, tuple[Mixer, ...]] = {
    "SSM": ("mamba2", "mamba2"),
    "SSM + attention": ("mamba2", "attention"),
    "SSM + SKA": ("mamba2", "ska"),
}
PAIRS, LENGTH = 2, 64
TIMES = (1, 4, 16, 64)
"""What is read in the end, in training lengths."""
LONGEST = TIMES[-1] * LENGTH
STEPS, LR = 1000, 3e-3
ROWS = 64
"""Texts of each length; each asks for every pair."""
AT_ONCE = 16
"""Texts that are read together, which is what bounds memory, and how long Ctrl-C waits."""
LEARNED, KEPT = 0.6, 0.95
"""A model has learned the task if it does more than guess which of both values it was; it keeps
what it learned if it is right about as often in the end."""
PLOT = "echo-demo.png"
LARGEST_SEED = 2**63 - 1
PLAIN_LINES = 5
"""Lines of progress for each model where there is no terminal."""


@dataclass
class Runner:
    """One of the three: what it is and what came out."""

    name: str
    model: EchoLM
    history: History = field(default_factory=History)
    read: list[Recall] = field(default_factory=list)
    """At each of `TIMES`."""

    @property
    def learned(self) -> float:
        """Accuracy at the length of training."""
        return self.read[0].accuracy

    @property
    def far(self) -> Recall:
        """At the greatest length."""
        return self.read[-1]


def run(
    seed: int = 0,
    out: Path = Path(),
    *,
    steps: int = STEPS,
    rows: int = ROWS,
    console: Console | None = None,
) -> list[Runner]:
    """Train, read, show; the plot goes into the folder `out`."""
    check("seed", seed, at_least=0, at_most=LARGEST_SEED)
    console = console or Console()
    config = training(seed, steps)
    path = writable_folder(out) / PLOT
    introduce(seed, console)
    runners = [Runner(name, build(mixers, seed)) for name, mixers in MODELS.items()]
    try:
        race(runners, config, rows, console)
    except KeyboardInterrupt:
        console.print("Stopped before the end: there is nothing to show yet.")
        raise
    console.print()
    console.print(table_of(runners))
    save_plot(runners, path, console)
    console.print()
    for sentence in conclude(runners, steps):
        console.print(f"- {sentence}", highlight=False)
    console.print(
        "\nNext: echo-lm tasks shows what else there is to recall, echo-lm reproduce the "
        f"experiments of the paper, and echo-lm demo --seed {seed + 1} another draw of this one.",
        highlight=False,
    )
    return runners


def training(seed: int, steps: int) -> TrainConfig:
    """The same for all of them."""
    return TrainConfig(
        steps=steps,
        lr=LR,
        seed=seed,
        warmup=min(50, steps // 2),
        evaluate_every=max(1, steps // 20),
        evaluate_rows=ROWS,
    )


def build(mixers: tuple[Mixer, ...], seed: int) -> EchoLM:
    """The models of the synthetic tasks, of half the width and depth."""
    torch.manual_seed(seed)
    config = EchoConfig(
        dim=64,
        mixers=mixers,
        vocab_size=task(1).vocab_size,
        heads=2,
        mlp="swiglu",
        mlp_hidden=64,
        tie_embeddings=False,
        # Order 1 steps from a key to the token after it, which is all that is asked for here.
        ska=SKAConfig(rank=32, order=1, chunk_size=32),
        mamba2=Mamba2Config(state_dim=16, groups=2),
    )
    return EchoLM(config)


def task(times: int) -> MQAR:
    """Pairs first and questions last, in a text of so many training lengths."""
    return MQAR(pairs=PAIRS, gap=times * LENGTH - 4 * PAIRS)


def introduce(seed: int, console: Console) -> None:
    console.print(
        "Which value belongs to which key? Each text has two keys (k) with their values (v), then "
        "noise (n), then both keys again, and the value has to be told:\n",
        highlight=False,
    )
    show_example("mqar", {"pairs": PAIRS, "gap": task(1).gap}, seed=seed, console=console)
    console.print(
        f"\nThree models of the same width and depth learn this on texts of {LENGTH} tokens, with "
        f"the same batches. Then they read texts of up to {LONGEST:,} tokens.\n",
        highlight=False,
    )


def race(runners: Sequence[Runner], config: TrainConfig, rows: int, console: Console) -> None:
    """All at once, a thread each: torch computes without holding Python's lock."""
    stopped = Event()
    with Lanes(console, config.steps) as lanes, ThreadPoolExecutor(len(runners)) as pool:
        started = [pool.submit(go, one, config, rows, stopped, lanes) for one in runners]
        try:
            for done in as_completed(started):
                done.result()
        finally:
            stopped.set()


def go(runner: Runner, config: TrainConfig, rows: int, stopped: Event, lanes: Lanes) -> None:
    """Train one, and read to it."""
    torch.set_num_threads(1)
    watch = partial(lanes.trained, runner.name)
    runner.history = train(runner.model, UntilStopped(task(1), stopped), config, watch=watch)
    for times in TIMES:
        source = UntilStopped(task(times), stopped)
        runner.read.append(recall(runner.model, source, rows=rows, batch=AT_ONCE, seed=config.seed))
        lanes.has_read(runner.name, times * LENGTH, runner.read[-1])


@dataclass(frozen=True)
class UntilStopped:
    """A task that gives no batch once the demo has stopped: threads end at the next one."""

    task: MQAR
    stopped: Event

    def batch(self, rows: int, **options: Any) -> Batch:
        if self.stopped.is_set():
            raise CancelledError
        return self.task.batch(rows, **options)


class Lanes:
    """A line for each model: live in a terminal, a few plain ones elsewhere."""

    def __init__(self, console: Console, steps: int) -> None:
        self.console, self.steps = console, steps
        self.latest: dict[str, Record] = {name: {} for name in MODELS}
        self.due = dict.fromkeys(MODELS, steps / PLAIN_LINES)
        self.progress: Progress | None = None
        if console.is_terminal:
            self.progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[told]}"),
                console=console,
            )
            self.bars = {n: self.progress.add_task(n, total=steps, told="") for n in MODELS}

    def __enter__(self) -> Lanes:
        if self.progress is not None:
            self.progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.progress is not None:
            self.progress.stop()

    def trained(self, name: str, record: Record) -> None:
        """Take in a record of training."""
        known = self.latest[name]
        known |= record
        told = f"step {known['step']:>5,}  loss {known['loss']:.2f}"
        if "test_accuracy" in known:
            told += f"  {known['test_accuracy']:4.0%} right"
        due = "test_accuracy" in record and record["step"] >= self.due[name]
        if due:
            self.due[name] += self.steps / PLAIN_LINES
        self.say(name, told, plain=due, completed=record["step"])

    def has_read(self, name: str, tokens: int, found: Recall) -> None:
        told = f"texts of {tokens:>5,} tokens  {found.accuracy:4.0%} right"
        self.say(name, told, plain=True)

    def say(self, name: str, told: str, *, plain: bool, **progress: Any) -> None:
        if self.progress is not None:
            self.progress.update(self.bars[name], told=told, **progress)
        elif plain:
            self.console.print(f"{name:<{max(map(len, MODELS))}}  {told}", highlight=False)


def table_of(runners: Sequence[Runner]) -> Table:
    """What each found at each length, and what it remembers at the end."""
    table = Table(title="Right answers in texts of", title_justify="left")
    table.add_column("Model", no_wrap=True)
    for times in TIMES:
        table.add_column(f"{times * LENGTH:,}\ntokens\n({times}x)", justify="right")
    table.add_column(f"Remembered\nafter\n{LONGEST:,} tokens", justify="right")
    best = max(runner.far.accuracy for runner in runners)
    for runner in runners:
        shares = (f"{found.accuracy:.0%}" for found in runner.read)
        look = "bold" if runner.far.accuracy == best else ""
        table.add_row(runner.name, *shares, f"{runner.far.state_bytes:,} bytes", style=look)
    return table


def conclude(runners: Sequence[Runner], steps: int) -> list[str]:
    """What was seen, in a sentence for each model."""
    return [f"{accuracy_in_words(one, steps)}; {memory_in_words(one)}." for one in runners]


def accuracy_in_words(runner: Runner, steps: int) -> str:
    near, far = f"{runner.learned:.0%}", f"{runner.far.accuracy:.0%}"
    if runner.learned < LEARNED:
        return f"{runner.name} did not learn this in {steps:,} steps ({near} right)"
    if runner.far.accuracy >= KEPT * runner.learned:
        return f"{runner.name} keeps what it learned: {far} right in texts of {LONGEST:,} tokens"
    return f"{runner.name} falls from {near} to {far} right in texts of {LONGEST:,} tokens"


def memory_in_words(runner: Runner) -> str:
    growth = runner.far.state_bytes / runner.read[0].state_bytes
    if growth == 1:
        return f"it remembers {runner.far.state_bytes:,} bytes at any length"
    return f"its memory has grown {growth:.0f}-fold, to {runner.far.state_bytes:,} bytes"


def save_plot(runners: Sequence[Runner], path: Path, console: Console) -> None:
    try:
        need("matplotlib", "plot")
    except ValueError as error:
        console.print(f"The plot is left out. {error}", highlight=False, markup=False)
        return
    draw(runners, path)
    console.print(f"The plot is in {path}", highlight=False, markup=False, soft_wrap=True)


def draw(runners: Sequence[Runner], path: Path) -> None:
    """How they learned, how far they recall, and what they remember."""
    lengths = [times * LENGTH for times in TIMES]
    with figure(path, columns=3, size=(3.1, 2.8)) as axes:
        learning, recalling, memory = axes[0]
        for i, one in enumerate(runners):
            look = line(i, one.name)
            steps, shares = zip(*one.history.curve("test_accuracy"), strict=True)
            learning.plot(steps, shares, **look)
            recalling.plot(lengths, [found.accuracy for found in one.read], **look)
            memory.plot(lengths, [found.state_bytes / 1000 for found in one.read], **look)
        learning.set(title=f"Learning, on texts of {LENGTH} tokens", xlabel="step")
        recalling.set(title="Then, on longer texts", xlabel="tokens read")
        memory.set(title="Memory", xlabel="tokens read", ylabel="kilobytes", yscale="log")
        memory.set_ylim(10, 10_000)
        memory.set_yticks([10, 100, 1000, 10_000], ["10", "100", "1,000", "10,000"])
        for ax in (learning, recalling):
            ax.set(ylabel="right answers", ylim=(-0.03, 1.03))
            ax.yaxis.set_major_formatter(need("matplotlib.ticker", "plot").PercentFormatter(1))
        for ax in (recalling, memory):
            ax.set_xscale("log", base=4)
            ax.set_xticks(lengths, [f"{length:,}" for length in lengths])
            ax.minorticks_off()
        names = learning.get_legend_handles_labels()
        learning.figure.legend(*names, loc="outside upper center", ncols=len(runners))
