from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from echo_lm.model import EchoLM

from .families import SHRUNK, random_tokens, refused, small_config, small_model

WEIGHTS = "model.safetensors"


def assert_same_weights(got: EchoLM, wanted: EchoLM) -> None:
    """Bitwise, with the same dtypes."""
    ours, theirs = got.state_dict(), wanted.state_dict()
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert ours[name].dtype == weight.dtype, name
        assert torch.equal(ours[name], weight), name


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    small_model("echo-50m", torch.float32).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", SHRUNK)
def test_round_trip_is_bitwise(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = small_model(name, dtype)
    model.save_pretrained(tmp_path / "a" / "model")
    loaded = EchoLM.from_pretrained(tmp_path / "a" / "model")
    assert loaded.config == model.config
    assert_same_weights(loaded, model)
    tokens = random_tokens(model, 2, 9)
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_precisions_may_be_mixed(tmp_path: Path) -> None:
    model = small_model("echo-50m", torch.bfloat16)
    for module in model.blocks[0].mixers:
        module.float()
    model.save_pretrained(tmp_path)
    assert_same_weights(EchoLM.from_pretrained(tmp_path), model)


def test_tied_weights_are_stored_once_and_tied_again(saved: Path) -> None:
    assert "head.weight" not in load_file(saved / WEIGHTS)
    loaded = EchoLM.from_pretrained(saved, dtype=torch.float64)
    assert loaded.head.weight is loaded.embedding.weight


def test_weights_that_are_not_tied_are_both_stored(tmp_path: Path) -> None:
    model = EchoLM(replace(small_config("echo-50m"), tie_embeddings=False))
    model.save_pretrained(tmp_path)
    loaded = EchoLM.from_pretrained(tmp_path)
    assert not torch.equal(loaded.head.weight, loaded.embedding.weight)
    assert_same_weights(loaded, model)


def test_dtype_and_device_as_asked_for(saved: Path) -> None:
    stored = EchoLM.from_pretrained(saved)
    narrow = EchoLM.from_pretrained(saved, dtype=torch.bfloat16)
    assert_same_weights(narrow, stored.to(torch.bfloat16))
    assert all(p.is_meta for p in EchoLM.from_pretrained(saved, device="meta").parameters())


def test_a_loaded_model_can_be_trained_like_a_new_one(saved: Path) -> None:
    new, loaded = EchoLM(small_config("echo-50m")), EchoLM.from_pretrained(saved)
    for (name, ours), theirs in zip(loaded.named_parameters(), new.parameters(), strict=True):
        assert ours.requires_grad, name
        spared = hasattr(theirs, "_no_weight_decay")
        assert hasattr(ours, "_no_weight_decay") == spared, name


def test_saving_again_replaces_what_was_there(saved: Path) -> None:
    other = small_model("mamba2-50m", torch.float32)
    other.save_pretrained(saved)
    assert_same_weights(EchoLM.from_pretrained(saved), other)


def test_what_is_missing_is_named(saved: Path) -> None:
    with refused(saved / "elsewhere"):
        EchoLM.from_pretrained(saved / "elsewhere")
    with refused(saved / WEIGHTS):
        EchoLM.from_pretrained(saved / WEIGHTS)
    (saved / WEIGHTS).rename(saved / "weights")
    with refused("no weights", saved / WEIGHTS):
        EchoLM.from_pretrained(saved)
    (saved / "config.json").unlink()
    with refused("no configuration", saved / "config.json"):
        EchoLM.from_pretrained(saved)


Change = Callable[[dict[str, Tensor]], object]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("norm.weight"), ["lacks norm.weight"]),
        (lambda w: w.pop("embedding.weight"), ["lacks embedding.weight"]),
        (lambda w: w.update(extra=torch.ones(1)), ["holds extra", "does not have"]),
        (lambda w: w.update({"head.weight": torch.ones(61, 32)}), ["holds head.weight"]),
        (
            lambda w: (w.pop("norm.weight"), w.update(extra=torch.ones(1))),
            ["lacks norm.weight", " and ", "holds extra"],
        ),
        (lambda w: w.clear(), ["lacks", "more"]),
        (lambda w: w.update({"norm.weight": torch.ones(33)}), ["norm.weight", "[33]", "[32]"]),
        (lambda w: w.update({"norm.weight": torch.ones(1)}), ["norm.weight", "[1]", "[32]"]),
    ],
)
def test_weights_that_do_not_fit_are_named(change: Change, words: list[str], saved: Path) -> None:
    weights = load_file(saved / WEIGHTS)
    change(weights)
    save_file(weights, saved / WEIGHTS)
    with refused(saved / WEIGHTS, *words):
        EchoLM.from_pretrained(saved)


def test_a_configuration_of_another_shape_is_noticed(saved: Path) -> None:
    entries = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(entries | {"vocab_size": 62}))
    with refused("embedding.weight", "[61, 32]", "[62, 32]"):
        EchoLM.from_pretrained(saved)


@pytest.mark.parametrize("left", [0, 5, 100, 0.5, -1])
def test_a_truncated_file_is_refused(left: float, saved: Path) -> None:
    whole = (saved / WEIGHTS).read_bytes()
    end = int(left * len(whole)) if isinstance(left, float) else left
    (saved / WEIGHTS).write_bytes(whole[:end])
    with refused(saved / WEIGHTS, "cut short"):
        EchoLM.from_pretrained(saved)


class Trap:
    """Leaves a trace if it is ever unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.trace,)


def test_a_pickle_is_refused_and_not_loaded(saved: Path) -> None:
    trace = saved / "trace"
    torch.save({"embedding.weight": Trap(trace)}, saved / WEIGHTS)
    with refused(saved / WEIGHTS, "not a safetensors file"):
        EchoLM.from_pretrained(saved)
    assert not trace.exists()
    (saved / WEIGHTS).rename(saved / "model.pt")
    torch.load(saved / "model.pt", weights_only=False)
    assert trace.exists()


def test_a_directory_in_place_of_the_weights_is_refused(saved: Path) -> None:
    (saved / WEIGHTS).unlink()
    (saved / WEIGHTS).mkdir()
    with refused(saved / WEIGHTS):
        EchoLM.from_pretrained(saved)
