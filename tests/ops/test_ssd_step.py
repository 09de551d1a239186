"""The kernel of one step of the scan under the interpreter, in fp32, against the naive form in
fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from echo_lm.ops.backends import choose_scan
from echo_lm.ops.ssd import SSDState, ssd

RECURRENCES: dict[str, dict[str, Any]] = {
    "mamba2": {},
    "mamba2, groups": {"groups": 2},
    "mamba3": {"groups": 4, "trapezoid": True, "angles": 3},
    "mamba3, mimo": {"groups": 4, "trapezoid": True, "angles": 2, "rank": 2},
    "without a rotation": {"groups": 4, "trapezoid": True, "rank": 2},
    "shared keys that turn": {"groups": 2, "trapezoid": True, "angles": 1},
}
TOLERANCE = 1e-5
"""A few roundings for each token; nothing here amplifies them."""


def inputs(
    tokens: int,
    *,
    batch: int = 3,
    heads: int = 4,
    width: int = 5,
    state_dim: int = 7,
    groups: int = 1,
    rank: int | None = None,
    trapezoid: bool = False,
    angles: int = 0,
) -> dict[str, Tensor]:
    ranks = () if rank is None else (rank,)
    given = {
        "x": torch.randn(batch, tokens, heads, *ranks, width),
        "B": torch.randn(batch, tokens, groups, *ranks, state_dim),
        "C": torch.randn(batch, tokens, groups, *ranks, state_dim),
        "log_decay": -torch.rand(batch, tokens, heads),
        "gamma": torch.rand(batch, tokens, heads),
    }
    if trapezoid:
        given["beta"] = torch.rand(batch, tokens, heads)
    if angles:
        given["angle"] = 3 * torch.randn(batch, tokens, heads, angles)
    return given


def at(given: dict[str, Tensor], t: int) -> dict[str, Tensor]:
    return {name: x[:, t : t + 1] for name, x in given.items()}


def wide(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.double() for name, x in given.items()}


def assert_same(found: tuple[Tensor, SSDState], wanted: tuple[Tensor, SSDState]) -> None:
    ours, theirs = ({"y": y, **state.to_dict()} for y, state in (found, wanted))
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        error = (ours[name].double() - expected).norm() / expected.norm().clamp_min(1e-30)
        assert error < TOLERANCE, f"{name} is {error:.1e} off"


def strided(x: Tensor) -> Tensor:
    """The same numbers with others between them."""
    return torch.stack([x, 1 - x], dim=1)[:, 0]


@pytest.mark.parametrize("name", RECURRENCES)
def test_equals_naive(name: str) -> None:
    """From a state in use; one row ends early and one has no token."""
    before, given = inputs(3, **RECURRENCES[name]), inputs(4, **RECURRENCES[name])
    lengths = torch.tensor([4, 2, 0])
    _, state = ssd(**before, return_state=True)
    kept, answers, held = state.clone(), [], state
    with torch.no_grad():
        for t in range(4):
            y, held = ssd(
                **at(given, t),
                state=held,
                return_state=True,
                lengths=strided((lengths > t).long()),
                in_place=t > 0,
                backend="triton",
            )
            answers.append(y)
    exact = state.map(lambda x: x.double())
    wanted = ssd(**wide(given), state=exact, return_state=True, lengths=lengths, backend="naive")
    assert_same((torch.cat(answers, 1), held), wanted)
    for field, x in kept.to_dict().items():
        assert torch.equal(x, state.to_dict()[field]), field


def test_in_place_keeps_every_tensor_where_it_is() -> None:
    given = inputs(1, groups=4, trapezoid=True, angles=3)
    _, state = ssd(**given, return_state=True)
    places = state.to_dict()
    with torch.no_grad():
        _, after = ssd(**given, state=state, return_state=True, in_place=True, backend="triton")
    for name, x in after.to_dict().items():
        assert x is places[name], name


def test_the_angle_holds_over_many_turns() -> None:
    """In fp64, and in [0, 2 pi) as the other forms leave it."""
    given = inputs(1, groups=4, trapezoid=True, angles=3)
    _, state = ssd(**given, return_state=True)
    assert state.angle is not None
    given["angle"] = -1e4 * torch.rand_like(given["angle"])
    with torch.no_grad():
        _, stepped = ssd(**given, state=state, return_state=True, backend="triton")
        _, wanted = ssd(**given, state=state, return_state=True, backend="recurrent")
    assert stepped.angle is not None
    assert wanted.angle is not None
    torch.testing.assert_close(stepped.angle, wanted.angle, atol=1e-11, rtol=0)


def test_views_with_other_strides() -> None:
    given = inputs(1)
    x = given["x"].mT.contiguous().mT
    B, C = torch.cat([given["B"], given["C"]], dim=-1).chunk(2, dim=-1)
    with torch.no_grad():
        apart = ssd(**given, backend="triton")
        together = ssd(**(given | {"x": x, "B": B, "C": C}), backend="triton")
    assert torch.equal(apart, together)


def test_who_serves_a_single_token() -> None:
    x, B = torch.zeros(1, 1, 2, 1, 4), torch.zeros(1, 1, 1, 1, 4)

    def chosen(x: Tensor, backend: Any = "triton", **more: Any) -> str:
        options = {"shares_last": False, "restarts": False, "learning": False} | more
        return choose_scan(backend, x, B, **options)

    assert chosen(x) == "step"
    assert chosen(x, backend="auto") == "recurrent"
    assert chosen(x.expand(1, 2, 2, 1, 4), backend="auto") == "chunk"
    # What a step cannot do, the kernels of many tokens can.
    assert chosen(x.expand(1, 2, 2, 1, 4)) == "triton"
    for hindrance in ("learning", "restarts", "shares_last"):
        assert chosen(x, **{hindrance: True}) == "triton"
    for said, given in (
        ("up to 128 wide, not head width 129", torch.zeros(1, 1, 2, 1, 129)),
        ("not torch.float64; use backend=.recurrent", x.double()),
    ):
        with pytest.raises(ValueError, match=said):
            chosen(given)


def test_nothing_is_written_over_where_gradients_are_recorded() -> None:
    given = inputs(1)
    _, state = ssd(**given, return_state=True)
    given["x"].requires_grad_()
    with pytest.raises(ValueError, match=r"in_place=True .* torch\.no_grad\(\)"):
        ssd(**given, state=state, return_state=True, in_place=True)
