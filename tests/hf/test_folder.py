"""One folder for both: what either writes, the other reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from echo_lm.hf import EchoForCausalLM, EchoHFConfig
from echo_lm.model import EchoConfig, EchoLM

from .small import FAMILIES, SHRUNK, both, close, random_tokens, small_model


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Bitwise, with the same dtypes."""
    assert got.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert got[name].dtype == weight.dtype, name
        assert torch.equal(got[name], weight), name


@pytest.mark.parametrize("name", FAMILIES)
def test_there_and_back_again_is_bitwise(name: str, tmp_path: Path) -> None:
    ours, theirs = both(name, tmp_path / "ours", torch.float32)
    assert_same(theirs.state_dict(), ours.state_dict())
    theirs.save_pretrained(tmp_path / "theirs")
    back = EchoLM.from_pretrained(tmp_path / "theirs")
    assert back.config == ours.config
    assert_same(back.state_dict(), ours.state_dict())
    files = [load_file(tmp_path / side / "model.safetensors") for side in ("ours", "theirs")]
    assert_same(*files)
    tokens = random_tokens(ours, 2, 11)
    assert torch.equal(theirs(tokens).logits, ours(tokens).logits)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_stay_tied_and_others_apart(tied: bool, tmp_path: Path) -> None:
    model = small_model("echo-50m", torch.float32)
    EchoLM(replace(model.config, tie_embeddings=tied)).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (loaded.head.weight is loaded.embedding.weight) == tied
    assert loaded.config.tie_word_embeddings == tied


def test_dtype_is_the_files_or_as_asked_for(tmp_path: Path) -> None:
    both("echo-50m", tmp_path, torch.bfloat16)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16
    wide = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}
    wide.save_pretrained(tmp_path)
    assert EchoLM.from_pretrained(tmp_path).embedding.weight.dtype == torch.float32


@pytest.mark.parametrize("name", EchoConfig.presets())
def test_every_preset_as_a_configuration(name: str, tmp_path: Path) -> None:
    EchoConfig.preset(name).save(tmp_path / "config.json")
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, EchoHFConfig)
    assert config.to_echo() == EchoConfig.preset(name)
    assert config.hidden_size == config.dim
    assert config.num_hidden_layers == len(config.mixers)
    config.save_pretrained(tmp_path)
    assert EchoConfig.load(tmp_path / "config.json") == EchoConfig.preset(name)


def test_what_transformers_notes_beside_is_no_hindrance(tmp_path: Path) -> None:
    _, theirs = both("echo-50m", tmp_path)
    theirs.config.use_cache = False
    theirs.config.pad_token_id, theirs.config.eos_token_id = 0, [1, 2]
    theirs.save_pretrained(tmp_path)
    entries = json.loads((tmp_path / "config.json").read_text())
    assert entries["eos_token_id"] == [1, 2]
    assert entries["architectures"] == ["EchoForCausalLM"]
    assert EchoLM.from_pretrained(tmp_path).config == theirs.config.to_echo()
    again = AutoConfig.from_pretrained(tmp_path)
    assert (again.use_cache, again.pad_token_id) == (False, 0)


def test_a_configuration_of_nothing_is_a_preset_and_settings_are_checked() -> None:
    assert EchoHFConfig().to_echo() == EchoConfig.preset("echo-50m")
    assert EchoHFConfig(hidden_size=64, heads=2).to_echo().dim == 64
    with pytest.raises(ValueError, match=r"dim must be a multiple of heads, got 65 and 2\."):
        EchoHFConfig(dim=65, heads=2)
    with pytest.raises(ValueError, match=r"ska\.nonsense"):
        EchoHFConfig(ska={"nonsense": 1})


def test_a_new_model_is_drawn_as_echo_draws_it() -> None:
    config = EchoHFConfig(**small_model("echo-50m").config.to_dict())
    torch.manual_seed(3)
    ours = EchoLM(config.to_echo())
    torch.manual_seed(3)
    assert_same(EchoForCausalLM(config).state_dict(), ours.state_dict())


@pytest.mark.parametrize("lost", ["A_log", "raw_ridge", "mlp_norm.weight"])
def test_weights_that_are_not_there_are_never_made_up(lost: str, tmp_path: Path) -> None:
    both("echo-50m", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    gone = next(name for name in weights if name.endswith(lost))
    del weights[gone]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"The weights lack {lost.rpartition('.')[2]} of a "):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_the_vocabulary_may_grow(tmp_path: Path) -> None:
    ours, theirs = both("echo-50m", tmp_path)
    theirs.resize_token_embeddings(70, mean_resizing=False)
    tokens = random_tokens(ours, 2, 9)
    close(theirs(tokens).logits[..., :61], ours(tokens).logits)
    assert theirs.lm.config.vocab_size == 70
    theirs.save_pretrained(tmp_path)
    grown = EchoLM.from_pretrained(tmp_path)
    close(grown(tokens + 9).logits, theirs(tokens + 9).logits)


@pytest.mark.parametrize("name", SHRUNK)
def test_the_model_within_is_made_of_the_same_parameters(name: str, tmp_path: Path) -> None:
    _, theirs = both(name, tmp_path)
    within = dict(theirs.lm.named_parameters())
    assert within.keys() == dict(theirs.named_parameters()).keys()
    assert all(within[name] is p for name, p in theirs.named_parameters())
