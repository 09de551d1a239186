"""Steps over a state of one's own, against steps that write over nothing.

A CUDA graph is recorded from `step_over`, so what it needs is shown here without one: every number
stays in the tensor it was in. `check_decoding` says the same of the graph, on a GPU.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from echo_lm.model import EchoLM
from echo_lm.model import decoder as home
from echo_lm.model.decoder import Decoder, check_decoding, difference, grew, step, step_over
from echo_lm.model.state import EchoState
from echo_lm.ops import backends
from echo_lm.ops.ska import interface as ska_home
from echo_lm.ops.ssd import interface as ssd_home

from .families import (
    FAMILIES,
    RECURRENT,
    SHRUNK,
    TOLERATED,
    assert_close,
    assert_same_state,
    random_tokens,
    read,
    refused,
    rounding,
    small_model,
)

WITH_KERNELS = ["echo-50m", "echo-50m-paper", "mamba3-50m", "echo-50m, fading, convolved, late"]


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Single tokens go to the Triton kernels, as on a CUDA device."""

    def asked_for(choose: Any) -> Any:
        def chosen(backend: str, x: Tensor, other: Tensor, **options: Any) -> str:
            return choose("triton" if x.shape[1] == 1 else backend, x, other, **options)

        return chosen

    monkeypatch.setattr(ska_home, "choose_ska", asked_for(backends.choose_ska))
    monkeypatch.setattr(ssd_home, "choose_scan", asked_for(backends.choose_scan))


def tensors(state: EchoState) -> dict[str, Tensor]:
    return {name: x for name, x in state.to_dict().items() if isinstance(x, Tensor)}


@pytest.mark.parametrize("name", FAMILIES)
def test_steps_in_place_give_the_same_bits(name: str) -> None:
    model = small_model(name, torch.float32)
    assert check_decoding(model, random_tokens(model, 2, 9), 20) == {
        "captured": 0,
        "state off by": 0,
    }


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_kernels_and_steps_in_pytorch_write_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model(name, torch.float32)
    state, token = read(model, random_tokens(model, 2, 7)), random_tokens(model, 2)
    mine, theirs = state.clone(), state
    for _ in range(3):
        logits = step_over(model, token, mine)
        with monkeypatch.context() as plain:
            plain.setattr(ska_home, "choose_ska", backends.choose_ska)
            plain.setattr(ssd_home, "choose_scan", backends.choose_scan)
            out = model(token[:, None], state=theirs, return_state=True)
        theirs = out.state
        assert_close(logits, out.logits[:, -1], model.config)
        token = logits.argmax(-1)
    assert difference(mine, theirs) < TOLERATED * rounding(model.config, torch.float32)


@pytest.mark.usefixtures("_kernels")
def test_kernels_over_a_state_and_on_a_copy_agree() -> None:
    model = small_model("echo-50m", torch.float32)
    check_decoding(model, random_tokens(model, 1, 7), 2)


@pytest.mark.parametrize("name", RECURRENT)
def test_every_number_stays_in_its_tensor(name: str) -> None:
    model = small_model(name, torch.float32)
    state = read(model, random_tokens(model, 2, 9))
    places = {key: x.data_ptr() for key, x in tensors(state).items()}
    wanted = read(model, torch.tensor([[3], [5]]), state.clone())
    step_over(model, torch.tensor([3, 5]), state)
    assert not grew(state, wanted)
    assert_same_state(state, wanted)
    assert {key: x.data_ptr() for key, x in tensors(state).items()} == places


def test_a_cache_that_grows_has_no_place() -> None:
    model = small_model("mamba2-attention-50m", torch.float32)
    state = read(model, random_tokens(model, 1, 4))
    assert grew(state, step(model, torch.tensor([3]), state)[1])
    with refused("keys of AttentionState", "[1, 5, 2, 16]", "[1, 4, 2, 16]"):
        step_over(model, torch.tensor([3]), state)


class Replayed:
    """What a CUDA graph does: the same step, over the same tensors, again and again."""

    def __init__(self, model: EchoLM, tokens: Tensor, state: EchoState) -> None:
        self.model, self.tokens, self.state = model, tokens.clone(), state

    def replay(self, tokens: Tensor) -> Tensor:
        self.tokens.copy_(tokens)
        return step_over(self.model, self.tokens, self.state)


class Recording(Decoder):
    """Behaves as on a CUDA device."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._capture = True


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Decoders record; a step is found to have waited for what the test puts in here."""
    found: list[str] = []
    monkeypatch.setattr(home, "Decoder", Recording)
    monkeypatch.setattr(home, "CapturedStep", Replayed)
    monkeypatch.setattr(home, "noticing_waits", lambda: nullcontext(found))
    backends.say_once.cache_clear()
    return found


@pytest.mark.usefixtures("waits")
@pytest.mark.parametrize("name", RECURRENT)
def test_steps_that_are_replayed_give_the_same_bits(name: str) -> None:
    model = small_model(name, torch.float32)
    found = check_decoding(model, random_tokens(model, 2, 9), 12)
    assert found == {"captured": 1, "state off by": 0}


def test_without_a_graph_it_is_said_why(
    waits: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any) -> None:
        raise RuntimeError("out of memory\nin many lines")

    for name, reason in (
        ("mamba2-attention-50m", "the memory of a layer grows with the text"),
        ("echo-50m", "a layer waits for the device"),
        ("mamba3-50m", "out of memory"),
    ):
        if reason == "a layer waits for the device":
            waits.append("once")
        if reason == "out of memory":
            waits.clear()
            monkeypatch.setattr(home, "CapturedStep", refuse)
        model = small_model(name, torch.float32)
        assert check_decoding(model, random_tokens(model, 2, 9), 4)["captured"] == 0
        assert caplog.messages[-1] == f"Decoding runs without a CUDA graph: {reason}."
    assert len(caplog.messages) == 3


@pytest.mark.parametrize("name", SHRUNK)
def test_states_are_values(name: str) -> None:
    """What went in stays, and what was taken out."""
    model = small_model(name, torch.float32)
    state = read(model, random_tokens(model, 2, 6))
    given = state.clone()
    decoder = Decoder(model, state)
    decoder.read(torch.tensor([1, 2]))
    taken = decoder.state
    kept = taken.clone()
    decoder.read(torch.tensor([3, 4]))
    assert_same_state(state, given)
    assert_same_state(taken, kept)
    assert decoder.state.count.tolist() == [8, 8]
    assert not decoder.captured


@pytest.mark.parametrize("name", ["echo-50m", "mamba3-50m"])
def test_inference_mode_may_end_in_between(name: str) -> None:
    model = small_model(name, torch.float32)
    prompt = random_tokens(model, 1, 5)
    with torch.inference_mode():
        stream = model.stream(prompt, max_new_tokens=6)
        tokens = [next(stream), next(stream)]
    tokens += list(stream)
    assert torch.equal(torch.stack(tokens, 1), model.generate(prompt, max_new_tokens=6)[:, 5:])


def test_a_decoder_from_nothing() -> None:
    model = small_model("echo-50m", torch.float32)
    decoder, text = Decoder(model, model.init_state(2)), random_tokens(model, 2, 12)
    logits = torch.stack([decoder.read(tokens) for tokens in text.unbind(1)], 1)
    torch.testing.assert_close(logits, model(text).logits, atol=1e-4, rtol=1e-3)


def test_gradients_are_refused() -> None:
    model = small_model("echo-50m", torch.float32, grad=True)
    with torch.no_grad():
        state = read(model, random_tokens(model, 1, 4))
    with refused("in_place=True", "torch.no_grad()"):
        model(torch.tensor([[1]]), state=state, return_state=True, in_place=True)


@pytest.mark.parametrize("what", ["tokens", "state"])
def test_a_decoder_that_errs_is_caught(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("echo-50m", torch.float32)
    right = home.step

    def wrong(*given: Any) -> tuple[Tensor, EchoState]:
        logits, state = right(*given)
        if what == "tokens":
            return -logits, state
        return logits, state.map_layers(lambda layer: layer.map(lambda x: x + x // 2))

    monkeypatch.setattr(home, "step", wrong)
    said = {"tokens": "left the path .* at token 1 of 1", "state": "the state of the decoder is"}
    with pytest.raises(RuntimeError, match=said[what]):
        check_decoding(model, random_tokens(model, 2, 9), 1)
