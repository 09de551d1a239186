"""The memory of a whole model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from echo_lm.layers import STATES
from echo_lm.ops.state import TensorState


@dataclass(frozen=True)
class EchoState:
    """What a model remembers of each row: a state for every sequence layer, in order.

    Each method returns a new state, but for `write_over`.
    """

    layers: tuple[TensorState, ...]
    count: Int[Tensor, " b"]
    """Tokens read."""

    def map_layers(self, fn: Callable[[TensorState], TensorState]) -> EchoState:
        return replace(self, layers=tuple(fn(layer) for layer in self.layers))

    def clone(self) -> EchoState:
        return replace(self.map_layers(TensorState.clone), count=self.count.clone())

    def detach(self) -> EchoState:
        """Cut the state from the graph that made it (truncated backpropagation)."""
        return self.map_layers(TensorState.detach)

    def to(self, device: torch.device | str) -> EchoState:
        return replace(self.map_layers(lambda layer: layer.to(device)), count=self.count.to(device))

    def write_over(self, new: EchoState) -> None:
        """Take what `new` holds into the tensors that are here."""
        for mine, theirs in zip(self.layers, new.layers, strict=True):
            mine.write_over(theirs)
        self.count.copy_(new.count)

    def reorder(self, rows: Int[Tensor, " n"]) -> EchoState:
        """Pick rows of the batch, as beam search does; a row may be taken many times or not."""
        count = self.count.index_select(0, rows.to(self.count.device))
        return replace(self.map_layers(lambda layer: layer.reorder(rows)), count=count)

    def reset(self, rows: Bool[Tensor, " b"] | None = None) -> EchoState:
        """Forget everything, or only in the rows that are marked."""
        marked = torch.ones_like(self.count, dtype=torch.bool) if rows is None else rows
        count = self.count.masked_fill(marked.to(self.count.device), 0)
        return replace(self.map_layers(lambda layer: layer.reset(rows)), count=count)

    @property
    def nbytes(self) -> int:
        """Bytes held, over the whole batch."""
        return self.count.nbytes + sum(layer.nbytes for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """A flat dictionary; the entries of layer i are named `i.Kind.entry`."""
        out: dict[str, Any] = {"count": self.count}
        for i, layer in enumerate(self.layers):
            kind = type(layer).__name__
            out |= {f"{i}.{kind}.{key}": entry for key, entry in layer.to_dict().items()}
        return out

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> EchoState:
        """The inverse of `to_dict`."""
        layers: dict[int, tuple[str, dict[str, Any]]] = {}
        for key, value in entries.items():
            if key == "count":
                continue
            index, _, rest = key.partition(".")
            kind, _, name = rest.partition(".")
            if not index.isdigit() or kind not in STATES or not name:
                raise ValueError(f"{key!r} is not an entry of an Echo state.")
            layers.setdefault(int(index), (kind, {}))[1][name] = value
        if "count" not in entries or sorted(layers) != list(range(len(layers))) or not layers:
            raise ValueError(
                f"An Echo state needs its count and every layer from 0 on; got layers "
                f"{sorted(layers)}."
            )
        ordered = (layers[i] for i in range(len(layers)))
        return cls(
            layers=tuple(STATES[kind].from_dict(part) for kind, part in ordered),
            count=entries["count"],
        )

    def save(self, path: str | Path, *, of: str = "") -> None:
        """Write the memory to a safetensors file; `of` says which model's it is."""
        path = Path(path)
        entries = self.to_dict()
        tensors = {key: t.contiguous() for key, t in entries.items() if isinstance(t, Tensor)}
        settings = {key: v for key, v in entries.items() if not isinstance(v, Tensor)}
        # Renamed when complete, so that a full disk does not cost an earlier memory.
        unfinished = path.with_name(f"{path.name}.unfinished")
        try:
            save_file(tensors, unfinished, metadata={"settings": json.dumps(settings), "model": of})
            unfinished.replace(path)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"The state cannot be written to {path}: {error}.") from None

    @classmethod
    def load(
        cls, path: str | Path, device: torch.device | str = "cpu", *, of: str = ""
    ) -> EchoState:
        """Read a memory written by `save`; with `of`, only that of this model."""
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                entries: dict[str, Any] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
                notes = file.metadata() or {}
                entries |= json.loads(notes.get("settings", "{}"))
        except FileNotFoundError:
            raise ValueError(f"There is no state at {path}.") from None
        except (SafetensorError, OSError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not a saved state, or is cut short: {error}.") from None
        if of and notes.get("model") != of:
            raise ValueError(f"{path} is the state of another model, or of other weights.")
        return cls.from_dict(entries)
