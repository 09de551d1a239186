"""What `echo-lm info` shows."""

from __future__ import annotations

import math
import platform
from collections import Counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from echo_lm import __version__
from echo_lm.analysis.memory import cache_crossover
from echo_lm.layers import SpectralKoopmanAttention
from echo_lm.model.config import EchoConfig
from echo_lm.model.lm import EchoLM
from echo_lm.ops.backends import choices, device_name


def show_machine(console: Console | None = None) -> None:
    """Versions, devices, who computes what, and the presets by name."""
    console = console or Console()
    console.print(
        f"Echo {__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{device_name()}"
    )
    table = _table("", "Work", "Who computes", "Why")
    for choice in choices():
        table.add_row(choice.work, choice.chosen, choice.why)
    console.print(table)
    console.print("Presets (echo-lm info NAME):", ", ".join(EchoConfig.presets()))


def show_preset(name: str, console: Console | None = None) -> None:
    """Layers, parameters by kind, state, and where a cache would outgrow it."""
    console = console or Console()
    config = EchoConfig.preset(name)
    with torch.device("meta"):
        model = EchoLM(config)
    console.print(f"[bold]{name}[/bold]: {model.num_parameters():,} parameters")
    console.print(f"Blocks: {describe_mixers(config)}; MLP: {config.mlp}")
    for table in (parameter_table(model), state_table(model)):
        console.print(table)
    for line in crossovers(model):
        console.print(line)


def describe_mixers(config: EchoConfig) -> str:
    """Such as "24: mamba2, ska at 8, 16"."""
    usual = Counter(config.mixers).most_common(1)[0][0]
    others = dict.fromkeys(mixer for mixer in config.mixers if mixer != usual)
    places = (
        f"{other} at {', '.join(str(i) for i, m in enumerate(config.mixers) if m == other)}"
        for other in others
    )
    return ", ".join([f"{len(config.mixers)}: {usual}", *places])


def parameter_table(model: EchoLM) -> Table:
    """Parameters of each kind of layer; a tied head belongs to the embedding."""
    owners = Counter[str]()
    counted: set[int] = set()
    for module_name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in counted:
                counted.add(id(parameter))
                owners[_owner(model, module_name)] += parameter.numel()
    table = _table("Parameters", "Kind", "Parameters", "Share")
    total = sum(owners.values())
    for kind, count in owners.most_common():
        table.add_row(kind, f"{count:,}", f"{count / total:.1%}")
    return table


def _owner(model: EchoLM, module_name: str) -> str:
    """The kind of the layer a module belongs to."""
    parts = module_name.split(".")
    if parts[0] != "blocks":
        return {"embedding": "Embedding", "head": "Head"}.get(parts[0], "Norms")
    if "norm" in parts[2]:
        return "Norms"
    layer: nn.Module = model.get_submodule(".".join(parts[: 4 if parts[2] == "mixers" else 3]))
    return type(layer).__name__


def state_table(model: EchoLM) -> Table:
    """Bytes of state of one sequence that has begun."""
    states = Counter[str]()
    layers = Counter[str]()
    for mixer in model.mixers():
        kind = type(mixer).__name__
        layers[kind] += 1
        states[kind] += state_bytes(mixer)
    table = _table("State of one sequence", "Kind", "Layers", "Bytes", "Grows")
    for kind in layers:
        grows = kind == "Attention"
        shown = "0 at the start" if grows else f"{states[kind]:,}"
        growth = f"{cache_bytes_per_token(model) * layers[kind]:,} a token" if grows else "no"
        table.add_row(kind, str(layers[kind]), shown, growth)
    return table


def state_bytes(mixer: Any) -> int:
    """Bytes one sequence's state takes once it has begun."""
    if isinstance(mixer, SpectralKoopmanAttention):
        return mixer.state_bytes
    return int(mixer.init_state(1).nbytes)


def cache_bytes_per_token(model: EchoLM) -> int:
    """Keys and values of one attention layer of the model's width, in bf16."""
    return 2 * 2 * model.config.dim


def crossovers(model: EchoLM) -> list[str]:
    """From which context length on attention would need more memory."""
    ska = [m for m in model.mixers() if isinstance(m, SpectralKoopmanAttention)]
    grows = any(type(m).__name__ == "Attention" for m in model.mixers())
    lines = []
    if ska:
        r, P = ska[0].rank, ska[0].value_dim
        lines.append(
            f"One SKA head against a cache of keys of width {r} and values of width {P}, counting "
            f"numbers as Appendix I does: more than {math.floor(cache_crossover(r, P)):,} tokens."
        )
        tokens = ska[0].state_bytes // cache_bytes_per_token(model)
        lines.append(
            f"One SKA layer against an attention layer of the same width with a bf16 cache, "
            f"counting bytes: more than {tokens:,} tokens."
        )
    if not grows:
        total = sum(state_bytes(mixer) for mixer in model.mixers())
        cache = cache_bytes_per_token(model) * len(model.config.mixers)
        lines.append(
            f"All {total:,} bytes against a Transformer of the same width and depth with a bf16 "
            f"cache: more than {total // cache:,} tokens."
        )
    return lines


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title or None, title_justify="left")
    for i, column in enumerate(columns):
        number = column in ("Parameters", "Share", "Layers", "Bytes")
        table.add_column(column, justify="right" if number and i else "left", no_wrap=i < 2)
    return table
