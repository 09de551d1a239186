from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from echo_lm.layers import Attention, Mamba2, Mamba3, SpectralKoopmanAttention
from echo_lm.model import EchoConfig, EchoLM
from echo_lm.model.presets import PRESETS

SIZES = {"180m": 180e6, "50m": 50e6}
BASELINES = ["mamba2-ska-swiglu", "mamba2", "mamba2-attention", "mamba3", "transformer"]
PAPER = [name for name in PRESETS if name.endswith("-paper") or "cg-ska" in name]


@cache
def on_paper(name: str) -> EchoLM:
    """The model of a preset without memory for its weights."""
    with torch.device("meta"):
        return EchoLM(EchoConfig.preset(name))


def parameters(name: str) -> int:
    return on_paper(name).num_parameters()


def positions(name: str, mixer: str) -> list[int]:
    return [layer for layer, kind in enumerate(EchoConfig.preset(name).mixers) if kind == mixer]


def test_the_presets_that_were_promised() -> None:
    promised = {f"{baseline}-{size}" for baseline in BASELINES for size in SIZES}
    promised |= {f"echo-{size}{paper}" for size in SIZES for paper in ("", "-paper")}
    promised |= {f"synthetic-{kind}" for kind in ("ssm", "attention", "ska", "ska-paper")}
    promised |= {f"mamba3-{ska}{task}" for ska in ("", "cg-ska-") for task in ("tool", "cot")}
    assert promised <= set(EchoConfig.presets())


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds(name: str) -> None:
    model = on_paper(name)
    assert all(parameter.is_meta for parameter in model.parameters())
    kinds = {
        "ska": (SpectralKoopmanAttention,),
        "mamba2": (Mamba2,),
        "mamba3": (Mamba3,),
        "attention": (Attention,),
        "mamba3+ska": (Mamba3, SpectralKoopmanAttention),
    }
    wanted = [kind for mixer in model.config.mixers for kind in kinds[mixer]]
    assert [type(mixer) for mixer in model.mixers()] == wanted


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("paper", ["", "-paper"])
def test_echo_is_of_the_size_in_its_name(size: str, paper: str) -> None:
    assert abs(parameters(f"echo-{size}{paper}") / SIZES[size] - 1) < 0.03


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("baseline", BASELINES)
def test_baselines_are_of_echos_size_and_shape(size: str, baseline: str) -> None:
    name, echo = f"{baseline}-{size}", f"echo-{size}"
    assert abs(parameters(name) / parameters(echo) - 1) < 0.015
    ours, theirs = EchoConfig.preset(echo), EchoConfig.preset(name)
    assert theirs.mlp == "swiglu"
    assert len(theirs.mixers) == len(ours.mixers)
    assert (theirs.dim, theirs.heads, theirs.vocab_size) == (ours.dim, ours.heads, 32_000)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("synthetic-ssm", 1.11e6),
        ("synthetic-attention", 998e3),
        ("synthetic-ska", 982e3),
        ("synthetic-ska-paper", 982e3),
        ("mamba3-cot", 400e3),
    ],
)
def test_small_models_are_of_the_papers_size(name: str, wanted: float) -> None:
    assert abs(parameters(name) / wanted - 1) < 0.03


def test_the_papers_order_of_sizes() -> None:
    """SKA's is "the smallest model" of the trio."""
    assert (
        parameters("synthetic-ska-paper")
        < parameters("synthetic-attention")
        < parameters("synthetic-ssm")
    )


@pytest.mark.parametrize(
    ("size", "dim", "depth", "heads", "rank", "at"),
    [("180m", 768, 24, 12, 48, [8, 16]), ("50m", 448, 16, 7, 56, [3, 7, 11, 15])],
)
def test_echo_has_the_papers_shape(
    size: str, dim: int, depth: int, heads: int, rank: int, at: list[int]
) -> None:
    for name in (f"echo-{size}", f"echo-{size}-paper"):
        config = EchoConfig.preset(name)
        assert (config.dim, len(config.mixers), config.heads) == (dim, depth, heads)
        assert (config.vocab_size, config.mlp, config.ska.rank) == (32_000, "koopman", rank)
        assert positions(name, "ska") == at
        assert len(positions(name, "mamba2")) == depth - len(at)
    assert positions(f"mamba2-ska-swiglu-{size}", "ska") == at
    assert positions(f"mamba2-attention-{size}", "attention") == at


def test_the_synthetic_trio_has_the_papers_shape() -> None:
    for name in ("synthetic-ssm", "synthetic-attention", "synthetic-ska", "synthetic-ska-paper"):
        config = EchoConfig.preset(name)
        assert (config.dim, config.heads, config.vocab_size, config.mlp) == (128, 4, 128, "swiglu")
        assert config.mamba2.state_dim == 16
        assert len(config.mixers) == 4
    assert positions("synthetic-attention", "attention") == [2, 3]
    assert positions("synthetic-ska", "ska") == [2, 3]
    assert EchoConfig.preset("synthetic-ska-paper").ska.rank == 24


@pytest.mark.parametrize(("task", "heads", "depth"), [("tool", 3, 3), ("cot", 4, 4)])
def test_the_appendix_has_the_papers_shape(task: str, heads: int, depth: int) -> None:
    plain = EchoConfig.preset(f"mamba3-{task}")
    assert (plain.dim, plain.heads, len(plain.mixers)) == (96, heads, depth)
    assert plain.mamba3.state_dim == 16
    for strong, eta in (("", 1.5), ("-strong", 2.5)):
        name = f"mamba3-cg-ska-{task}{strong}"
        assert positions(name, "mamba3+ska") == [depth - 2, depth - 1]
        ska = EchoConfig.preset(name).ska
        assert (ska.rank, ska.eta, ska.lift > 0) == (24, eta, True)


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_operator(name: str) -> None:
    ska = EchoConfig.preset(name).ska
    assert (ska.filter, ska.order, ska.causal, ska.chunk_size) == ("power", 2, "chunk", 64)
    assert (ska.ridge, ska.relative_ridge) == (1e-3, True)


@pytest.mark.parametrize("name", ["echo-180m", "echo-50m", "synthetic-ska"])
def test_ours_differs_in_the_operator_alone(name: str) -> None:
    ours, paper = EchoConfig.preset(name), EchoConfig.preset(f"{name}-paper")
    assert (ours.ska.filter, ours.ska.causal, ours.ska.relative_ridge) == ("bank", "exact", False)
    assert replace(ours, ska=paper.ska) == paper
