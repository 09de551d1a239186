"""The scan's Triton kernels under the interpreter, in fp32, against the naive form in fp64.

Sizes are small because the interpreter is slow.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from tests.ops.ssd_cases import Inputs, assert_same_state, cut, make_inputs, some_state
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from echo_lm.layers.mamba2 import Mamba2
from echo_lm.layers.mamba3 import Mamba3
from echo_lm.ops.backends import choose_scan
from echo_lm.ops.ssd import SSDState, ssd

KINDS: dict[str, dict[str, Any]] = {
    "mamba2": {},
    "trapezoid in groups": {"trapezoid": True, "groups": 2},
    "mamba3": {"trapezoid": True, "angles": 3, "groups": 4},
    "mimo": {"trapezoid": True, "angles": 2, "rank": 4},
}
UNITS = 8
"""Allowed error in the norm, in units of fp32 rounding: that of sums of some dozen terms."""


def small(tokens: int, **sizes: Any) -> Inputs:
    defaults = {"batch": 1, "heads": 4, "head_dim": 20, "state_dim": 24, "dtype": torch.float32}
    return make_inputs(tokens, **(defaults | sizes))


def answers_and_gradients(
    inputs: Inputs, start: SSDState | None, backend: str, dtype: torch.dtype, **options: Any
) -> dict[str, Tensor]:
    """Outputs, the final state, and the gradients of everything."""
    leaves = {name: v.detach().to(dtype).requires_grad_() for name, v in inputs.items()}
    state = None
    if start is not None:
        state = start.map(lambda v: v.detach().clone().requires_grad_())
        state.h = start.h.to(dtype).requires_grad_()
        if start.x is not None and start.B is not None:
            state.x, state.B = (v.to(dtype).requires_grad_() for v in (start.x, start.B))
        leaves |= {f"start {name}": v for name, v in state.to_dict().items()}
    y, end = ssd(**_inputs(leaves), state=state, return_state=True, backend=backend, **options)
    results = {"y": y} | {f"end {name}": v for name, v in end.to_dict().items()}
    torch.manual_seed(1)
    loss = sum((v * torch.randn(v.shape).to(v.dtype)).sum() for v in results.values())
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    results |= {f"d {name}": g for name, g in zip(leaves, gradients, strict=True)}
    return {name: v.detach() for name, v in results.items()}


def _inputs(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: v for name, v in leaves.items() if not name.startswith("start")}


def assert_same_map(inputs: Inputs, start: SSDState | None = None, **options: Any) -> None:
    truth = answers_and_gradients(inputs, start, "naive", torch.float64, **options)
    found = answers_and_gradients(inputs, start, "triton", torch.float32, **options)
    assert truth.keys() == found.keys()
    for name, expected in truth.items():
        error = (found[name] - expected).norm() / expected.norm().clamp_min(1e-30)
        units = float(error) / torch.finfo(torch.float32).eps
        assert units < UNITS, f"{name} is off by {units:.1f} units of rounding"


@pytest.mark.parametrize("kind", KINDS)
def test_equals_naive_in_outputs_gradients_and_state(kind: str) -> None:
    """Two chunks, or nearly three if a token has four ranks."""
    start = some_state(small(3, seed=1, **KINDS[kind]))
    assert_same_map(small(21 if kind != "mimo" else 10, **KINDS[kind]), start, chunk_size=16)


@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "state_dim"),
    [(1, 4, 16, 16), (63, 1, 5, 7), (500, 1, 16, 16), (33, 1, 40, 72), (5, 1, 128, 128)],
)
def test_lengths_and_widths(tokens: int, heads: int, head_dim: int, state_dim: int) -> None:
    sizes = {"heads": heads, "head_dim": head_dim, "state_dim": state_dim}
    assert_same_map(small(tokens, trapezoid=True, **sizes))


def test_more_heads_in_a_group_than_a_program_goes_through() -> None:
    """Parts of the gradients of B and C are added up."""
    assert_same_map(small(4, heads=11))


def test_ragged_rows_and_what_stands_in_the_padding() -> None:
    lengths = torch.tensor([20, 0, 5])
    inputs = small(20, batch=3, heads=2, trapezoid=True)
    start = some_state(small(3, seed=1, batch=3, heads=2, trapezoid=True))
    assert_same_map(inputs, start, lengths=lengths, chunk_size=16)
    blank = ssd(**inputs, state=start, lengths=lengths, backend="triton")
    for v in inputs.values():
        v[1:, 5:] = math.nan
    assert torch.equal(ssd(**inputs, state=start, lengths=lengths, backend="triton"), blank)


def test_pieces_equal_one_pass() -> None:
    inputs = small(40, heads=2, trapezoid=True, angles=2)
    whole, end = ssd(**inputs, return_state=True, backend="triton", chunk_size=16)
    state, pieces = None, []
    for first, last in ((0, 17), (17, 18), (18, 40)):
        y, state = ssd(**cut(inputs, first, last), state=state, return_state=True, backend="triton")
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-5, atol=1e-5)
    assert state is not None
    assert_same_state(state, end, atol=1e-5)


def test_small_decays_beside_huge_ones() -> None:
    inputs = small(32, heads=2, trapezoid=True)
    inputs["log_decay"] = torch.full_like(inputs["log_decay"], -1e-3)
    inputs["log_decay"][:, 3::9] = -1e4
    assert_same_map(inputs, some_state(small(3, seed=1, heads=2, trapezoid=True)))


@pytest.mark.parametrize("decay", [-1e30, -math.inf, 0.0])
def test_decays_without_end_and_none_at_all(decay: float) -> None:
    inputs = small(20, heads=1)
    inputs["log_decay"][:, 7] = decay
    expected = answers_and_gradients(inputs, None, "naive", torch.float64)
    found = answers_and_gradients(inputs, None, "triton", torch.float32)
    for name in found:
        torch.testing.assert_close(found[name], expected[name].float(), rtol=1e-5, atol=2e-5)


def test_zeros_stay_finite() -> None:
    inputs = {name: torch.zeros_like(v) for name, v in small(20, heads=1, trapezoid=True).items()}
    found = answers_and_gradients(inputs, None, "triton", torch.float32)
    assert all(bool(v.isfinite().all()) for v in found.values())


@pytest.mark.parametrize("kind", ["trapezoid in groups", "mimo"])
def test_the_future_does_not_move_the_past_by_one_bit(kind: str) -> None:
    inputs, other = (small(24, heads=2, seed=seed, **KINDS[kind]) for seed in (0, 1))
    before = ssd(**inputs, backend="triton", chunk_size=16)
    for t in (1, 21):
        size = {"x": 1e6, "B": 1e3, "C": 1e3, "log_decay": 50}
        changed = {
            name: torch.cat([v[:, :t], size.get(name, 9) * other[name][:, t:]], 1)
            for name, v in inputs.items()
        }
        after = ssd(**changed, backend="triton", chunk_size=16)
        assert torch.equal(after[:, :t], before[:, :t])
        assert not torch.equal(after[:, t], before[:, t])


def test_a_second_backward_of_one_graph_gives_the_same_bits() -> None:
    leaves = {n: v.requires_grad_() for n, v in small(20, heads=2, trapezoid=True).items()}
    y = ssd(**leaves, backend="triton")
    once = torch.autograd.grad(y.square().sum(), list(leaves.values()), retain_graph=True)
    again = torch.autograd.grad(y.square().sum(), list(leaves.values()))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    assert torch.equal(y, ssd(**leaves, backend="triton"))


def test_views_with_other_strides() -> None:
    inputs = small(20, heads=2, head_dim=24)
    x, B = inputs["x"].flatten(2), inputs["B"].flatten(2)
    mixed = torch.cat([x, B, inputs["C"].flatten(2)], dim=-1)
    x, B, C = mixed.split([48, 24, 24], dim=-1)
    views = {"x": x.unflatten(-1, (2, 24)), "B": B.unsqueeze(2), "C": C.unsqueeze(2)}
    views["log_decay"] = inputs["log_decay"].mT.contiguous().mT
    assert torch.equal(ssd(**(inputs | views), backend="triton"), ssd(**inputs, backend="triton"))
    turned = inputs["x"].transpose(1, 3).contiguous().transpose(1, 3)
    assert torch.equal(
        ssd(**(inputs | {"x": turned}), backend="triton"), ssd(**inputs, backend="triton")
    )


def test_half_precision_is_read_as_it_is_and_nothing_wider_is_kept() -> None:
    wide = small(20, heads=2, trapezoid=True)
    inputs = {n: v.bfloat16() if n in ("x", "B", "C") else v for n, v in wide.items()}
    saved: dict[int, Tensor] = {}

    def keep(v: Tensor) -> Tensor:
        saved[v.untyped_storage().data_ptr()] = v
        return v

    leaves = {n: v.requires_grad_() for n, v in inputs.items()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda v: v):
        y, end = ssd(**leaves, return_state=True, backend="triton")
    large = [v for v in saved.values() if v.numel() >= inputs["B"].numel()]
    assert {v.data_ptr() for v in large if v.dtype == torch.bfloat16} == {
        leaves[name].data_ptr() for name in ("x", "B", "C")
    }
    assert not [v for v in large if v.dtype != torch.bfloat16 and v.shape != end.h.shape]
    true_y, true_end = ssd(**inputs, return_state=True, backend="chunk")
    assert y.dtype == torch.bfloat16
    assert end.h.dtype == end.x.dtype == torch.float32
    torch.testing.assert_close(y, true_y, rtol=2**-7, atol=1e-6)
    assert_same_state(end, true_end, atol=1e-5)
    y.float().square().sum().backward()
    assert all(v.grad is not None and v.grad.dtype == v.dtype for v in leaves.values())


@pytest.mark.parametrize("layer", ["mamba2", "mamba3", "mimo"])
def test_layers_run_on_the_kernels(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built: nn.Module = (
        Mamba2(16, head_dim=16, state_dim=8)
        if layer == "mamba2"
        else Mamba3(16, head_dim=16, state_dim=8, rank=2 if layer == "mimo" else 1)
    )
    x = torch.randn(2, 9, 16)

    def run() -> tuple[Tensor, ...]:
        y, _ = built(x, lengths=torch.tensor([9, 4]))
        return y, *torch.autograd.grad(y.square().sum(), list(built.parameters()))

    expected = run()
    home = "echo_lm.layers.mamba2.ssd" if layer == "mamba2" else "echo_lm.layers.mamba3.ssd"
    monkeypatch.setattr(home, partial(ssd, backend="triton"))
    for a, b in zip(run(), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.detach().abs().max()))


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"rank": 3}, "rank of 1, 2, 4, 8, 16, not 3"),
        ({"head_dim": 129}, "not head width 129 with state size 24"),
        ({"dtype": torch.float64}, "not torch.float64"),
    ],
)
def test_what_the_kernels_do_not_take(sizes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=r"use backend=.chunk") as error:
        ssd(**small(4, **sizes), backend="triton")
    assert said in str(error.value)


def test_without_a_gpu_and_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="needs a CUDA device, not cpu"):
        ssd(**small(4), backend="triton")


def test_auto_takes_the_kernels_on_a_gpu_and_says_where_it_cannot(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def on_gpu(rank: int, tokens: int = 5) -> tuple[Tensor, Tensor]:
        with FakeTensorMode():
            x = torch.empty(1, tokens, 2, rank, 16, device="cuda")
            return x, torch.empty(1, tokens, 1, rank, 16, device="cuda")

    def chosen(rank: int, tokens: int = 5, **more: bool) -> str:
        options = {"shares_last": False, "restarts": False, "learning": False} | more
        return choose_scan("auto", *on_gpu(rank, tokens), **options)

    assert chosen(1) == chosen(1, learning=True) == chosen(1, restarts=True) == "triton"
    assert chosen(1, tokens=1) == "step"
    assert chosen(1, tokens=1, learning=True) == chosen(1, tokens=1, restarts=True) == "recurrent"
    for _ in range(2):
        assert chosen(3) == "chunk"
    said = [r.message for r in caplog.records if "The scan on cuda" in r.message]
    assert len(said) == 1
    assert said[0].endswith("in PyTorch: the Triton kernel takes a rank of 1, 2, 4, 8, 16, not 3.")
