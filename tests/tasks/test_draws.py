"""Draws are what their names say, and the same everywhere."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from echo_lm.tasks import NIAH, CommonWord, MultiHop, ToolTrace, Zoology
from echo_lm.tasks.draws import Draws, keys, mix
from echo_lm.tasks.zoology import PROTOCOL_1, power_law, protocol_1, protocol_2, protocol_2_tests


def draws(rows: int, name: str = "test") -> Draws:
    return Draws(keys(name, numbers=torch.arange(rows)))


def chi_square(counts: list[int], shares: list[float]) -> float:
    total = sum(counts)
    return sum((n - total * p) ** 2 / (total * p) for n, p in zip(counts, shares, strict=True))


def unlikely(freedom: int) -> float:
    """Above this one chi-square in 30,000 lies, by Wilson and Hilferty."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 4 * spread**0.5) ** 3


def splitmix(x: int) -> int:
    """Steele, Lea and Flood's, in integers that do not overflow."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def test_mixing_is_splitmix64() -> None:
    numbers = torch.randint(-(2**63), 2**63 - 1, (200,))
    wanted = [splitmix(x % 2**64) for x in numbers.tolist()]
    assert [x % 2**64 for x in mix(numbers).tolist()] == wanted


def test_the_numbers_are_those_of_every_machine_and_version() -> None:
    """Results are compared across machines: these may never change."""
    assert draws(2).below(1000, 4).tolist() == GOLDEN_NUMBERS
    assert NIAH(2, 12).batch(1, seed=0).tokens.tolist() == GOLDEN_EXAMPLE


GOLDEN_NUMBERS = [[201, 294, 61, 541], [969, 467, 439, 216]]
GOLDEN_EXAMPLE = [[100, 81, 98, 118, 39, 21, 119, 58, 50, 79, 39, 21]]


def test_below_is_uniform() -> None:
    counts = torch.bincount(draws(100).below(7, 500).flatten(), minlength=7).tolist()
    assert chi_square(counts, [1 / 7] * 7) < unlikely(6)


def test_rows_and_calls_are_strangers() -> None:
    source = draws(300)
    first, second = source.uniform(300), source.uniform(300)
    for a, b in ((first, second), (first[1:], first[:-1]), (first[:, 1:], first[:, :-1])):
        n = a.numel()
        assert (
            abs(float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])) < 4 / n**0.5
        )


@pytest.mark.parametrize(("among", "count"), [(4, 2), (5, 5), (12, 2), (9, 2)])
def test_choosing_makes_all_lists_equally_likely(among: int, count: int) -> None:
    """Both ways of choosing: by sorting, and by drawing again."""
    rows = draws(20_000).choose(among, count).tolist()
    assert all(len(set(row)) == count for row in rows)
    lists = 1
    for i in range(count):
        lists *= among - i
    counts = list(Counter(map(tuple, rows)).values())
    counts += [0] * (lists - len(counts))
    assert chi_square(counts, [1 / lists] * lists) < unlikely(lists - 1)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """Though drawing again goes on until the last row has different numbers."""
    many = draws(500)
    chosen, after = many.choose(100, 20), many.below(1000, 5)
    for row in (0, 17, 499):
        alone = Draws(many.keys[row : row + 1])
        assert torch.equal(alone.choose(100, 20)[0], chosen[row])
        assert torch.equal(alone.below(1000, 5)[0], after[row])


def test_cannot_choose_more_than_there_are() -> None:
    with pytest.raises(ValueError, match="Cannot choose 5 different ones among 4"):
        draws(1).choose(4, 5)


def test_a_needle_lies_at_any_depth() -> None:
    facts = NIAH(1, 23).batch(8000, seed=0).facts
    first = facts.int().argmax(1)
    counts = torch.bincount(first, minlength=20).tolist()
    assert chi_square(counts, [1 / 20] * 20) < unlikely(19)


def test_needles_are_asked_for_alike() -> None:
    batch = NIAH(4, 40).batch(4000, seed=0)
    question = batch.tokens[:, -2:-1]
    asked = ((batch.tokens[:, :-2] == question) & batch.facts[:, :-2]).int().argmax(1)
    turn = (batch.facts.int().cumsum(1).gather(1, asked[:, None]) // 2).flatten()
    assert chi_square(torch.bincount(turn, minlength=4).tolist(), [1 / 4] * 4) < unlikely(3)


def test_calls_of_a_trace_are_apart_and_their_commit_is_delayed() -> None:
    batch = ToolTrace(4, 128).batch(500, seed=0)
    runs = batch.facts[:, 2:] & batch.facts[:, 1:-1] & batch.facts[:, :-2]
    assert not runs.any()
    assert not batch.facts[:, 60:].any()


def test_every_place_of_the_path_is_a_beginning() -> None:
    batch = MultiHop(5, 10).batch(4000, seed=0)
    values = batch.tokens[:, :-3] * batch.facts[:, :-3]
    # How many hops lie before the question: the path is followed back.
    word, before = batch.tokens[:, -3], torch.zeros(4000, dtype=torch.int64)
    alive = torch.ones(4000, dtype=torch.bool)
    for _ in range(5):
        place = ((values == word[:, None]) & batch.facts[:, :-3]).int()
        ends = place & torch.nn.functional.pad(batch.facts[:, :-4], (1, 0)).int()
        alive &= ends.any(1)
        before += alive
        at = ends.argmax(1, keepdim=True)
        word = torch.where(alive, batch.tokens.gather(1, (at - 1).clamp(0)).squeeze(1), word)
    counts = torch.bincount(before, minlength=4).tolist()
    assert chi_square(counts, [1 / 4] * 4) < unlikely(3)


def test_the_common_word_is_not_where_one_would_look() -> None:
    """Whoever takes the first or the last word behind a key is right two times in three."""
    batch = CommonWord(2, 40).batch(3000, seed=0)
    key, answer = batch.tokens[:, -2:-1], batch.tokens[:, -1]
    here = (batch.tokens[:, :-2] == key) & batch.facts[:, :-2]
    first = here.int().argmax(1, keepdim=True)
    last = 37 - here.flip(1).int().argmax(1, keepdim=True)
    for place in (first, last):
        share = float((batch.tokens.gather(1, place + 1).squeeze(1) == answer).double().mean())
        assert abs(share - 2 / 3) < 4 * (2 / 9 / 3000) ** 0.5


def test_zoology_asks_early_by_a_power_law() -> None:
    """One pair: its slot is drawn with the published probabilities."""
    batch = Zoology(1, 42).batch(6000, seed=0)
    slot = (batch.answers.int().argmax(1) - 3) // 2
    wanted = [p**-0.99 for p in range(1, 21)]
    shares = [w / sum(wanted) for w in wanted]
    assert chi_square(torch.bincount(slot, minlength=20).tolist(), shares) < unlikely(19)
    torch.testing.assert_close(power_law(20).tolist(), wanted)


def test_zoology_draws_slots_as_numpy_does() -> None:
    """Two of four slots without replacement: the first by p, the second by what is left of it."""
    rows = 20_000
    gaps = Zoology(2, 12).gaps(draws(rows)).tolist()
    p = (power_law(4) / power_law(4).sum()).tolist()
    pairs = [(i, j) for i in range(4) for j in range(4) if i != j]
    counted = Counter(map(tuple, gaps))
    shares = [p[i] * p[j] / (1 - p[i]) for i, j in pairs]
    assert chi_square([counted[pair] for pair in pairs], shares) < unlikely(11)


def test_zoology_protocols_are_the_published_ones() -> None:
    assert [(s.length, s.pairs) for s in PROTOCOL_1] == [(64, 4), (128, 8), (256, 16), (512, 64)]
    single = protocol_1(PROTOCOL_1[0]).batch(4, seed=0)
    assert (single.tokens == 0).sum() == 4 * (64 - 12)
    mixed = protocol_2()
    assert sum(part.count for part in mixed.parts) == 180_000
    assert mixed.weights == (5, 1, 1, 1, 1)
    tested = [(task.length, task.pairs) for task in protocol_2_tests()]
    assert tested[-1] == (1024, 256)
    assert len(tested) == 7
    longest = protocol_2_tests()[-1].batch(2, seed=0, split="test")
    assert longest.answers.sum(1).tolist() == [256, 256]
