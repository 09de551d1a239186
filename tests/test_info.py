"""What `echo-lm info` says, against models that are built and run."""

from __future__ import annotations

import io
import re

import pytest
import torch
from rich.console import Console
from rich.table import Table

from echo_lm import EchoConfig, EchoLM, info
from echo_lm.layers import Attention, SpectralKoopmanAttention

SMALL = [
    name for name in EchoConfig.presets() if name.startswith(("synthetic", "mamba3-c", "mamba3-t"))
]


def on_meta(preset: str) -> EchoLM:
    with torch.device("meta"):
        return EchoLM(EchoConfig.preset(preset))


def column(table: Table, header: str) -> list[str]:
    (found,) = (c for c in table.columns if c.header == header)
    return [str(cell) for cell in found.cells]


def number(text: str) -> int:
    """The first number in a text."""
    found = re.search(r"\d[\d,]*", text)
    assert found is not None, text
    return int(found.group().replace(",", ""))


@pytest.mark.parametrize("preset", EchoConfig.presets())
def test_parameters_add_up(preset: str) -> None:
    model = on_meta(preset)
    table = info.parameter_table(model)
    counts = [number(cell) for cell in column(table, "Parameters")]
    shares = [float(cell.rstrip("%")) for cell in column(table, "Share")]
    assert sum(counts) == model.num_parameters()
    assert sum(shares) == pytest.approx(100, abs=0.05 * len(shares))


def test_parameters_go_to_the_layer_that_owns_them() -> None:
    model = on_meta("synthetic-ska")
    table = info.parameter_table(model)
    counts = dict(zip(column(table, "Kind"), column(table, "Parameters"), strict=True))
    ska = [m for m in model.modules() if isinstance(m, SpectralKoopmanAttention)]
    assert number(counts["SpectralKoopmanAttention"]) == sum(
        p.numel() for layer in ska for p in layer.parameters()
    )
    assert number(counts["Embedding"]) == number(counts["Head"]) == 128 * 128
    assert number(counts["Norms"]) == (2 * 4 + 1) * 128


@pytest.mark.parametrize("preset", SMALL)
def test_state_bytes_are_those_of_a_state(preset: str) -> None:
    model = EchoLM(EchoConfig.preset(preset)).eval()
    tokens = 70
    with torch.inference_mode():
        text = torch.randint(model.config.vocab_size, (1, tokens))
        state = model(text, return_state=True).state
    assert state is not None
    kinds = [type(mixer).__name__ for mixer in model.mixers()]
    table = info.state_table(model)
    assert sum(int(cell) for cell in column(table, "Layers")) == len(kinds)
    for kind, shown, grows in zip(
        column(table, "Kind"), column(table, "Bytes"), column(table, "Grows"), strict=True
    ):
        layers = [layer for k, layer in zip(kinds, state.layers, strict=True) if k == kind]
        if kind == "Attention":
            # Weights are fp32 here, the table counts a bf16 cache.
            cache = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
            assert number(grows) * tokens == cache // 2
        else:
            assert grows == "no"
            assert number(shown) == sum(layer.nbytes for layer in layers)


def first_length_where_a_cache_is_larger(attention: Attention, size: int) -> int:
    """Found by growing a cache in bf16, not by a formula."""
    attention = attention.to(torch.bfloat16)
    state = attention.init_state(1)
    x = torch.zeros(1, 1, attention.dim, dtype=torch.bfloat16)
    tokens = 0
    while state.keys.nbytes + state.values.nbytes <= size:
        _, state = attention(x, state)
        assert state is not None
        tokens += 1
    return tokens


@torch.inference_mode()
def test_crossovers_are_where_a_real_cache_becomes_larger() -> None:
    model = EchoLM(EchoConfig.preset("synthetic-ska"))
    config, ska = model.config, model.mixers()[-1]
    assert isinstance(ska, SpectralKoopmanAttention)
    paper, layer, whole = (
        number(line.rpartition("more than")[2]) for line in info.crossovers(model)
    )

    r, P = ska.rank, ska.value_dim
    held = 2 * r * r + P * r + r + 1
    assert paper * (r + P) <= held < (paper + 1) * (r + P)

    attention = Attention(config.dim, heads=config.heads)
    assert first_length_where_a_cache_is_larger(attention, ska.state_bytes) == layer + 1
    total = sum(info.state_bytes(mixer) for mixer in model.mixers())
    share = total // len(config.mixers)
    assert first_length_where_a_cache_is_larger(attention, share) == whole + 1


def test_crossover_of_the_paper() -> None:
    """r = 48, P = 64: 7,729 numbers against 112 a token."""
    assert info.crossovers(on_meta("echo-180m"))[0].endswith("more than 69 tokens.")


def test_nothing_crosses_where_there_is_nothing_to_compare() -> None:
    assert info.crossovers(on_meta("transformer-50m")) == []
    assert len(info.crossovers(on_meta("mamba2-50m"))) == 1


@pytest.mark.parametrize(
    ("preset", "described"),
    [
        ("echo-180m", "24: mamba2, ska at 8, 16"),
        ("transformer-50m", "16: attention"),
        ("mamba3-cg-ska-tool", "3: mamba3+ska, mamba3 at 0"),
    ],
)
def test_blocks_in_words(preset: str, described: str) -> None:
    assert info.describe_mixers(EchoConfig.preset(preset)) == described


def test_the_machine_shows_every_choice_in_full() -> None:
    console = Console(file=io.StringIO(), width=80)
    info.show_machine(console)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "scaled_dot_product_attention" in shown
    assert "…" not in shown
