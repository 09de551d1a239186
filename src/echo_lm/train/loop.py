"""The loop: take steps, read what they cost, test, keep checkpoints."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, is_dataclass
from itertools import takewhile
from math import isfinite
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from rich.console import Console
from torch import Tensor

from echo_lm.evaluate.recall import Source, recall
from echo_lm.interrupt import deferred_interrupt
from echo_lm.model.lm import EchoLM
from echo_lm.model.loss import IGNORED_LABEL
from echo_lm.ops.backends import autocast, product_dtype
from echo_lm.tasks.base import Batch
from echo_lm.train import checkpoint
from echo_lm.train.config import TrainConfig
from echo_lm.train.display import Display
from echo_lm.train.health import ska_health
from echo_lm.train.history import (
    History,
    Record,
    append_records,
    records_until,
    write_records,
)
from echo_lm.train.nonfinite import Diverged, find_cause
from echo_lm.train.optimiser import decayed_names, parameter_groups, set_learning_rate
from echo_lm.train.parallel import Alone
from echo_lm.train.schedule import learning_rate
from echo_lm.train.speed import flops_per_token, matrix_rate

HEALTH_ROWS = 4
"""Rows over which the operators' conditioning is measured."""


def train(
    model: EchoLM,
    source: Source,
    config: TrainConfig,
    *,
    device: torch.device | str = "cpu",
    folder: str | Path | None = None,
    test: Source | None = None,
    console: Console | None = None,
    watch: Callable[[Record], None] | None = None,
    strategy: Alone | None = None,
    beside: Sequence[Path] = (),
) -> History:
    """Train `model` in place on batches 0, 1, 2, ... of `source`.

    Args:
        model: What to train, with the weights it is to start from; it moves to `device`.
        source: A task, or whatever else gives batches.
        config: With model and source, all that decides the outcome.
        device: Where to compute.
        folder: Where metrics and checkpoints go; nothing is written without one. A run found
            there goes on, bit for bit as if it had not stopped; one that has ended gives its
            weights and history at once.
        test: What to evaluate on (its test split); `source` if None.
        console: Where to show progress.
        watch: Is called with each record.
        strategy: How several processes share the run, from `train.parallel`; None is one alone.
        beside: Files to keep with every checkpoint, such as the tokenizer.

    Ctrl-C, or being asked to terminate, finishes the step and, with a folder, writes a checkpoint
    before KeyboardInterrupt is raised. A loss or gradient that is not finite raises `Diverged`;
    the weights stay as they were before it.
    """
    strategy = strategy or Alone()
    run = Run(model.to(device), source, test or source, config, folder, strategy)
    run.beside = beside
    if console is not None:
        run.measure_rate()
    display = Display(console if strategy.rank == 0 else None, config.steps, run.step)
    run.listeners = (display.show, watch) if watch else (display.show,)
    if run.step and not run.history.ended:
        display.say(f"Going on after step {run.step:,} of {folder}.")
    with display, deferred_interrupt() as interrupted:
        while not run.history.ended:
            run.take_step()
            if run.due(config.read_every):
                run.read()
            if run.due(config.evaluate_every):
                run.evaluate()
            stop = strategy.agree(interrupted(), now=run.due(config.read_every))
            if run.due(config.checkpoint_every) or stop:
                run.save()
            if stop:
                display.say(run.how_to_go_on())
                raise KeyboardInterrupt
    return run.history


class Run:
    """A run in progress, from where its folder left it."""

    def __init__(
        self,
        model: EchoLM,
        source: Source,
        test: Source,
        config: TrainConfig,
        folder: str | Path | None,
        strategy: Alone,
    ) -> None:
        self.model, self.source, self.test, self.config = model.train(), source, test, config
        self.folder = None if folder is None else Path(folder)
        self.strategy = strategy
        self.device = model.embedding.weight.device
        self.history = History()
        self.listeners: Sequence[Callable[[Record], None]] = ()
        self.step = 0
        decayed, self.flops_per_token = decayed_names(model), flops_per_token(model)
        moments = self.resume()
        if config.recompute:
            model.recompute_blocks()
        compiled = config.compile and self.device.type == "cuda"
        compute: Any = torch.compile(model) if compiled else model
        # Who shares a model changes its parameters, which the optimiser must hold as they then are.
        self.compute = strategy.prepare(model, compute)
        self.optimiser = strategy.optimiser(parameter_groups(model, config, decayed))
        strategy.load_moments(model, self.optimiser, moments)
        self.beside: Sequence[Path] = ()
        self.fastest: float | None = None
        self.unread: list[tuple[Record, Tensor]] = []
        self.unread_tokens = 0
        self.clock = time.perf_counter()
        # 1 from the first step on whose loss or gradient is not finite: none after it is taken,
        # though the host, which does not wait for the device, hears of it later.
        self.broken = torch.zeros((), device=self.device)

    def due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.config.steps or bool(self.history.ended)

    def take_step(self) -> None:
        """One update, without waiting for the device."""
        self.step += 1
        lr = learning_rate(self.config, self.step)
        set_learning_rate(self.optimiser, lr)
        loss = self.gradients()
        norm = self.strategy.clip(self.model, self.config.clip)
        told = torch.stack([loss, norm.to(loss)])
        self.broken = torch.maximum(self.broken, (~told.isfinite()).any().float())
        self.strategy.stop_updates(self.optimiser, self.broken)
        self.optimiser.step()
        self.unread.append(({"step": self.step, "lr": lr}, told))

    def gradients(self) -> Tensor:
        """The loss of this step's batch, and what it asks of each parameter."""
        config, strategy = self.config, self.strategy
        self.optimiser.zero_grad()
        batch = self.source.batch(
            config.batch, seed=config.seed, step=self.step - 1, device=self.device
        )
        # Every label counts the same, whichever piece and process it falls to. Processes average
        # their gradients.
        share = strategy.ranks / count_targets(batch)
        loss = torch.zeros((), device=self.device)
        pieces = strategy.share(batch).pieces(config.accumulate)
        for i, piece in enumerate(pieces, start=1):
            with strategy.gathering(self.compute, last=i == len(pieces)):
                part = self.loss_of(piece) * (count_targets(piece) * share)
                part.backward()
            loss = loss + part.detach()
        self.unread_tokens += batch.tokens.numel()
        return strategy.total(loss) / strategy.ranks

    def loss_of(self, batch: Batch) -> Tensor:
        """The mean over the labels of a batch."""
        mask = batch.facts if self.config.facts_only else None
        with autocast(self.device, self.config.precision):
            out = self.compute(
                batch.tokens,
                labels=batch.labels,
                statistics_mask=mask,
                logits_to_keep=0,
                document_starts=batch.starts,
            )
        return out.loss

    def read(self) -> None:
        """Wait for the device, and record the steps since the last time."""
        if not self.unread:
            return
        read = torch.stack([told for _, told in self.unread]).tolist()
        speed: Record = self.speed()
        records = [
            {**record, "loss": loss, "gradient_norm": norm, **speed}
            for (record, _), (loss, norm) in zip(self.unread, read, strict=True)
        ]
        good = list(takewhile(lambda r: isfinite(r["loss"] + r["gradient_norm"]), records))
        self.record(*good)
        if len(good) < len(records):
            raise self.diverged(records[len(good)])
        self.restart_clock()

    def speed(self) -> Record:
        """Since the clock was started anew."""
        rate = self.unread_tokens / (time.perf_counter() - self.clock)
        told: Record = {"tokens_per_second": round(rate)}
        if self.fastest is not None:
            told["utilisation"] = round(rate / self.fastest, 4)
        return told

    def measure_rate(self) -> None:
        """Find the tokens a second that this model's matrix products alone would allow."""
        dtype = product_dtype(self.device, self.config.precision)
        rate = self.strategy.ranks * matrix_rate(self.device, dtype)
        self.fastest = rate / self.flops_per_token
        self.restart_clock()

    def evaluate(self) -> None:
        """Test, look at the operators, and see whether this is the end."""
        self.read()
        config = self.config
        found = recall(
            self.model,
            self.test,
            rows=config.evaluate_rows,
            seed=config.seed,
            facts_only=config.facts_only,
            precision=config.precision,
        )
        self.record(
            {
                "step": self.step,
                "test_loss": found.loss,
                "test_accuracy": found.accuracy,
                "test_exact": found.exact,
                "ska": self.health(),
            }
        )
        self.history.ended = why_ended(self.history, config)
        self.restart_clock()

    def health(self) -> dict[str, Any]:
        """Conditioning and filters of the SKA layers, on a few rows of the test."""
        some = self.test.batch(HEALTH_ROWS, seed=self.config.seed, split="test", device=self.device)
        mask = some.facts if self.config.facts_only else None
        whole, narrow = (
            self.strategy.whole(self.model),
            autocast(self.device, self.config.precision),
        )
        with whole, narrow:
            return ska_health(self.model, some.tokens, mask, some.starts)

    def save(self) -> None:
        """Keep a checkpoint."""
        self.read()
        if self.folder is not None:
            moments = self.strategy.moments(self.model, self.optimiser)
            contents = checkpoint.Contents(
                self.step,
                self.model.config,
                self.strategy.weights(self.model),
                {**moments, **checkpoint.random_states(self.model)},
                self.settings(),
            )
            if self.strategy.rank == 0:
                checkpoint.save(self.folder, contents, self.beside)
        self.restart_clock()

    def resume(self) -> dict[str, Tensor]:
        """Take up what the folder holds; returns AdamW's tensors."""
        if self.folder is None:
            return {}
        moments: dict[str, Tensor] = {}
        found = checkpoint.latest(self.folder)
        if found is not None:
            self.step, moments = checkpoint.load(found, self.model, self.settings())
        self.history.records = records_until(self.folder, self.step)
        if self.strategy.rank == 0:
            write_records(self.folder, self.history.records)
        self.history.ended = why_ended(self.history, self.config)
        return moments

    def record(self, *records: Record) -> None:
        """Into the history, the file, and to whoever listens."""
        self.history.records += records
        if self.folder is not None and self.strategy.rank == 0:
            append_records(self.folder, records)
        for record in records:
            for listener in self.listeners:
                listener(record)

    def restart_clock(self) -> None:
        """Speed is that of training alone."""
        self.unread, self.unread_tokens, self.clock = [], 0, time.perf_counter()

    def settings(self) -> dict[str, Any]:
        """What must be the same for a run to go on."""
        return {
            "train": self.config.to_dict(),
            "model": self.model.config.to_dict(),
            "source": describe(self.source),
            "test": describe(self.test),
        }

    def diverged(self, record: Record) -> Diverged:
        """The error for a step whose loss or gradient was not finite."""
        self.step = record["step"]
        self.compute = self.model
        cause = find_cause(self.model, self.gradients)
        kept = checkpoint.latest(self.folder) if self.folder else None
        back = f"the last checkpoint is {kept}" if kept else "there is no checkpoint"
        return Diverged(
            f"Step {self.step} has loss {record['loss']} and gradient norm "
            f"{record['gradient_norm']}: {cause}; {back}."
        )

    def how_to_go_on(self) -> str:
        if self.folder is None:
            return f"Stopped after step {self.step:,}. Nothing was kept: no folder was given."
        return (
            f"Stopped after step {self.step:,}, which is kept in {self.folder}: "
            "run the same again to go on."
        )


def why_ended(history: History, config: TrainConfig) -> Literal["", "steps", "target", "patience"]:
    """Judged after an evaluation."""
    tests = [record for record in history.records if "test_loss" in record]
    if not tests:
        return ""
    if config.stop_at is not None and tests[-1]["test_accuracy"] >= config.stop_at:
        return "target"
    if config.patience is not None:
        losses = [record["test_loss"] for record in tests]
        if len(losses) - 1 - losses.index(min(losses)) >= config.patience:
            return "patience"
    return "steps" if tests[-1]["step"] == config.steps else ""


def count_targets(batch: Batch) -> Tensor:
    """Labels that something predicts: a row's first is nobody's target."""
    return (batch.labels[:, 1:] != IGNORED_LABEL).sum()


@runtime_checkable
class TellsItself(Protocol):
    """A source that knows what of it must be the same for a run to go on."""

    def describe(self) -> dict[str, Any]: ...


def describe(source: Source) -> dict[str, Any]:
    """A source as JSON, to tell whether a run goes on with the same."""
    if isinstance(source, TellsItself):
        entries = source.describe()
    else:
        entries = asdict(source) if is_dataclass(source) else vars(source)
    told = json.loads(json.dumps(entries, default=lambda value: type(value).__name__))
    return {"kind": type(source).__name__, **told}
