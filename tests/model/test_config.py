from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

from echo_lm.model import EchoConfig
from echo_lm.model.config import DeltaConfig, Mamba2Config, Mamba3Config, SKAConfig

from .families import refused

TINY = EchoConfig(dim=8, mixers=("mamba2", "ska"), heads=2)


def test_reading_a_configuration_does_not_import_torch() -> None:
    program = (
        "import sys\n"
        "from echo_lm.model import EchoConfig\n"
        "import echo_lm.model.presets\n"
        "for name in EchoConfig.presets():\n"
        "    EchoConfig.from_dict(EchoConfig.preset(name).to_dict())\n"
        "assert 'torch' not in sys.modules, sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("name", EchoConfig.presets())
def test_round_trip(name: str, tmp_path: Path) -> None:
    config = EchoConfig.preset(name)
    config.save(tmp_path / "config.json")
    loaded = EchoConfig.load(tmp_path / "config.json")
    assert loaded == config
    assert hash(loaded) == hash(config)
    assert EchoConfig.from_dict(config.to_dict()) == config


def test_the_file_says_what_it_is(tmp_path: Path) -> None:
    TINY.save(tmp_path / "config.json")
    text = (tmp_path / "config.json").read_text()
    entries = json.loads(text)
    assert text.endswith("}\n")
    assert entries["model_type"] == "echo"
    assert entries["mixers"] == ["mamba2", "ska"]
    assert entries["ska"]["causal"] == "exact"


def test_defaults_may_be_left_out() -> None:
    assert EchoConfig.from_dict({"dim": 8, "mixers": ["mamba2", "ska"], "heads": 2}) == TINY
    part = EchoConfig.from_dict({"dim": 12, "mixers": ["ska"], "ska": {"rank": 4}})
    assert part.ska == SKAConfig(rank=4)


def test_every_setting_survives(tmp_path: Path) -> None:
    config = replace(
        TINY,
        mixers=("mamba3+ska", "attention", "mamba3", "delta"),
        mlp="koopman-gated",
        mlp_hidden=10,
        tie_embeddings=False,
        embedding_dropout=0.1,
        norm_eps=1e-6,
        rope_theta=500.0,
        ska=SKAConfig(3, "power", 4, "chunk", 7, 0.1, "trace", 2.5, 2, (9.5, 20), 4, False, True),
        mamba2=Mamba2Config(1, 2, 3, 4, 5),
        mamba3=Mamba3Config(1, 2, 3, 4, 0.25, False, 6),
        delta=DeltaConfig(1, 2),
    )
    config.save(tmp_path / "config.json")
    assert EchoConfig.load(tmp_path / "config.json") == config


def test_frozen() -> None:
    for part in (TINY, TINY.ska, TINY.mamba2, TINY.mamba3, TINY.delta):
        with pytest.raises(FrozenInstanceError):
            part.heads = 3  # type: ignore[misc]


def test_a_list_of_mixers_becomes_a_tuple() -> None:
    assert EchoConfig(dim=8, mixers=["ska"], heads=2).mixers == ("ska",)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dim": 0}, ["dim", "got 0"]),
        ({"dim": -8}, ["dim", "-8"]),
        ({"dim": 8.0}, ["dim", "8.0"]),
        ({"dim": "8"}, ["dim", "'8'"]),
        ({"dim": True}, ["dim", "True"]),
        ({"dim": None}, ["dim", "None"]),
        ({"vocab_size": 0}, ["vocab_size", "got 0"]),
        ({"heads": 3}, ["heads", "8", "3"]),
        ({"heads": 2.0}, ["heads", "2.0"]),
        ({"mixers": ()}, ["mixers", "()"]),
        ({"mixers": "ska"}, ["mixers", "'ska'"]),
        ({"mixers": None}, ["mixers", "None"]),
        ({"mixers": ("ska", "gru")}, ["'gru'", "mamba2"]),
        ({"mixers": ("ska", 3)}, ["got 3"]),
        ({"mlp": "relu"}, ["mlp", "'relu'", "swiglu"]),
        ({"mlp": None}, ["mlp", "None", "none"]),
        ({"mlp_hidden": 0}, ["mlp_hidden", "got 0"]),
        ({"mlp_hidden": 64.0}, ["mlp_hidden", "64.0"]),
        ({"tie_embeddings": "no"}, ["tie_embeddings", "'no'"]),
        ({"tie_embeddings": 1}, ["tie_embeddings", "got 1"]),
        ({"embedding_dropout": 1.5}, ["embedding_dropout", "1.5"]),
        ({"norm_eps": 0.0}, ["norm_eps", "0.0"]),
        ({"norm_eps": float("nan")}, ["norm_eps", "nan"]),
        ({"rope_theta": float("inf")}, ["rope_theta", "inf"]),
        ({"ska": {"rank": 4}}, ["ska", "SKAConfig", "{'rank': 4}"]),
        ({"mamba2": None}, ["mamba2", "Mamba2Config", "None"]),
        ({"mamba3": Mamba2Config()}, ["mamba3", "Mamba3Config", "Mamba2Config("]),
    ],
    ids=str,
)
def test_bad_values_are_named(settings: dict[str, Any], words: list[str]) -> None:
    with refused(*words):
        replace(TINY, **settings)


@pytest.mark.parametrize(
    ("part", "settings", "words"),
    [
        ("ska", {"rank": 0}, ["got 0"]),
        ("ska", {"rank": "48"}, ["'48'"]),
        ("ska", {"order": -1}, ["-1"]),
        ("ska", {"order": 1.5}, ["1.5"]),
        ("ska", {"lift": 3}, ["even", "got 3"]),
        ("ska", {"lift": -2}, ["-2"]),
        ("ska", {"filter": "Bank"}, ["'Bank'", "'power'"]),
        ("ska", {"causal": True}, ["causal", "True", "'exact'"]),
        ("ska", {"causal": 0}, ["causal", "got 0"]),
        ("ska", {"chunk_size": 0}, ["chunk_size", "got 0"]),
        ("ska", {"ridge": 0.0}, ["ridge", "0.0"]),
        ("ska", {"ridge": "small"}, ["ridge", "'small'"]),
        ("ska", {"eta": 0}, ["eta", "got 0"]),
        ("ska", {"relative_ridge": "yes"}, ["relative_ridge", "'yes'"]),
        ("ska", {"relative_ridge": True}, ["relative_ridge", '"chunk"', '"exact"']),
        ("ska", {"relative_ridge": "trace"}, ["'trace'", '"chunk"', '"exact"']),
        ("ska", {"half_life": 0}, ["half_life", "got 0"]),
        ("ska", {"half_life": "long"}, ["half_life", "'long'"]),
        ("ska", {"half_life": [16, 0]}, ["half_life", "(16, 0)"]),
        ("ska", {"half_life": []}, ["half_life", "()"]),
        ("ska", {"half_life": 64, "causal": False}, ["half_life=64", '"chunk"', "False"]),
        ("ska", {"conv_kernel": -1}, ["conv_kernel", "-1"]),
        ("ska", {"conv_silu": 1}, ["conv_silu", "got 1"]),
        ("ska", {"key_norm": "rms"}, ["key_norm", "'rms'"]),
        ("ska", {"sees_itself": 0}, ["sees_itself", "got 0"]),
        ("ska", {"sees_itself": False, "causal": "chunk"}, ["sees_itself=False", "'chunk'"]),
        ("ska", {"tied_start": 1}, ["tied_start", "1"]),
        ("mamba2", {"state_dim": 0}, ["state_dim", "got 0"]),
        ("mamba2", {"expand": 1.5}, ["expand", "1.5"]),
        ("mamba3", {"rank": 0}, ["got 0"]),
        ("mamba3", {"rope_fraction": 1.5}, ["rope_fraction", "1.5"]),
        ("mamba3", {"rope_fraction": "half"}, ["rope_fraction", "'half'"]),
        ("mamba3", {"gate": "on"}, ["gate", "'on'"]),
        ("mamba3", {"conv_kernel": -1}, ["conv_kernel", "-1"]),
        ("delta", {"key_dim": 0}, ["key_dim", "got 0"]),
        ("delta", {"conv_kernel": 0}, ["conv_kernel", "got 0"]),
    ],
    ids=str,
)
def test_bad_values_of_a_layer_are_named(
    part: str, settings: dict[str, Any], words: list[str]
) -> None:
    with refused(*words):
        type(getattr(TINY, part))(**settings)
    entries = TINY.to_dict()
    entries[part] |= settings
    with refused(f"{part}.{next(iter(settings))}", *words):
        EchoConfig.from_dict(entries)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"depth": 3}, ["depth", "mixers"]),
        ({"ska": {"rank": 4, "ranks": 5, "gamma": 1}}, ["ska.ranks", "ska.gamma", "ska.rank"]),
        ({"ska": 4}, ["ska", "got 4"]),
        ({"mamba3": [1]}, ["mamba3", "[1]"]),
        ({"mamba2": None}, ["mamba2", "None"]),
        ({"model_type": "llama"}, ["'llama'", "Echo"]),
        ({"model_type": None}, ["None", "Echo"]),
        ({"heads": "2"}, ["heads", "'2'"]),
    ],
    ids=str,
)
def test_a_foreign_configuration_is_refused(change: dict[str, Any], words: list[str]) -> None:
    with refused(*words):
        EchoConfig.from_dict(TINY.to_dict() | change)


@pytest.mark.parametrize("missing", ["dim", "mixers"])
def test_missing_settings_are_named(missing: str) -> None:
    entries = TINY.to_dict()
    del entries[missing]
    with refused("lacks", missing):
        EchoConfig.from_dict(entries)


def test_reading_changes_nothing_in_what_was_read() -> None:
    entries = TINY.to_dict()
    kept = json.loads(json.dumps(entries))
    EchoConfig.from_dict(entries)
    assert entries == kept


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["not a JSON configuration"]),
        (b'{"dim": 8, ', ["not a JSON configuration"]),
        (b"\xff\xfe\x00", ["not a JSON configuration"]),
        (b"[1, 2]", ["JSON object", "list"]),
        (b"{}", ["lacks dim, mixers"]),
        (b'{"dim": NaN, "mixers": ["ska"]}', ["dim", "nan"]),
    ],
    ids=str,
)
def test_a_bad_file_is_refused(content: bytes, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with refused(*words):
        EchoConfig.load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with refused(tmp_path / "none.json"):
        EchoConfig.load(tmp_path / "none.json")


def test_unknown_presets_are_named() -> None:
    with refused("'echo-7b'", "echo-180m", "synthetic-ska"):
        EchoConfig.preset("echo-7b")
