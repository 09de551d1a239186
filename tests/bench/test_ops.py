"""`echo-lm bench ops`: what is wrong is not timed, and what is right is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from echo_lm.bench import ops, precision
from echo_lm.bench.contenders import FLASH, Contender, Inputs, Size, contenders, ours
from echo_lm.bench.ops import least_bytes
from echo_lm.bench.parity import ParityError, check
from echo_lm.bench.record import Row
from echo_lm.ops.backends import unsound_gated_backward, why_no_fla

from .runs import measured

TINY = Size(1, 100, heads=2, rank=6, width=8)
LONGER = replace(TINY, tokens=300)
"""Held to the parallel form, not to the loop."""


def test_every_contender_is_timed_or_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU of a user, who does not interpret kernels."""
    monkeypatch.delenv("TRITON_INTERPRET")
    who = ops.pick([], contenders("cpu"))
    bench = ops.bench(who, [TINY], device="cpu", cases=[LONGER], rounds=2, seed=0)
    record, said = measured(bench, tmp_path)
    tables = record["numbers"]
    for name in ("ska-exact", "ska-chunk", "paper", "scan-chunk"):
        parity = tables[ops.parity_title(name, [TINY])]
        assert all(row["error"] < row["allowed"] for row in parity)
        assert {row["tokens"] for row in parity} == {100, 300}
    for title in ops.PASSES:
        rows = tables[ops.title_of(title, TINY)]
        *timed, floor = rows
        assert [row["what"] for row in timed] == [one.name for one in who]
        by_name = {row["what"]: row for row in timed}
        for name in ("ska-exact", "ska-chunk", "paper", FLASH, "scan-chunk"):
            assert by_name[name]["ms"] >= by_name[name]["fastest ms"] > 0
            assert by_name[name]["note"] is None
        assert by_name[FLASH]["x flash"] == 1
        assert by_name["scan-triton"]["note"].startswith("did not run: backend")
        for name in ("cudnn", "mesa_net", "gated_delta_rule", "simple_gla"):
            assert by_name[name]["ms"] is None
            assert by_name[name]["note"] == "did not run: needs a CUDA device"
        assert by_name["ska-chunk"]["x floor"] == pytest.approx(
            by_name["ska-chunk"]["ms"] / floor["ms"]
        )
    assert record["targets"] == []
    assert "The targets are for a GPU" in said


def test_the_floor_counts_every_number_once() -> None:
    size = Size(2, 10, heads=3, rank=4, width=5)
    q = k = torch.zeros(2, 10, 3, 4, dtype=torch.bfloat16)
    v = y = torch.zeros(2, 10, 3, 5, dtype=torch.bfloat16)
    once = sum(x.nbytes for x in (q, k, v, y))
    assert least_bytes(size, torch.bfloat16, backward=False) == once
    assert least_bytes(size, torch.bfloat16, backward=True) == 2 * once


def larger(answer: Callable[[Inputs], Tensor]) -> Callable[[Inputs], Tensor]:
    return lambda given: 1.001 * answer(given)


def other_gradient(answer: Callable[[Inputs], Tensor]) -> Callable[[Inputs], Tensor]:
    """The right answer, and a wrong gradient of the keys."""

    def wrong(given: Inputs) -> Tensor:
        extra = 1e-2 * given["k"].sum()
        return answer(given) + extra - extra.detach()

    return wrong


def blank(answer: Callable[[Inputs], Tensor]) -> Callable[[Inputs], Tensor]:
    return lambda given: answer(given) / 0 * 0


def unsteady(answer: Callable[[Inputs], Tensor]) -> Callable[[Inputs], Tensor]:
    return lambda given: answer(given) * (1 + 1e-5 * torch.rand(()))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (larger, r"is off by 1\.0e-03 in \w+, .* no speed is reported"),
        (other_gradient, r"is off by .* in dk, .* no speed is reported"),
        (blank, r"is off by nan in y, .* no speed is reported"),
        (unsteady, r"Two runs of .* differ in y; no speed is reported"),
    ],
)
@pytest.mark.parametrize("name", ["ska-exact", "ska-chunk", "paper"])
def test_nothing_is_timed_while_something_is_wrong(
    name: str,
    spoil: Callable[[Callable[[Inputs], Tensor]], Callable[[Inputs], Tensor]],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_clock(*given: object) -> list[Row]:
        raise AssertionError("timed")

    monkeypatch.setattr(ops, "time_all", no_clock)
    known = contenders("cpu")
    right = known[name]
    wrong = replace(right, answer=spoil(right.answer))
    bench = ops.bench([known[FLASH], wrong], [TINY], device="cpu", cases=[], rounds=1, seed=0)
    with pytest.raises(ParityError, match=said):
        measured(bench, tmp_path)
    assert not list(tmp_path.iterdir())


def test_bf16_is_held_to_fp64_of_the_same_numbers() -> None:
    for name in ("ska-exact", "ska-chunk", "paper", "scan-chunk"):
        row = check(contenders("cpu")[name], TINY, torch.bfloat16)
        assert 1e-4 < row["error"] < row["allowed"]


def test_a_competitor_that_fails_says_so_and_ours_is_not_hidden() -> None:
    def fail(given: Inputs) -> Tensor:
        raise RuntimeError("cannot\ndo this")

    flash = contenders("cpu")[FLASH]
    size, dtype = TINY, torch.float32
    found = ops.prepare(replace(flash, answer=fail), size, dtype, "cpu", backward=True)
    assert found == "RuntimeError: cannot"
    mine: Contender = replace(ours("ska-exact", "cpu", "chunk"), answer=fail)
    with pytest.raises(RuntimeError, match="cannot"):
        ops.prepare(mine, size, dtype, "cpu", backward=True)


def test_targets_are_the_ratios_of_the_table() -> None:
    def row(name: str, ms: float, gib: float) -> Row:
        return {"what": name, "ms": ms, "GiB": gib, "x flash": ms / 2}

    table = [row(FLASH, 2.0, 1.0), row("ska-chunk", 1.9, 1.1), row("ska-exact", 5.0, 0.5)]
    table += [row("mesa_net", 4.0, 2.0), {"what": "simple_gla", "ms": None}]
    title = ops.title_of("forward and backward", Size(16, 2048))
    found = {target.name: (target.value, target.met) for target in ops.targets({title: table})}
    assert found == {
        "ska-chunk over flash, T=2048, time": (0.95, True),
        "ska-chunk over flash, T=2048, peak": (1.1, False),
        "ska-exact over flash, T=2048, time": (2.5, False),
        "ska-exact over flash, T=2048, peak": (0.5, True),
        "ska-exact over mesa_net, T=2048, time": (1.25, False),
    }


@pytest.mark.parametrize(
    ("triton", "sound"),
    [("3.3.1", True), ("3.4.0", False), ("3.6.0", False), ("3.7.0", False), ("3.7.1", True)],
)
def test_gated_kernels_of_others_are_not_timed_where_they_are_wrong(
    triton: str, sound: bool
) -> None:
    said = unsound_gated_backward(triton)
    assert said is None if sound else triton in str(said)


def test_a_cpu_runs_nothing_of_flash_linear_attention() -> None:
    assert why_no_fla("mesa_net", "cpu", backward=False) == "needs a CUDA device"


def test_the_cost_of_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each product in turn, in each precision, and only while it is looked at."""
    from echo_lm.ops.ska.triton import PRECISION

    monkeypatch.setattr(precision, "CHOICES", ("tf32x3", "tf32"))
    before = dict(PRECISION)
    usual, seen = before[torch.float32], []
    one = ours("ska-exact", "cpu", "chunk")

    def answer(given: Inputs) -> Tensor:
        seen.append(PRECISION[torch.float32])
        return one.answer(given)

    spied = replace(one, answer=answer)
    rows = precision.cost(spied, TINY, torch.float32, "cpu", 1, lambda what: None)
    assert before == PRECISION
    assert [row["what"] for row in rows] == [precision.AS_IT_IS, *vars(usual)]
    assert {row["in"] for row in rows[1:]} == {"tf32"}
    assert set(seen) == {usual, *(replace(usual, **{name: "tf32"}) for name in vars(usual))}
    limit = one.truth.rounding(one.draw(TINY, torch.float32))
    for row in rows:
        assert row["ms"] > 0
        assert 0 < row["error, random keys"] < limit
        assert 0 < row["error, 32 keys again and again"] < limit * TINY.tokens / precision.REPEATED


@pytest.mark.parametrize("names", [[FLASH], ["ska-chunk"], ["ska-chunk", "ska-exact"]])
def test_what_a_precision_costs_is_asked_of_what_was_named_and_checked(names: list[str]) -> None:
    """On a GPU; that there is none here is not seen before a cell is measured."""
    who = ops.pick(names, contenders("cuda"))
    bench = ops.bench(who, [TINY], device="cuda", cases=[], rounds=1, seed=0)
    modes = sorted(name for name in names if name != FLASH)
    titles = [cell.title for cell in bench.cells]
    parity, times, costs = titles[: len(modes)], titles[len(modes) :][:2], titles[len(modes) + 2 :]
    assert sorted(parity) == [ops.parity_title(name, [TINY]) for name in modes]
    assert times == [ops.title_of(title, TINY) for title in ops.PASSES]
    assert sorted(costs) == [f"precision of {name}, 1 x 100 tokens" for name in modes]


def test_few_keys_come_again() -> None:
    given = contenders("cpu")["ska-exact"].draw(replace(TINY, tokens=80), torch.float32)
    k = precision.with_few_keys(given)["k"]
    assert k.shape == given["k"].shape
    assert torch.equal(k[:, :32], given["k"][:, :32])
    assert torch.equal(k[:, 64:], given["k"][:, :16])


def test_as_a_user_runs_it(tmp_path: Path) -> None:
    path = ops.run([FLASH], shapes=["2x16"], rounds=1, seed=1, device="cpu", out=tmp_path)
    record = json.loads(path.read_text())
    assert record["config"]["contenders"] == [FLASH]
    assert list(record["numbers"]) == [
        "forward, 2 x 16 tokens",
        "forward and backward, 2 x 16 tokens",
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"names": ["softmax"]}, "There is no operator 'softmax'; there are ska-exact, ska-chunk,"),
        ({"shapes": ["2048"]}, 'A shape is like "16x2048", rows and tokens of each; got'),
        ({"device": "meta"}, "Benchmarks run on cpu or cuda; got device 'meta'"),
        ({"rounds": 0}, "rounds must be at least 1, got 0"),
        ({"device": "cuda"}, "There is no device 'cuda' here"),
    ],
)
def test_what_is_wrong_is_said(change: dict[str, object], said: str, tmp_path: Path) -> None:
    given = {"names": [], "shapes": [], "rounds": 1, "seed": 0, "device": "cpu", "out": tmp_path}
    given |= change
    if change.get("device") == "cuda" and torch.cuda.is_available():
        given["device"], said = "nonsense", "There is no device 'nonsense' here"
    with pytest.raises(ValueError, match=said):
        ops.run(given.pop("names"), **given)  # type: ignore[arg-type]
