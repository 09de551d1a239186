"""Read token after token into one memory, in place; on a GPU as a CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from echo_lm.ops.backends import say_once

if TYPE_CHECKING:
    from echo_lm.model.lm import EchoLM
    from echo_lm.model.state import EchoState

WAITED = "called a synchronizing CUDA operation"
"""How torch says that the host waited for the device."""


class Decoder:
    """Reads one token of each row after the other, from a state on that is left as it was.

    On a CUDA device the first step is also recorded as a graph, which all later steps replay: one
    launch in the place of hundreds. Where that cannot be, because a cache grows or the host must
    wait for the device, this is said once and every step runs as the first.
    """

    def __init__(self, model: EchoLM, state: EchoState, *, capture: bool = True) -> None:
        self.model = model
        # A tensor made in inference mode could not be written over outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self._state = state.clone()
        self._capture = capture and state.count.device.type == "cuda"
        self._graph: CapturedStep | None = None

    @property
    def state(self) -> EchoState:
        """What has been read; a copy, which later steps do not change."""
        return self._state.clone()

    @property
    def captured(self) -> bool:
        """Steps replay a graph."""
        return self._graph is not None

    def read(self, tokens: Int[Tensor, " b"]) -> Float[Tensor, "b vocab"]:
        """The logits of what follows."""
        if self._graph is not None:
            return self._graph.replay(tokens)
        if not self._capture:
            logits, self._state = step(self.model, tokens, self._state)
            return logits
        self._capture, before = False, self._state
        with noticing_waits() as waits:
            logits, self._state = step(self.model, tokens, before)
        obstacle = "a layer waits for the device" if waits else None
        if grew(before, self._state):
            obstacle = "the memory of a layer grows with the text"
        if obstacle is None:
            try:
                self._graph = CapturedStep(self.model, tokens, self._state)
            except RuntimeError as error:
                obstacle = str(error).splitlines()[0]
        if obstacle is not None:
            say_once(f"Decoding runs without a CUDA graph: {obstacle}.")
        return logits


def step(
    model: EchoLM, tokens: Int[Tensor, " b"], state: EchoState
) -> tuple[Float[Tensor, "b vocab"], EchoState]:
    """Logits, and the state to go on from, which may lie in the tensors of the one given."""
    with torch.inference_mode(False), torch.no_grad():
        out = model(tokens[:, None], state=state, return_state=True, in_place=True)
    return out.logits[:, -1], out.state


def step_over(
    model: EchoLM, tokens: Int[Tensor, " b"], state: EchoState
) -> Float[Tensor, "b vocab"]:
    """Logits; the state to go on from is in every tensor of the one given."""
    logits, after = step(model, tokens, state)
    state.write_over(after)
    return logits


def grew(before: EchoState, after: EchoState) -> bool:
    """Whether a tensor has another shape now, and so no place to stay in."""
    shapes = {name: x.shape for name, x in before.to_dict().items() if isinstance(x, Tensor)}
    return any(
        x.shape != shapes.get(name, x.shape)
        for name, x in after.to_dict().items()
        if isinstance(x, Tensor)
    )


class CapturedStep:
    """A step of a model as a CUDA graph, over the tensors of a state."""

    def __init__(self, model: EchoLM, tokens: Int[Tensor, " b"], state: EchoState) -> None:
        self._tokens = tokens.clone()
        self._graph = torch.cuda.CUDAGraph()
        # Weights that autocast has cast for others will be gone when the graph is replayed.
        cast = torch.autocast(
            "cuda",
            dtype=torch.get_autocast_dtype("cuda"),
            enabled=torch.is_autocast_enabled("cuda"),
            cache_enabled=False,
        )
        with cast, torch.cuda.graph(self._graph):
            self._logits = step_over(model, self._tokens, state)

    def replay(self, tokens: Int[Tensor, " b"]) -> Float[Tensor, "b vocab"]:
        if tokens.shape != self._tokens.shape:
            raise ValueError(
                f"This decoder has {len(self._tokens)} rows and takes a token for each; got "
                f"{list(tokens.shape)}."
            )
        self._tokens.copy_(tokens)
        self._graph.replay()
        return self._logits.clone()


@contextmanager
def noticing_waits() -> Iterator[list[str]]:
    """Collects, once left, what has made the host wait for the device: no graph can hold that."""
    found: list[str] = []
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    for warning in caught:
        if WAITED in str(warning.message):
            found.append(str(warning.message))
        elif "prototype feature" not in str(warning.message):
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )


@torch.no_grad()
def check_decoding(
    model: EchoLM, prompt: Int[Tensor, "b t"], new_tokens: int = 200
) -> dict[str, float]:
    """Hold the decoder to steps that write over nothing: token for token, state for state.

    Raises where greedy tokens differ, or a state by more than a rounding to bf16 would explain;
    returns how far the furthest tensor of the state is off, and whether a graph was replayed.
    """
    read = model(prompt, return_state=True)
    decoder, state = Decoder(model, read.state), read.state
    kept = state.clone()
    chosen = wanted = read.logits[:, -1].argmax(-1)
    for i in range(new_tokens):
        out = model(wanted[:, None], state=state, return_state=True)
        state, wanted = out.state, out.logits[:, -1].argmax(-1)
        chosen = decoder.read(chosen).argmax(-1)
        if not torch.equal(chosen, wanted):
            raise RuntimeError(
                f"The decoder left the path of single steps at token {i + 1} of {new_tokens}: "
                f"{chosen.tolist()} instead of {wanted.tolist()}."
            )
    if difference(kept, read.state) > 0:
        raise RuntimeError("The decoder has changed the state that it was given.")
    off = difference(decoder.state, state)
    if not off < torch.finfo(torch.bfloat16).eps:
        raise RuntimeError(f"After {new_tokens} tokens the state of the decoder is {off:.1e} off.")
    return {"captured": float(decoder.captured), "state off by": off}


def difference(a: EchoState, b: EchoState) -> float:
    """Of the tensors that differ most, in the norm and relative to the second."""
    pairs = [(a.to_dict()[name], x) for name, x in b.to_dict().items() if isinstance(x, Tensor)]
    return max(
        float((x.double() - y.double()).norm() / y.double().norm().clamp_min(1e-30))
        for x, y in pairs
    )
