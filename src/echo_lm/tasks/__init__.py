"""Synthetic recall tasks, one family a file."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from echo_lm.tasks.base import Batch, Family, Split, Task
from echo_lm.tasks.common_word import CommonWord
from echo_lm.tasks.cot_retrieval import CoTRetrieval
from echo_lm.tasks.mixture import Mixture, Repeated
from echo_lm.tasks.mqar import MQAR
from echo_lm.tasks.multihop import MultiHop
from echo_lm.tasks.niah import NIAH
from echo_lm.tasks.overwritten import Overwritten
from echo_lm.tasks.resource_economy import ResourceEconomy
from echo_lm.tasks.specific_recall import SpecificRecall
from echo_lm.tasks.system_prompt import SystemPrompt
from echo_lm.tasks.tool_calling import ToolCalling
from echo_lm.tasks.tool_trace import ToolTrace
from echo_lm.tasks.zoology import Zoology

__all__ = [
    "MQAR",
    "NIAH",
    "TASKS",
    "Batch",
    "CoTRetrieval",
    "CommonWord",
    "Family",
    "Mixture",
    "MultiHop",
    "Overwritten",
    "Repeated",
    "ResourceEconomy",
    "SpecificRecall",
    "Split",
    "SystemPrompt",
    "Task",
    "ToolCalling",
    "ToolTrace",
    "Zoology",
    "find",
    "parse_settings",
    "settings_of",
]

TASKS: dict[str, type[Family]] = {
    "mqar": MQAR,
    "overwritten": Overwritten,
    "zoology": Zoology,
    "system-prompt": SystemPrompt,
    "tool-trace": ToolTrace,
    "niah": NIAH,
    "multihop": MultiHop,
    "common-word": CommonWord,
    "tool-calling": ToolCalling,
    "resource-economy": ResourceEconomy,
    "cot-retrieval": CoTRetrieval,
    "specific-recall": SpecificRecall,
}


def find(name: str, **settings: Any) -> Family:
    """A task by name, with settings of its own.

    >>> find("mqar", pairs=32, gap=384)
    MQAR(pairs=32, gap=384, queries=None)
    """
    if name not in TASKS:
        raise ValueError(f"There is no task {name!r}; there are {', '.join(TASKS)}.")
    known = settings_of(name)
    unknown = [setting for setting in settings if setting not in known]
    if unknown:
        raise ValueError(
            f"The task {name!r} has no setting {unknown[0]!r}; it has {', '.join(known)}."
        )
    return TASKS[name](**settings)


def settings_of(name: str) -> dict[str, Any]:
    """The settings of a task and what they are if not given."""
    parameters = inspect.signature(TASKS[name]).parameters
    return {setting: parameter.default for setting, parameter in parameters.items()}


def parse_settings(words: Sequence[str]) -> dict[str, Any]:
    """`["pairs=32", "filler=zero"]`, as a command line has it, for `find`."""
    settings: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise ValueError(f'A setting is written like "pairs=8", got {word!r}.')
        literal = {"true": True, "false": False}.get(value.lower(), value)
        settings[name] = int(value) if value.lstrip("-").isdecimal() else literal
    return settings
