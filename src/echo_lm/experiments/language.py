"""What the experiments on language models share: models of one size, one text, kept records."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch

from echo_lm.data import TextSource, TokenShards
from echo_lm.experiments.base import Finished, OnMaterial, Scale, Settings, Workbench
from echo_lm.experiments.runner import cell_path, read_cell, weights_path
from echo_lm.experiments.training import Fitted, fit, preset
from echo_lm.model.config import EchoConfig
from echo_lm.model.pretrained import WEIGHTS_FILE
from echo_lm.results import circumstances

OURS = ("Echo (ours)", "Echo (ours, tied start)")
PAPER = "Echo (paper)"
MODELS: dict[str, EchoConfig] = {
    OURS[0]: preset("echo-50m"),
    OURS[1]: preset("echo-50m", tied_start=True),
    PAPER: preset("echo-50m-paper"),
    "Mamba-2 + SKA + SwiGLU": preset("mamba2-ska-swiglu-50m"),
    "Mamba-2 + SwiGLU": preset("mamba2-50m"),
    "Mamba-2 + attention": preset("mamba2-attention-50m"),
    "Transformer": preset("transformer-50m"),
}
"""At 50 million parameters with 32,000 tokens. A tied start is what lets SKA begin to recall in
the synthetic tasks."""
ECHO = (*OURS, PAPER)
WITHOUT_SKA = tuple(model for model, config in MODELS.items() if "ska" not in config.mixers)
LANGUAGE_MODELS = "lm"
"""The experiment that trains them in full, whose weights others go on from."""
CREDENTIALS = (
    "weights",
    "parameters",
    "learning rate",
    "tokens",
    "epochs",
    "rows",
    "length",
    "hardware",
)
"""What others repeat of a model they go on from."""

SHAPES: dict[Scale, dict[str, dict[str, int]]] = {
    "smoke": {"sweep": {"heads": 1, "depth": 4}, "full": {"heads": 2, "depth": 4}},
    "full": {"sweep": {"heads": 3, "depth": 16}, "full": {"heads": 7, "depth": 16}},
}
"""Of the models on which learning rates are tried, and of those that are compared. They differ in
width alone."""


def shaped(config: EchoConfig, heads: int, depth: int) -> EchoConfig:
    """The first blocks of a model, with fewer heads of the same size and all else in proportion."""
    dim = config.dim // config.heads * heads
    hidden = config.mlp_hidden
    if hidden is not None and heads != config.heads:
        hidden = 16 * round(hidden * dim / config.dim / 16)
    return replace(config, dim=dim, heads=heads, mixers=config.mixers[:depth], mlp_hidden=hidden)


class OnText(OnMaterial):
    """An experiment that trains language models on prepared text."""

    reads = "text"

    @cached_property
    def shards(self) -> TokenShards:
        shards = TokenShards(self.material)
        shards.check_tokenizer(shards.tokenizer)
        return shards

    def windows(self, length: int) -> TextSource:
        """The text, to train on and to test with."""
        source = TextSource(self.shards, length)
        for split in ("train", "test"):
            source.check_any(split)
        return source

    def schedule(self, scale: Scale, tokens: int) -> dict[str, Any]:
        """What a protocol says of the text and of how it is read."""
        full = scale == "full"
        length, batch = (2048, 32) if full else (256, 4)
        steps = math.ceil(tokens / (batch * length))
        tokens = steps * batch * length
        manifest, shards = self.shards.manifest["recipe"], self.shards
        return {
            "text": {
                "fingerprint": shards.fingerprint,
                "tokens to train": shards.tokens("train"),
                "tokens held out": shards.tokens("test"),
                "tokenizer": manifest["tokenizer"]["sha256"],
                "vocabulary": shards.vocab_size,
                "separator": manifest["separator"]["token"],
            },
            "length": length,
            "batch": batch,
            "steps": steps,
            "tokens": tokens,
            "epochs": float(f"{tokens / shards.tokens('train'):.3g}"),
            "schedule": "cosine",
            "warmup": steps // 10,
            "floor": 0.1,
            "weight_decay": 0.1,
            "betas": [0.9, 0.95],
            "clip": 1.0,
            "compile": full,
            "evaluate_every": max(1, steps // (20 if full else 5)),
            "evaluate_rows": 64 if full else 32,
            "checkpoint_every": 200,
        }

    def learn(
        self,
        protocol: Mapping[str, Any],
        model: str,
        lr: float,
        seed: int,
        bench: Workbench,
    ) -> tuple[Fitted, dict[str, Any]]:
        """A model that has read the text, and what its record says of that."""
        source = self.windows(protocol["length"])
        config = shaped(MODELS[model], **protocol["shape"])
        fitted = fit(config, source, protocol, seed, bench, lr=lr)
        places = torch.arange(protocol["steps"] * protocol["batch"])
        order = source.order(places, seed=seed, split="train")
        rates = [r["tokens_per_second"] for r in fitted.history.records if "loss" in r]
        return fitted, {
            "diverged": "",
            **fitted.numbers(),
            "learning rate": lr,
            "loss": fitted.history.last("test_loss"),
            "tokens": protocol["tokens"],
            "epochs": protocol["epochs"],
            "rows": protocol["batch"],
            "length": protocol["length"],
            "tokens per second": median(rates),
            "order": hashlib.sha256(order.numpy().tobytes()).hexdigest()[:16],
            "hardware": hardware(bench.device),
        }


def hardware(device: str) -> str:
    told = circumstances()["hardware"]
    return str(told["accelerator" if device.startswith("cuda") else "processor"])


def budget(done: Sequence[Finished]) -> str:
    """How much the models have read, and on what, for the header of a table."""
    told = done[0].numbers
    machines = ", ".join(sorted({cell.numbers["hardware"] for cell in done}))
    return (
        f"{told['tokens']:,} tokens, which are {told['epochs']:g} epochs of the text, in batches "
        f"of {told['rows']} x {told['length']:,}, on {machines}"
    )


def whole(done: Sequence[Finished]) -> list[Finished]:
    """Those that did not diverge."""
    return [cell for cell in done if not cell.numbers["diverged"]]


def kept(
    name: str, cells: Sequence[Settings], scale: Scale, results: Path, *, by: str
) -> list[dict[str, Any]]:
    """The records that one experiment goes on from: those of the seeds of which none is missing."""
    folder = results / name / scale
    records: list[dict[str, Any]] = []
    for seed in count():
        paths = [cell_path(folder, settings, seed) for settings in cells]
        missing = sum(not path.exists() for path in paths)
        if missing and records:
            break
        if missing:
            raise ValueError(
                f"{by} goes on from {name}, of which {missing} of {len(cells)} cells have not run "
                f"in {folder}: run echo-lm reproduce {name} --scale {scale} first."
            )
        records += map(read_cell, paths)
    return records


def as_finished(records: Sequence[Mapping[str, Any]]) -> list[Finished]:
    return [Finished(r["settings"], r["seed"], r["numbers"]) for r in records]


def protocol_of_training(scale: Scale, results: Path) -> dict[str, Any]:
    """Of the models that `lm` has trained, as a record of theirs has it."""
    folder = results / LANGUAGE_MODELS / scale
    for model in MODELS:
        path = cell_path(folder, {"model": model}, 0)
        if path.exists():
            return dict(read_cell(path)["protocol"])
    raise ValueError(
        f"There is no model in {folder}: run echo-lm reproduce {LANGUAGE_MODELS} --scale {scale} "
        "first."
    )


def trained(model: str, seed: int, scale: Scale, results: Path) -> tuple[dict[str, Any], Path]:
    """What `lm` says of a model it has trained, and where its weights lie."""
    folder, settings = results / LANGUAGE_MODELS / scale, {"model": model}
    path, weights = cell_path(folder, settings, seed), weights_path(folder, settings, seed)
    again = f"run echo-lm reproduce {LANGUAGE_MODELS} --scale {scale}"
    if not path.exists():
        raise ValueError(f"There is no {path}: {again} first, for this seed too.")
    told = read_cell(path)["numbers"]
    if told["diverged"]:
        raise ValueError(f"{path} has no weights: {told['diverged']}")
    if not (weights / WEIGHTS_FILE).exists():
        raise ValueError(
            f"{weights} does not hold the weights of {path.name}: bring them from where they were "
            f"trained, or remove that file and {again}."
        )
    if weights_hash(weights) != told["weights"]:
        raise ValueError(f"{weights} holds other weights than those {path} is about.")
    return {name: told[name] for name in CREDENTIALS}, weights


def weights_hash(folder: Path) -> str:
    with (folder / WEIGHTS_FILE).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
