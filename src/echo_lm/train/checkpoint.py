"""Checkpoints: everything a run needs to go on as if it had never stopped.

    FOLDER/step-00000500/config.json, model.safetensors    what `EchoLM.from_pretrained` reads
                         optimiser.safetensors             AdamW's state, and the random generators'
                         run.json                          the step and the settings of the run

One is written beside the last one and renamed when complete; only then does the older one go.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from echo_lm.model.config import EchoConfig
from echo_lm.model.lm import EchoLM
from echo_lm.model.pretrained import save_pretrained
from echo_lm.results import write_json

OPTIMISER_FILE = "optimiser.safetensors"
RUN_FILE = "run.json"
NAME = re.compile(r"step-(\d{8})")
UNFINISHED = ".unfinished"
ANY_VALUE = ("train.checkpoint_every", "train.read_every", "train.accumulate", "train.recompute")
"""Settings that change no number of a run but its rounding, and so may change when it goes on."""


def latest(folder: Path) -> Path | None:
    """The last complete checkpoint of a run."""
    found = [path for path in folder.glob("step-*") if NAME.fullmatch(path.name)]
    return max(found, default=None, key=step_of)


def step_of(path: Path) -> int:
    named = NAME.fullmatch(path.name)
    assert named is not None
    return int(named[1])


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds, in whole tensors whoever held them."""

    step: int
    model: EchoConfig
    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    """AdamW's, and the random generators'."""
    settings: dict[str, Any]


def save(folder: Path, contents: Contents, beside: Sequence[Path] = ()) -> Path:
    """Write the checkpoint of a step whole, or say in one sentence why not and keep the last.

    `beside` are files of which it is to hold copies.
    """
    step = contents.step
    target = folder / f"step-{step:08d}"
    if target.exists():
        return target
    before = latest(folder)
    unfinished = folder / f"{target.name}{UNFINISHED}"
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        save_pretrained(contents.model, contents.weights, unfinished)
        moments = {name: t.contiguous() for name, t in contents.moments.items()}
        save_file(moments, unfinished / OPTIMISER_FILE)
        for path in beside:
            shutil.copyfile(path, unfinished / path.name)
        write_json(unfinished / RUN_FILE, {"step": step, "settings": contents.settings})
        for path in (*unfinished.iterdir(), unfinished):
            _flush(path)
        unfinished.replace(target)
        _flush(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        kept = f"the last one, {before}, is whole" if before else "there is none before it"
        raise ValueError(
            f"The checkpoint of step {step} could not be written to {folder} ({error}); {kept}: "
            "make room and run the same again to go on."
        ) from None
    for older in folder.glob("step-*"):
        # Only what this wrote: a copy under another name is someone's.
        if older != target and NAME.fullmatch(older.name.removesuffix(UNFINISHED)):
            shutil.rmtree(older, ignore_errors=True)
    return target


def load(path: Path, model: EchoLM, settings: dict[str, Any]) -> tuple[int, dict[str, Tensor]]:
    """Bring model and random generators to where the checkpoint left them.

    Returns its step and AdamW's tensors. Refuses a run that had other settings.
    """
    try:
        run = json.loads((path / RUN_FILE).read_text(encoding="utf-8"))
        moments = load_file(path / OPTIMISER_FILE)
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a whole checkpoint: {error}; remove it.") from None
    refuse_other_settings(path, run["settings"], settings)
    model.load_state_dict(EchoLM.from_pretrained(path).state_dict())
    load_random_states(model, moments)
    return int(run["step"]), moments


def refuse_other_settings(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Name the first setting in which two runs differ."""
    old, new = flatten(before), flatten(json.loads(json.dumps(now)))
    for name in {**old, **new}:
        if old.get(name) != new.get(name) and name not in ANY_VALUE:
            raise ValueError(
                f"{path} was trained with {name}={old.get(name)!r}, this call has "
                f"{new.get(name)!r}; go on with the former, or begin in another folder."
            )


def flatten(entries: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one level: `{"train.lr": 0.001}`."""
    flat: dict[str, Any] = {}
    for name, value in entries.items():
        inner = isinstance(value, dict)
        flat |= flatten(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return flat


def random_states(model: EchoLM) -> dict[str, Tensor]:
    """Of torch's generators, on the CPU and on the model's device."""
    states = {"random.cpu": torch.get_rng_state()}
    device = model.embedding.weight.device
    if device.type == "cuda":
        states["random.cuda"] = torch.cuda.get_rng_state(device)
    return states


def load_random_states(model: EchoLM, tensors: dict[str, Tensor]) -> None:
    torch.set_rng_state(tensors["random.cpu"])
    device = model.embedding.weight.device
    if device.type == "cuda" and "random.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random.cuda"], device)


def _flush(path: Path) -> None:
    """Past the system's buffers, so that a power cut finds the new one before the old one goes."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
