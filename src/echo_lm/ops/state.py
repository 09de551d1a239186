"""What an operator remembers between calls: a few tensors, each with the batch in front."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, replace
from typing import Any, Self, get_args, get_type_hints

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass
class TensorState:
    """Base of every state: a dataclass of tensors `[B, ...]`, of nested states, and of plain
    settings. Each method returns a new state, but for `write_over`."""

    def map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """Apply `fn` to every tensor, those of nested states included."""
        changed: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                changed[field.name] = fn(value)
            elif isinstance(value, TensorState):
                changed[field.name] = value.map(fn)
        return replace(self, **changed)

    def clone(self) -> Self:
        return self.map(torch.clone)

    def detach(self) -> Self:
        """Cut the state from the graph that made it (truncated backpropagation)."""
        return self.map(torch.Tensor.detach)

    def to(self, device: torch.device | str) -> Self:
        return self.map(lambda t: t.to(device))

    def write_over(self, new: Self) -> None:
        """Take what `new` holds into the tensors that are here."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(new, field.name)
            if isinstance(mine, TensorState):
                mine.write_over(theirs)
            elif not isinstance(mine, Tensor) and not isinstance(theirs, Tensor):
                setattr(self, field.name, theirs)
            elif _form(mine) != _form(theirs):
                raise ValueError(
                    f"{field.name} of {type(self).__name__} is {_form(theirs)} and cannot be "
                    f"written over {_form(mine)}."
                )
            elif mine is not theirs:
                mine.copy_(theirs)

    def reorder(self, rows: Int[Tensor, " n"]) -> Self:
        """Pick rows of the batch, as beam search does; a row may be taken many times or not."""
        return self.map(lambda t: t.index_select(0, rows.to(t.device)))

    def reset(self, rows: Bool[Tensor, " b"] | None = None) -> Self:
        """Forget everything, or only in the rows that are marked."""

        def wipe(t: Tensor) -> Tensor:
            if rows is None:
                return torch.zeros_like(t)
            marked = rows.to(t.device).view(-1, *[1] * (t.dim() - 1))
            return torch.where(marked, torch.zeros_like(t), t)

        return self.map(wipe)

    @property
    def nbytes(self) -> int:
        """Bytes held, over the whole batch."""
        return sum(t.nbytes for t in self.to_dict().values() if isinstance(t, Tensor))

    def to_dict(self) -> dict[str, Any]:
        """A flat dictionary; a nested state's entries are named `field.entry`."""
        out: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, TensorState):
                out |= {f"{field.name}.{key}": entry for key, entry in value.to_dict().items()}
            elif value is not None:
                out[field.name] = value
        return out

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`."""
        kinds = get_type_hints(cls)
        nested: dict[str, dict[str, Any]] = {}
        own: dict[str, Any] = {}
        for key, value in entries.items():
            name, _, rest = key.partition(".")
            if name not in kinds:
                known = ", ".join(kinds)
                raise ValueError(f"{cls.__name__} has no field {name!r}; it has {known}.")
            if rest:
                nested.setdefault(name, {})[rest] = value
            else:
                own[name] = value
        own |= {name: _state_type(kinds[name]).from_dict(part) for name, part in nested.items()}
        missing = [f.name for f in fields(cls) if f.name not in own and not _has_default(f)]
        if missing:
            raise ValueError(f"{cls.__name__} needs {', '.join(missing)}, not in what was given.")
        return cls(**own)


def _form(value: object) -> str:
    """What must be equal for one tensor to take the place of another."""
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else "nothing"


def _state_type(annotation: Any) -> type[TensorState]:
    """The state class in `S` or `S | None`."""
    options = get_args(annotation) or (annotation,)
    return next(option for option in options if issubclass(option, TensorState))


def _has_default(field: Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING
