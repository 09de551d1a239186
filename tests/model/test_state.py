from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from echo_lm.layers import SpectralKoopmanAttention
from echo_lm.model import EchoLM, EchoState
from echo_lm.ops import SKAState

from .families import (
    RECURRENT,
    SHRUNK,
    assert_close,
    assert_same_state,
    in_pieces,
    random_tokens,
    read,
    refused,
    small_config,
    small_model,
)


def ska_bytes(model: EchoLM) -> int:
    """What a row's state holds besides the sums, once a call has derived it."""
    ska, size = model.config.ska, torch.float64.itemsize
    width = model.config.dim // model.config.heads
    derived = ska.rank**2 + 1 if ska.causal == "exact" else width * ska.rank
    layers = sum(isinstance(mixer, SpectralKoopmanAttention) for mixer in model.mixers())
    return layers * model.config.heads * derived * size


@pytest.mark.parametrize("name", RECURRENT)
def test_memory_is_as_large_after_a_thousand_tokens_as_after_one(name: str) -> None:
    model, batch = small_model(name), 2
    wanted = model.init_state(batch).nbytes + batch * ska_bytes(model)
    state = None
    for time in (1, 1, 7, 8, 1000):
        state = read(model, random_tokens(model, batch, time), state)
        assert state.nbytes == wanted
        held = [entry for entry in state.to_dict().values() if isinstance(entry, Tensor)]
        assert state.nbytes == sum(entry.nbytes for entry in held)


@pytest.mark.parametrize("name", SHRUNK)
def test_a_state_owns_no_more_than_it_says(name: str) -> None:
    """A view would keep alive the sequence, or the running sums, that it was cut from."""
    model = small_model(name)
    for time in (1, 100):
        for key, entry in read(model, random_tokens(model, 2, time)).to_dict().items():
            if isinstance(entry, Tensor):
                assert entry.untyped_storage().nbytes() <= entry.nbytes, key


@pytest.mark.parametrize("name", ["mamba2-attention-50m", "transformer-50m"])
def test_the_memory_of_attention_grows(name: str) -> None:
    model = small_model(name)
    layers = sum("attention" in mixer for mixer in model.config.mixers)
    short, long = (read(model, random_tokens(model, 2, time)).nbytes for time in (10, 110))
    assert long - short == 100 * 2 * layers * 2 * model.config.dim * torch.float64.itemsize


def test_bytes_in_fp32_are_those_of_the_formula() -> None:
    for name, causal in (("echo-50m", "exact"), ("echo-50m-paper", "chunk")):
        model = small_model(name, torch.float32)
        held = read(model, random_tokens(model, 3, 9)).layers
        ska = [layer.nbytes for layer in held if isinstance(layer, SKAState)]
        assert ska == [3 * SKAState.bytes_per_row(2, 12, 16, causal)]


@pytest.mark.parametrize("name", SHRUNK)
def test_the_empty_state_is_that_of_someone_who_has_read_nothing(name: str) -> None:
    model = small_model(name)
    tokens = random_tokens(model, 2, 11)
    assert torch.equal(model(tokens, state=model.init_state(2)).logits, model(tokens).logits)
    assert model.init_state().count.tolist() == [0]


@pytest.mark.parametrize("name", SHRUNK)
def test_rows_can_be_picked(name: str) -> None:
    model = small_model(name)
    before, after = random_tokens(model, 3, 13), random_tokens(model, 4, 10)
    rows = torch.tensor([2, 0, 0, 1])
    state = read(model, before).reorder(rows)
    assert state.count.tolist() == [13] * 4
    for time in (1, 10):
        got = model(after[:, :time], state=state).logits
        wanted = model(torch.cat([before[rows], after[:, :time]], 1)).logits[:, 13:]
        assert_close(got, wanted, model.config)


@pytest.mark.parametrize("name", SHRUNK)
def test_rows_can_forget(name: str) -> None:
    model = small_model(name)
    before, after = random_tokens(model, 3, 13), random_tokens(model, 3, 10)
    state = read(model, before)
    marked = torch.tensor([False, True, False])
    some, every = state.reset(marked), state.reset()
    assert some.count.tolist() == [13, 0, 13]
    assert every.count.tolist() == [0, 0, 0]
    for cuts in ([], list(range(1, 10))):
        kept, _ = in_pieces(model, after, cuts, state)
        fresh, _ = in_pieces(model, after, cuts)
        mixed = torch.where(marked.view(-1, 1, 1), fresh, kept)
        assert_close(in_pieces(model, after, cuts, some)[0], mixed, model.config)
        assert_close(in_pieces(model, after, cuts, every)[0], fresh, model.config)


@pytest.mark.parametrize("name", SHRUNK)
def test_a_clone_is_apart_and_a_detached_state_cut_off(name: str) -> None:
    model = small_model(name, grad=True)
    state = read(model, random_tokens(model, 2, 9))
    clone, detached = state.clone(), state.detach()
    assert_same_state(clone, state)
    assert_same_state(detached, state)
    held = [entry for entry in state.to_dict().values() if isinstance(entry, Tensor)]
    assert any(entry.requires_grad for entry in held)
    assert not any(e.requires_grad for e in detached.to_dict().values() if isinstance(e, Tensor))
    pointers = {entry.untyped_storage().data_ptr() for entry in held}
    for entry in clone.to_dict().values():
        if isinstance(entry, Tensor) and entry.numel():
            assert entry.untyped_storage().data_ptr() not in pointers


@pytest.mark.parametrize("name", SHRUNK)
def test_there_and_back_through_a_dictionary_and_a_file(name: str, tmp_path: Path) -> None:
    model = small_model(name)
    mask = torch.ones(2, 13)
    mask[0, :4] = 0
    out = model(random_tokens(model, 2, 13), attention_mask=mask, return_state=True)
    for state in (out.state, out.state.reorder(torch.tensor([1])), model.init_state(2)):
        assert_same_state(EchoState.from_dict(state.to_dict()), state)
        state.save(tmp_path / "memory.safetensors")
        loaded = EchoState.load(tmp_path / "memory.safetensors")
        assert_same_state(loaded, state)
        tokens = random_tokens(model, len(state.count), 5)
        assert torch.equal(model(tokens, state=loaded).logits, model(tokens, state=state).logits)


def test_to_a_device() -> None:
    state = read(small_model("echo-50m"), torch.arange(9)[None]).to("meta")
    assert all(entry.is_meta for entry in state.to_dict().values() if isinstance(entry, Tensor))


def wider(name: str) -> EchoLM:
    """The same kinds of layers at other sizes."""
    config = small_config(name)
    return EchoLM(
        replace(
            config,
            dim=64,
            ska=replace(config.ska, rank=10),
            mamba2=replace(config.mamba2, state_dim=4),
        )
    ).double()


@pytest.mark.parametrize("name", SHRUNK)
@pytest.mark.parametrize("time", [1, 5])
def test_a_foreign_state_is_refused_and_left_as_it_is(name: str, time: int) -> None:
    model = small_model(name)
    tokens = random_tokens(model, 2, time)
    other = small_model("echo-50m" if name == "transformer-50m" else "transformer-50m")
    cases = {
        "another model": read(other, random_tokens(other, 2, 6)),
        "3": read(model, random_tokens(model, 3, 6)),
        "state": read(wider(name), random_tokens(model, 2, 6)),
    }
    for words, state in cases.items():
        kept = state.clone()
        with refused(words):
            model(tokens, state=state)
        assert_same_state(state, kept)


def test_a_state_with_a_layer_too_few_is_refused() -> None:
    model = small_model("echo-50m")
    state = read(model, random_tokens(model, 2, 6))
    with refused("another model"):
        model(random_tokens(model, 2, 2), state=replace(state, layers=state.layers[:-1]))


def test_a_state_of_another_precision_is_refused() -> None:
    model = small_model("echo-50m")
    state = read(small_model("echo-50m", torch.float32), random_tokens(model, 2, 6))
    with refused("torch.float32", "torch.float64"):
        model(random_tokens(model, 2, 2), state=state)


def test_another_chunk_size_is_refused() -> None:
    model = small_model("echo-50m-paper")
    state = read(model, random_tokens(model, 2, 6))
    config = replace(model.config, ska=replace(model.config.ska, chunk_size=16))
    with refused("chunk_size=8", "16"):
        EchoLM(config).double()(random_tokens(model, 2, 2), state=state)


def test_a_dictionary_that_is_not_a_state_is_refused() -> None:
    entries = read(small_model("echo-50m"), torch.arange(9)[None]).to_dict()
    assert sorted({key.partition(".")[0] for key in entries}) == ["0", "1", "2", "count"]

    def without(start: str) -> dict[str, object]:
        return {key: entry for key, entry in entries.items() if not key.startswith(start)}

    with refused("'blocks.0.weight'"):
        EchoState.from_dict(entries | {"blocks.0.weight": torch.zeros(1)})
    with refused("'0.GRUState.h'"):
        EchoState.from_dict(entries | {"0.GRUState.h": torch.zeros(1)})
    with refused("spectrum"):
        EchoState.from_dict(entries | {"1.SKAState.spectrum": torch.zeros(1)})
    with refused("count"):
        EchoState.from_dict(without("count"))
    with refused("[1, 2]"):
        EchoState.from_dict(without("0"))
    with refused("[0, 2]"):
        EchoState.from_dict(without("1"))
    with refused("SKAState", "gram"):
        EchoState.from_dict(without("1.SKAState.gram"))
    with refused("count"):
        EchoState.from_dict({})


def test_a_file_that_is_not_a_state_is_refused(tmp_path: Path) -> None:
    state = read(small_model("echo-50m"), torch.arange(9)[None])
    path = tmp_path / "memory.safetensors"
    state.save(path)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:-1], whole[:5], b"", b"not a state" * 9):
        path.write_bytes(content)
        with refused(path, "cut short"):
            EchoState.load(path)
    save_file({"embedding.weight": torch.zeros(3)}, path)
    with refused("'embedding.weight'"):
        EchoState.load(path)
    with refused(tmp_path / "none"):
        EchoState.load(tmp_path / "none")
    with refused(tmp_path):
        EchoState.load(tmp_path)
