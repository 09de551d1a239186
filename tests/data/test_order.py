"""An order that is computed is a permutation, another one for every epoch and seed."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_lm.data.order import shuffled


@settings(max_examples=60, deadline=None, derandomize=True)
@given(size=st.integers(1, 600), seed=st.integers(0, 2**40), epoch=st.integers(0, 10**6))
def test_everything_once_an_epoch(size: int, seed: int, epoch: int) -> None:
    places = torch.arange(size) + epoch * size
    assert shuffled(places, size, seed).sort().values.tolist() == list(range(size))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(size=st.integers(1, 2**40), seed=st.integers(0, 9), place=st.integers(0, 2**45))
def test_a_place_does_not_depend_on_its_neighbours(size: int, seed: int, place: int) -> None:
    alone = shuffled(torch.tensor([place]), size, seed)
    among = shuffled(torch.arange(place, place + 5), size, seed)
    assert among[0] == alone[0]
    assert bool(((among >= 0) & (among < size)).all())


def test_epochs_and_seeds_differ() -> None:
    size = 1000
    first, second = shuffled(torch.arange(2 * size), size, 0).split(size)
    other = shuffled(torch.arange(size), size, 1)
    # Two random permutations agree at about one place.
    assert (first == second).sum() < 8
    assert (first == other).sum() < 8
    assert (first == torch.arange(size)).sum() < 8


def test_looks_random() -> None:
    """Where a thing goes says nothing of where its neighbour goes: correlation within 5 sigma."""
    size = 10_000
    order = shuffled(torch.arange(size), size, 0).double()
    pairs = torch.stack([torch.arange(size).double()[:-1], order[:-1], order[1:]])
    between = torch.corrcoef(pairs)
    assert between.triu(1).abs().max() < 5 / size**0.5
    early = order[: size // 10] * 10 / size
    counts = torch.histc(early, bins=10, min=0, max=10)
    # A tenth each of 1,000, sigma about 9.
    assert (counts - 100).abs().max() < 45
