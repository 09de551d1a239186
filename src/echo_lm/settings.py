"""Settings from JSON or TOML into dataclasses, and what is said of bad ones. Free of torch."""

from __future__ import annotations

import math
from dataclasses import MISSING, fields
from typing import Any


def build(cls: Any, entries: Any, prefix: str) -> Any:
    """Construct a dataclass from JSON, naming what is unknown or missing."""
    if not isinstance(entries, dict):
        raise ValueError(f"{prefix.rstrip('.')} must be an object of settings, got {entries!r}.")
    known = {f.name: f for f in fields(cls)}
    unknown = [prefix + name for name in entries if name not in known]
    if unknown:
        raise ValueError(
            f"The configuration holds {', '.join(unknown)}, which this version of Echo does not "
            f"know; it knows {', '.join(prefix + name for name in known)}."
        )
    missing = [
        prefix + name
        for name, f in known.items()
        if name not in entries and f.default is MISSING and f.default_factory is MISSING
    ]
    if missing:
        raise ValueError(f"The configuration lacks {', '.join(missing)}.")
    try:
        return cls(**entries)
    except ValueError as error:
        raise ValueError(f"{prefix}{error}") from None


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def positive(config: Any, *names: str) -> None:
    """Refuse what is no number above 0."""
    for name in names:
        value = getattr(config, name)
        if not is_number(value) or not 0 < value < math.inf:
            raise ValueError(f"{name} must be a positive number, got {value!r}.")


def whole(config: Any, *names: str, least: int = 1) -> None:
    """Refuse what is no whole number, or too small."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} must be a whole number from {least} on, got {value!r}.")


def share(config: Any, *names: str) -> None:
    """Refuse what is no number between 0 and 1."""
    for name in names:
        value = getattr(config, name)
        if not is_number(value) or not 0 <= value <= 1:
            raise ValueError(f"{name} is a share between 0 and 1, got {value!r}.")


def words(config: Any, *names: str) -> None:
    """Refuse what is no text."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, str):
            raise ValueError(f"{name} must be text, got {value!r}; put it in quotes.")


def one_of(config: Any, name: str, *allowed: object) -> None:
    """Refuse what is none of these."""
    value = getattr(config, name)
    if not any(type(value) is type(one) and value == one for one in allowed):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}.")
