"""`echo-lm bench decode`: what is timed goes on from what was read, and weighs what is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from echo_lm import EchoConfig, EchoLM
from echo_lm.bench import decode
from echo_lm.bench.cache import FREE, AttentionWithRoom, cache_bytes
from echo_lm.bench.decode import random_text
from echo_lm.bench.parity import ParityError
from echo_lm.bench.record import Row
from echo_lm.layers import Attention, SpectralKoopmanAttention

from .runs import measured

PRESETS = ("synthetic-ska", "synthetic-attention")


def quiet(what: str) -> None:
    pass


def test_both_kinds_of_model_at_every_context(tmp_path: Path) -> None:
    bench = decode.bench(PRESETS, {1: [20, 80], 3: [20]}, rounds=2, seed=0, device="cpu")
    record, said = measured(bench, tmp_path)
    assert list(record["numbers"]) == [
        "parity of synthetic-ska",
        "synthetic-ska, synthetic-attention; batch 1; after 20, 80 tokens",
        "synthetic-ska, synthetic-attention; batch 3; after 20 tokens",
    ]
    parity, one, three = record["numbers"].values()
    assert parity[0]["what"] == "synthetic-ska"
    assert 0 < parity[0]["error of logits"] < parity[0]["allowed"]
    assert 0 < parity[0]["of state"] < parity[0]["allowed"]
    assert [(row["what"], row["context"]) for row in one] == [
        (preset, context) for preset in PRESETS for context in (20, 80)
    ]
    assert len(three) == 2
    ska, _, cache, longer = one
    assert ska["MiB"] == one[1]["MiB"] == three[0]["MiB"] / 3
    assert longer["MiB"] - cache["MiB"] == pytest.approx(60 * 2 * 2 * 128 * 4 / 2**20)
    assert ska["x attention"] > 0
    assert cache["x attention"] is None
    for row in (*one, *three):
        assert row["ms"] > 0
        assert row["note"] is None
        batch = 1 if row in one else 3
        assert row["tokens/s"] == pytest.approx(1e3 * batch / row["ms"])
    assert ska["x shortest"] == cache["x shortest"] == 1
    assert "The targets are for a GPU." in said


@pytest.mark.parametrize("preset", ["synthetic-ska", "synthetic-ska-paper", "mamba3-cg-ska-tool"])
def test_nothing_is_timed_while_steps_are_wrong(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single token is read as if its queries were a little longer."""

    def no_clock(*given: object) -> list[Row]:
        raise AssertionError("timed")

    monkeypatch.setattr(decode, "compare", no_clock)
    project = SpectralKoopmanAttention.project

    def wrong(self: Any, x: Tensor, *given: Any, **options: Any) -> Any:
        q, *rest = project(self, x, *given, **options)
        return (q if x.shape[1] > 1 else 1.02 * q, *rest)

    monkeypatch.setattr(SpectralKoopmanAttention, "project", wrong)
    bench = decode.bench([preset], {1: [8]}, rounds=1, seed=0, device="cpu")
    with pytest.raises(ParityError, match=r"Steps are not the parallel form: .* no speed is"):
        measured(bench, tmp_path)
    assert not list(tmp_path.iterdir())


def test_attention_over_a_cache_that_lies_ready_is_attention() -> None:
    """The same answer, with the cache that the layer itself has made of a text."""
    layer = Attention(32, heads=2).double()
    x = torch.randn(3, 11, 32, dtype=torch.float64)
    wanted = layer(x)[0][:, -1:]
    _, cache = layer(x[:, :-1])
    assert cache is not None
    ready = AttentionWithRoom.of(layer, 3, 20)
    ready.length = 11
    ready.keys[:, :, :10], ready.values[:, :, :10] = (
        part.transpose(1, 2) for part in (cache.keys, cache.values)
    )
    found, state = ready(x[:, -1:], None, lengths=None, return_state=True)
    assert state is None
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-12)


@torch.inference_mode()
def test_a_cache_weighs_what_the_model_s_own_does() -> None:
    model = EchoLM(EchoConfig.preset("synthetic-attention"))
    own = model(random_text(model, 2, 31), return_state=True).state
    assert own is not None
    ((_, reader),) = decode.with_room(model, [30], 2, quiet)
    assert reader.nbytes == own.nbytes
    assert cache_bytes(model, 2) == 2 * 2 * 2 * 128 * 4


@torch.inference_mode()
def test_what_does_not_fit_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model = EchoLM(EchoConfig.preset("synthetic-attention"))
    room = 41 * cache_bytes(model, 1) / FREE
    monkeypatch.setattr(decode, "free_bytes", lambda device: room)
    assert [context for context, _ in decode.with_room(model, [20, 30, 60], 1, quiet)] == [20, 30]
    rows = decode.compare(["synthetic-attention"], [20, 60], 1, 1, torch.float32, "cpu", quiet)
    assert rows[0]["note"] is None
    assert rows[1]["ms"] is None
    assert rows[1]["note"] == "did not run: its cache does not fit into memory"


@torch.inference_mode()
def test_a_model_has_read_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(decode.PIECE, "cpu", 16)
    states: list[Any] = []
    monkeypatch.setattr(decode, "stream_seconds", lambda model, state: states.append(state) or 1.0)
    model = EchoLM(EchoConfig.preset("synthetic-ska"))
    for _, reader in decode.reading(model, [10, 50], 2, quiet):
        reader.step_seconds()
    assert [state.count.tolist() for state in states] == [[10, 10], [50, 50]]


def test_targets_are_the_ratios_of_the_table() -> None:
    def row(name: str, context: int, slower: float, faster: float | None) -> Row:
        ratios = {"x shortest": slower, "x attention": faster}
        return {"what": name, "context": context, "ms": 1.0, **ratios}

    rows = [
        row("echo-180m", 1024, 1.0, 0.5),
        row("echo-180m", 131072, 1.02, 11.0),
        row("mamba2-attention-180m", 1024, 1.0, None),
        row("mamba2-attention-180m", 131072, 30.0, None),
    ]
    presets, contexts = ("echo-180m", "mamba2-attention-180m"), (1024, 131072)
    tables = {decode.title_of(presets, batch, contexts): rows for batch in (1, 64)}
    found = {target.name: (target.value, target.met) for target in decode.targets(tables)}
    assert found == {
        "echo-180m, batch 1: time up to 131,072 tokens over the shortest context": (1.02, True),
        "echo-180m, batch 64: time up to 131,072 tokens over the shortest context": (1.02, True),
        "echo-180m, batch 64: tokens/s over attention at 131,072 tokens": (11.0, True),
    }


def test_as_a_user_runs_it(tmp_path: Path) -> None:
    path = decode.run(
        ["synthetic-ssm", "synthetic-ssm"],
        contexts=[30, 10, 30],
        batches=[2],
        rounds=1,
        seed=0,
        device="cpu",
        out=tmp_path,
    )
    _, rows = json.loads(path.read_text())["numbers"].values()
    assert [row["context"] for row in rows] == [10, 30]


def test_batches_contexts_and_models_come_together_in_one_record(tmp_path: Path) -> None:
    calls: list[tuple[str, dict[int, list[int]]]] = [
        ("synthetic-ssm", {1: [8]}),
        ("synthetic-ssm", {2: [8]}),
        ("synthetic-ssm", {1: [8, 9]}),
        ("synthetic-attention", {1: [8]}),
    ]
    for preset, contexts in calls:
        bench = decode.bench([preset], contexts, rounds=1, seed=0, device="cpu")
        record, _ = measured(bench, tmp_path)
    assert [title for title in record["numbers"] if "batch" in title] == [
        "synthetic-ssm; batch 1; after 8 tokens",
        "synthetic-ssm; batch 2; after 8 tokens",
        "synthetic-ssm; batch 1; after 8, 9 tokens",
        "synthetic-attention; batch 1; after 8 tokens",
    ]
    assert len(list(tmp_path.glob("*.json"))) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"presets": ["gpt"]}, "There is no preset 'gpt'; there are echo-180m"),
        ({"contexts": [0]}, "contexts must be at least 1, got 0"),
        ({"batches": [4, -1]}, "batches must be at least 1, got -1"),
        ({"contexts": [], "batches": [10**5]}, "batches of 100000 are large: name the contexts"),
        ({"device": "meta"}, "Benchmarks run on cpu or cuda; got device 'meta'"),
        ({"rounds": 0}, "rounds must be at least 1, got 0"),
    ],
)
def test_what_is_wrong_is_said(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"presets": [], "contexts": [8], "batches": [1], "rounds": 1, "seed": 0}
    given |= {"device": "cpu", "out": tmp_path, **change}
    with pytest.raises(ValueError, match=said):
        decode.run(given.pop("presets"), **given)
