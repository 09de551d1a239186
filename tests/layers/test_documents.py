"""Documents packed into rows: every layer reads each as if it were alone, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echo_lm.layers import Attention, DeltaNet, Mamba2, Mamba3, TensorState
from echo_lm.layers.documents import Documents

from .test_ska_layer import VARIANTS
from .test_ska_layer import make as make_ska

DIM = 12
LAYERS: dict[str, Callable[[], nn.Module]] = {
    **{f"ska, {name}": lambda name=name: make_ska(name) for name in VARIANTS},
    "mamba2": lambda: Mamba2(DIM, heads=3, state_dim=5, chunk_size=4),
    "mamba2 in groups": lambda: Mamba2(
        DIM, heads=4, state_dim=5, groups=2, conv_kernel=3, chunk_size=64
    ),
    "mamba2 in many chunks": lambda: Mamba2(DIM, heads=3, state_dim=5, conv_kernel=1, chunk_size=1),
    "mamba3": lambda: Mamba3(DIM, heads=3, state_dim=6, chunk_size=4),
    "mamba3 without turns": lambda: Mamba3(
        DIM, heads=3, state_dim=6, rope_fraction=0.0, chunk_size=4
    ),
    "mamba3 of rank 2": lambda: Mamba3(
        DIM, heads=3, state_dim=6, rank=2, conv_kernel=4, gate=False, chunk_size=8
    ),
    "delta": lambda: DeltaNet(DIM, heads=3, chunk_size=4),
    "delta in one chunk": lambda: DeltaNet(DIM, heads=2, key_dim=5, chunk_size=64),
    "attention": lambda: Attention(DIM, heads=2),
}
BEFORE = 6
"""Tokens of the state that rows may go on with."""


@dataclass
class Row:
    goes_on: bool
    sizes: list[int]
    """Of its documents."""


ROWS = [
    Row(False, [5, 1, 9, 4, 2]),
    Row(True, [21]),
    Row(False, [1, 1, 19]),
    Row(True, [3, 17, 1]),
    Row(True, [4, 4, 13]),
]
TOKENS = 21


def make(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Some way into its training: no parameter is where it started."""
    torch.manual_seed(0)
    layer = LAYERS[name]().to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return layer


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, DIM, dtype=dtype)


def starts_of(rows: list[Row], width: int) -> Tensor:
    starts = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, here in zip(rows, starts, strict=True):
        begins = torch.tensor([0, *row.sizes[:-1]]).cumsum(0)
        here[begins[row.goes_on :]] = True
    return starts


def each_alone(
    layer: nn.Module, rows: list[Row], x: Tensor, state: TensorState | None
) -> tuple[list[Tensor], list[TensorState]]:
    """The rows' answers, and the state that each one's last document leaves."""
    outputs, states = [], []
    for b, row in enumerate(rows):
        parts, start, after = [], 0, None
        for i, size in enumerate(row.sizes):
            goes_on = state is not None and i == 0 and row.goes_on
            own = state.reorder(torch.tensor([b])) if goes_on and state is not None else None
            y, after = layer(x[b : b + 1, start : start + size], own)
            parts.append(y[0])
            start += size
        assert after is not None
        outputs.append(torch.cat(parts))
        states.append(after)
    return outputs, states


def close(got: Tensor, wanted: Tensor, what: str = "") -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-9, msg=lambda m: f"{what}: {m}")


def close_states(got: TensorState, wanted: TensorState) -> None:
    """All they hold, but for an attention's slots, where documents before have left theirs."""
    ours, theirs = got.to_dict(), wanted.to_dict()
    if "keys" in theirs:
        assert ours["count"].tolist() == theirs["count"].tolist()
        size = theirs["keys"].shape[1]
        valid = torch.ones(1, ours["keys"].shape[1]) if "valid" not in ours else ours["valid"]
        assert int(valid.sum()) == size
        for key in ("keys", "values"):
            close(ours[key][valid.bool()], theirs[key][0], key)
        return
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        if key.endswith("angle"):
            ours[key], value = ours[key].cos(), value.cos()
        if isinstance(value, Tensor) and value.is_floating_point():
            close(ours[key], value, key)
        else:
            assert torch.as_tensor(ours[key]).equal(torch.as_tensor(value)), key


@pytest.mark.parametrize("continued", [True, False], ids=["continued", "from nothing"])
@pytest.mark.parametrize("name", LAYERS)
def test_packed_equals_alone(name: str, continued: bool) -> None:
    """Answers, states, and every gradient, that of what was read before among them."""
    layer = make(name)
    x, before = random(len(ROWS), TOKENS), random(len(ROWS), BEFORE)
    weights = random(len(ROWS), TOKENS)
    more = random(1, 3)

    def read(packed: bool) -> tuple[Tensor, list[TensorState], dict[str, Tensor]]:
        inputs = {"x": x.clone().requires_grad_(), "before": before.clone().requires_grad_()}
        state = layer(inputs["before"])[1] if continued else None
        if packed:
            documents = Documents.of(starts_of(ROWS, TOKENS))
            y, after = layer(inputs["x"], state, documents=documents)
            states = [after.reorder(torch.tensor([b])) for b in range(len(ROWS))]
        else:
            rows, states = each_alone(layer, ROWS, inputs["x"], state)
            y = torch.stack(rows)
        told = (y * weights).sum() + sum(layer(more, own)[0].square().sum() for own in states)
        leaves = inputs | dict(layer.named_parameters())
        found = torch.autograd.grad(told, list(leaves.values()), allow_unused=not continued)
        return y, states, dict(zip(leaves, found, strict=True))

    got, states, gradients = read(packed=True)
    wanted, true_states, true_gradients = read(packed=False)
    close(got, wanted)
    for ours, theirs in zip(states, true_states, strict=True):
        close_states(ours, theirs)
    for key, theirs in true_gradients.items():
        if theirs is None:
            assert key == "before"
            continue
        torch.testing.assert_close(
            gradients[key], theirs, rtol=1e-6, atol=1e-8 * float(theirs.abs().max().clamp_min(1))
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_no_document_moves_a_bit_of_another(name: str, dtype: torch.dtype) -> None:
    """Neither one before nor one behind, nor what the state holds of the one that has ended."""
    layer = make(name, dtype)
    documents = Documents.of(starts_of(ROWS, TOKENS))
    x, before = random(len(ROWS), TOKENS, dtype=dtype), random(len(ROWS), BEFORE, dtype=dtype)
    state = layer(before)[1]
    y, after = layer(x, state, documents=documents)
    for number in range(6):
        touched = documents.number == number
        other, other_state = x.clone(), state
        other[touched] = 10 * torch.randn_like(other[touched])
        if number == 0:
            other_state = layer(10 * torch.randn_like(before))[1]
        moved, moved_after = layer(other, other_state, documents=documents)
        assert torch.equal(moved[~touched], y[~touched])
        # Chunk mode tells nothing before a whole chunk, which the later ones are too short for.
        assert number > 2 or not torch.equal(moved[touched], y[touched])
        last = documents.at_end(documents.number) != number
        kept = after.reorder(last.nonzero().squeeze(1)).to_dict()
        moved_kept = moved_after.reorder(last.nonzero().squeeze(1)).to_dict()
        for key, value in kept.items():
            if isinstance(value, Tensor) and key not in ("keys", "values"):
                assert torch.equal(moved_kept[key], value), key


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "ska, full"])
def test_padding_begins_nothing(name: str) -> None:
    """Starts there are nobody's, a row without tokens keeps its state, and padding is unread."""
    layer = make(name)
    rows = [Row(True, [2, 7]), Row(True, [0]), Row(False, [1, 4, 3])]
    lengths = torch.tensor([sum(row.sizes) for row in rows])
    width = int(lengths.max()) + 3
    x, before = random(3, width), random(3, BEFORE)
    state = layer(before)[1]
    starts = starts_of(rows, width) | (torch.arange(width) >= lengths[:, None])
    documents = Documents.of(starts, lengths)
    y, after = layer(x, state, lengths=lengths, documents=documents)
    assert y.isfinite().all()
    full = [rows[0], rows[2]]
    picked = torch.tensor([0, 2])
    wanted, states = each_alone(layer, full, x[picked], state.reorder(picked))
    for b, own, held in zip((0, 2), wanted, states, strict=True):
        close(y[b, : lengths[b]], own)
        close_states(after.reorder(torch.tensor([b])), held)
    one = random(3, 1)
    close(layer(one, after)[0][1], layer(one, state)[0][1])
    noise = torch.where(
        torch.arange(width)[:, None] < lengths[:, None, None], x, 7 * random(3, width)
    )
    again = layer(noise, state, lengths=lengths, documents=documents)[0]
    for b, size in enumerate(lengths.tolist()):
        assert torch.equal(again[b, :size], y[b, :size])


@pytest.mark.parametrize("name", ["ska, ours", "ska, late", "ska, fading paper"])
def test_masks_are_those_of_each_document(name: str) -> None:
    layer: Any = make(name)
    x, mask = random(len(ROWS), TOKENS), torch.rand(len(ROWS), TOKENS) < 0.7
    y = layer(x, documents=Documents.of(starts_of(ROWS, TOKENS)), mask=mask)[0]
    for b, row in enumerate(ROWS):
        start = 0
        for size in row.sizes:
            here = slice(start, start + size)
            close(y[b, here], layer(x[b : b + 1, here], mask=mask[b : b + 1, here])[0][0])
            start += size


def test_where_documents_are() -> None:
    starts = torch.tensor([[0, 1, 0, 0, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 1]]).bool()
    documents = Documents.of(starts, torch.tensor([5, 3, 4]))
    assert documents.number.tolist() == [[0, 1, 1, 1, 2], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]
    assert documents.place.tolist() == [[0, 0, 1, 2, 0], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    read = torch.tensor([7, 8, 9])
    assert documents.positions(read)[0].tolist() == [7, 0, 1, 2, 0]
    assert documents.positions(read)[2].tolist() == [9, 10, 11, 12, 13]
    assert documents.count(read).tolist() == [1, 3, 13]
    assert documents.reach(2)[0].tolist() == [True, False, False, True, False]
    apart = documents.apart
    assert apart.lengths.tolist() == [1, 3, 1, 3, 4]
    assert apart.row.tolist() == [0, 0, 0, 1, 2]
    assert apart.new.tolist() == [False, True, True, True, False]
    assert apart.last.tolist() == [2, 3, 4]
    x = torch.arange(1, 16).view(3, 5)
    rows = [[1, 0, 0, 0], [2, 3, 4, 0], [5, 0, 0, 0], [6, 7, 8, 0], [11, 12, 13, 14]]
    assert apart.take(x).tolist() == rows
    back = [[1, 2, 3, 4, 5], [6, 7, 8, 0, 0], [11, 12, 13, 14, 0]]
    assert apart.put_back(apart.take(x)).tolist() == back
