"""What `echo-lm train` reads: a TOML file that says what to train, on what, how, and where to."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from echo_lm.model.config import EchoConfig
from echo_lm.settings import build, is_number, one_of, whole, words
from echo_lm.train.config import TrainConfig

Entries = dict[str, Any]


@dataclass(frozen=True)
class TextSettings:
    """Prepared text; see `echo_lm.data.TextSource`."""

    folder: str
    length: int = 2048
    windows: Literal["running", "packed", "apart"] = "running"

    def __post_init__(self) -> None:
        words(self, "folder")


@dataclass(frozen=True)
class RunSettings:
    """Where a run goes, and who takes part."""

    folder: str
    strategy: Literal["alone", "ddp", "zero1", "fsdp2"] = "alone"
    device: str = "auto"
    samples: tuple[str, ...] = ()
    """Prompts that the model goes on from at every evaluation."""
    sample_tokens: int = 48
    track: str = ""
    """Also show the metrics in "trackio" or "wandb"."""

    def __post_init__(self) -> None:
        words(self, "folder", "device")
        one_of(self, "track", "", "trackio", "wandb")
        whole(self, "sample_tokens")
        given: Any = self.samples
        if not isinstance(given, list | tuple) or not all(isinstance(one, str) for one in given):
            raise ValueError(f"samples must be a list of prompts, got {self.samples!r}.")


@dataclass(frozen=True)
class Recipe:
    """A run as it was asked for."""

    model: Entries
    """A preset by name, and what is changed of it."""
    train: Entries
    """What `TrainConfig` takes; `tokens` may stand for `steps`."""
    run: RunSettings
    text: TextSettings | None = None
    task: Entries = field(default_factory=dict)
    """The name of a task and its settings, where it is not text."""

    def model_config(self, vocab_size: int) -> EchoConfig:
        """Of the model, which has as many tokens as it is to read if nothing else is said."""
        changes = {"vocab_size": vocab_size, **self.model}
        preset = changes.pop("preset", None)
        entries = {} if preset is None else EchoConfig.preset(str(preset)).to_dict()
        config = EchoConfig.from_dict(merged(entries, changes))
        if config.vocab_size < vocab_size:
            raise ValueError(
                f"model.vocab_size is {config.vocab_size}, which is less than the {vocab_size} "
                "tokens there are to read; leave it out to take as many."
            )
        return config

    def train_config(self, length: int) -> TrainConfig:
        """Of the loop, for sequences of this length."""
        entries = dict(self.train)
        tokens = entries.pop("tokens", None)
        if (tokens is None) == ("steps" not in entries):
            raise ValueError("train needs steps or tokens, one of the two.")
        if tokens is not None:
            if not is_number(tokens) or not 0 < tokens < math.inf:
                raise ValueError(f"train.tokens must be a positive number, got {tokens!r}.")
            a_step = (
                length * build(TrainConfig, {**entries, "steps": 1, "warmup": 0}, "train.").batch
            )
            entries["steps"] = max(1, round(tokens / a_step))
        config: TrainConfig = build(TrainConfig, entries, "train.")
        return config


SECTIONS = ("model", "text", "task", "train", "run")


def read_recipe(name: str, changes: Sequence[str] = ()) -> Recipe:
    """A recipe from a file, or one of Echo's by name, with changes such as "train.lr=1e-3"."""
    sections = _read(name)
    for change in changes:
        sections = merged(sections, parse_change(change))
    unknown = [section for section in sections if section not in SECTIONS]
    if unknown:
        raise ValueError(f"{name} has a section {unknown[0]!r}; there are {', '.join(SECTIONS)}.")
    for section in sections:
        if not isinstance(sections[section], dict):
            raise ValueError(f"{section} must be a section of settings, got {sections[section]!r}.")
    missing = [section for section in ("model", "train", "run") if section not in sections]
    if missing:
        raise ValueError(f"{name} has no section [{missing[0]}].")
    if ("text" in sections) == ("task" in sections):
        raise ValueError(f"{name} must have one of the sections [text] and [task].")
    return Recipe(
        model=sections["model"],
        train=sections["train"],
        run=build(RunSettings, sections["run"], "run."),
        text=build(TextSettings, sections["text"], "text.") if "text" in sections else None,
        task=sections.get("task", {}),
    )


def recipes() -> list[str]:
    """Echo's own, by name."""
    names = [entry.name for entry in files("echo_lm.train").joinpath("recipes").iterdir()]
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def parse_change(change: str) -> Entries:
    """`"model.ska.rank=64"` as nested settings; what is not a TOML value is taken as text."""
    place, equals, value = change.partition("=")
    names = place.split(".")
    if not equals or len(names) < 2 or not all(names):
        raise ValueError(f'A change is written like "train.lr=1e-3", got {change!r}.')
    try:
        entry: Any = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        entry = value
    for name in reversed(names):
        entry = {name: entry}
    return dict(entry)


def merged(entries: Entries, changes: Entries) -> Entries:
    """Nested settings with some of them changed."""
    result = dict(entries)
    for name, value in changes.items():
        before = result.get(name)
        both = isinstance(before, dict) and isinstance(value, dict)
        result[name] = merged(result[name], value) if both else value
    return result


def _read(name: str) -> Entries:
    if name in recipes():
        return tomllib.loads(
            files("echo_lm.train").joinpath("recipes", f"{name}.toml").read_text(encoding="utf-8")
        )
    path = Path(name)
    if not path.is_file():
        raise ValueError(
            f"There is no recipe {name!r}: name a TOML file, or one of {', '.join(recipes())}."
        )
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{name} is not TOML: {error}.") from None
