"""The base of every state, with a toy state that nests another."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from echo_lm.ops.state import TensorState


@dataclass
class Inner(TensorState):
    total: Tensor
    extra: Tensor | None = None


@dataclass
class Outer(TensorState):
    count: Tensor
    inner: Inner
    window: int = 4
    cache: Tensor | None = None
    tags: list[str] = field(default_factory=list)


def make() -> Outer:
    return Outer(torch.arange(3), Inner(torch.randn(3, 2)), window=7)


def test_every_tensor_is_mapped_and_nothing_else() -> None:
    state = make()
    twice = state.map(lambda t: 2 * t)
    assert torch.equal(twice.count, 2 * state.count)
    assert torch.equal(twice.inner.total, 2 * state.inner.total)
    assert twice.window == 7
    assert twice.cache is twice.inner.extra is None


def test_clones_share_nothing() -> None:
    state = make()
    clone = state.clone()
    clone.count.zero_()
    clone.inner.total.zero_()
    assert state.count.any()
    assert state.inner.total.any()


def test_a_detached_state_has_no_past() -> None:
    state = make()
    state.inner.total = state.inner.total.requires_grad_() * 2
    assert not state.detach().inner.total.requires_grad
    assert state.inner.total.requires_grad


def test_rows_are_taken_dropped_and_doubled() -> None:
    state = make()
    picked = state.reorder(torch.tensor([2, 2, 0, 1]))
    assert picked.count.tolist() == [2, 2, 0, 1]
    assert torch.equal(picked.inner.total, state.inner.total[[2, 2, 0, 1]])


def test_marked_rows_are_reset() -> None:
    state = make()
    state.inner.total[1] = torch.nan
    wiped = state.reset(torch.tensor([False, True, False]))
    assert wiped.count.tolist() == [0, 0, 2]
    assert not wiped.inner.total[1].any()
    assert torch.equal(wiped.inner.total[[0, 2]], state.inner.total[[0, 2]])
    everything = state.reset()
    assert not everything.count.any()
    assert not everything.inner.total.any()


def test_another_state_is_written_over_in_place() -> None:
    state, new = make(), make()
    new.count, new.window = state.count, 9
    places = [x.data_ptr() for x in (state.count, state.inner.total)]
    state.write_over(new)
    assert torch.equal(state.inner.total, new.inner.total)
    assert state.window == 9
    assert [x.data_ptr() for x in (state.count, state.inner.total)] == places
    assert state.inner.total.data_ptr() != new.inner.total.data_ptr()


def test_nothing_is_written_over_that_has_no_place() -> None:
    for changed, said in (
        (
            Inner(torch.randn(4, 2)),
            r"total of Inner is torch.float32 \[4, 2\] and cannot .*\[3, 2\]",
        ),
        (Inner(torch.randn(3, 2).double()), r"torch.float64 \[3, 2\]"),
        (Inner(torch.randn(3, 2), torch.ones(3)), r"extra of Inner .* written over nothing"),
    ):
        with pytest.raises(ValueError, match=said):
            make().write_over(Outer(torch.arange(3), changed))


def test_bytes_are_counted_in_nested_states_too() -> None:
    assert make().nbytes == 3 * 8 + 3 * 2 * 4


def test_moved_to_a_device() -> None:
    moved = make().to("meta")
    assert moved.count.device.type == moved.inner.total.device.type == "meta"


def test_dictionaries_are_flat_and_come_back() -> None:
    state = make()
    entries = state.to_dict()
    assert set(entries) == {"count", "inner.total", "window", "tags"}
    back = Outer.from_dict(entries)
    assert torch.equal(back.inner.total, state.inner.total)
    assert back.window == 7
    assert back.cache is None


def test_settings_may_be_left_out_and_default() -> None:
    state = make()
    assert Outer.from_dict({"count": state.count, "inner.total": state.inner.total}).window == 4


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(ValueError, match=r"Outer has no field 'colour'; it has count, inner"):
        Outer.from_dict({"colour": torch.zeros(1)} | make().to_dict())


def test_an_unknown_field_of_a_nested_state_is_named() -> None:
    with pytest.raises(ValueError, match=r"Inner has no field 'colour'"):
        Outer.from_dict({"inner.colour": torch.zeros(1)} | make().to_dict())


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ValueError, match=r"Outer needs inner, not in what was given"):
        Outer.from_dict({"count": torch.zeros(3)})
