"""The experiments on the paper's mathematics run from end to end, and measure what they say."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.testing import assert_close

from echo_lm.analysis.gradients import attention_jacobian
from echo_lm.analysis.operator import departure_from_normality, sums
from echo_lm.analysis.ridge import filter_error_bound, readout
from echo_lm.experiments import capacity, conditioning, find, gradients, persistence, precision
from echo_lm.experiments.runner import reproduce
from echo_lm.layers.rotary import rotary_tables, rotate
from echo_lm.ops import ska

NAMES = ("conditioning", "persistence", "capacity", "gradients", "precision")


@pytest.mark.parametrize("name", NAMES)
def test_runs_from_end_to_end(name: str, tmp_path: Path) -> None:
    folder = reproduce(
        find(name),
        scale="smoke",
        seeds=2,
        out=tmp_path,
        device="cpu",
        console=Console(quiet=True),
    )
    report = (folder / "README.md").read_text()
    assert "**" in report
    assert "have not run" not in report
    assert "nan" not in report.split()
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    for record in (folder / "cells").iterdir():
        json.loads(record.read_text(), parse_constant=pytest.fail)  # NaN is no JSON


def test_keys_have_the_condition_number_asked_for() -> None:
    k = conditioning.keys_of_condition(1e4, draws=3, rank=6)
    wanted = torch.full((3,), 1e4, dtype=k.dtype)
    assert_close(torch.linalg.cond(k.mT @ k, 2), wanted, rtol=1e-6, atol=0)
    assert_close(k.norm(dim=-1).amax(-1), torch.ones(3, dtype=k.dtype))


def test_linear_attention_is_a_multiple_of_ridge_for_orthonormal_keys_only() -> None:
    v = torch.randn(2, 6, 5, dtype=torch.float64)
    distances = {}
    for kappa in (1.0, 100.0):
        found = conditioning.isotropy(conditioning.keys_of_condition(kappa, 2, 6), v, 1e-6)
        distances[kappa] = found["largest"]
        assert found["largest"] <= found["bound"] + 1e-12
    assert distances[1.0] < 1e-12 < 0.1 < distances[100.0]


def test_order_0_recalls_a_keys_value_and_order_1_its_successors() -> None:
    k = conditioning.keys_of_condition(10.0, 2, 12)
    v = torch.randn(2, 12, 7, dtype=torch.float64)
    found = conditioning.retrieval_errors(k, v, 1e-8)
    own, successor = (found[target] for target in conditioning.TARGETS)
    assert own["SKA order 0"] < 1e-6 < 0.9 < own["SKA order 1"]
    assert successor["SKA order 1"] < 1e-6 < 0.9 < successor["SKA order 0"]
    assert max(own["SKA bank"], successor["SKA bank"]) < 1e-6
    assert conditioning.distance_to_least_squares(k, v, 1e-3) < 1e-10


@pytest.mark.parametrize(("accuracy", "bits"), [(1.0, 8.0), (1 / 256, 0.0), (0.0, 0.0)])
def test_bits_of_a_pair(accuracy: float, bits: float) -> None:
    assert capacity.bits_of_a_pair(accuracy, 256) == pytest.approx(bits, abs=1e-12)


def test_bits_are_the_mutual_information_of_a_channel_whose_errors_spread_evenly() -> None:
    right, codes = 0.7, 4
    joint = torch.full((codes, codes), (1 - right) / (codes - 1)) / codes
    joint.fill_diagonal_(right / codes)
    information = float((joint * (joint * codes**2).log2()).sum())
    assert capacity.bits_of_a_pair(right, codes) == pytest.approx(information, rel=1e-5)


def test_every_memory_keeps_orthonormal_keys() -> None:
    book = torch.nn.functional.normalize(torch.randn(16, 8), dim=-1)
    k = torch.linalg.qr(torch.randn(2, 8, 8)).Q[:, :4]
    ids = torch.randint(16, (2, 4))
    for name, memory in capacity.MEMORIES.items():
        if name != "SKA order 1":  # which draws the contents' keys itself
            assert capacity.share_recalled(memory, memory.settings[-1], k, ids, book) == 1, name


def test_the_delta_rule_replaces_what_a_key_held() -> None:
    k = torch.nn.functional.normalize(torch.randn(1, 1, 5), dim=-1).expand(1, 2, 5)
    v = torch.randn(1, 2, 3)
    assert_close(capacity.delta_net(k, v, 1.0)[:, 0], v[:, 1])
    assert_close(capacity.linear_attention(k, v, 1.0)[:, 0], v.sum(1))


def test_leanest_forms_count_what_a_memory_needs() -> None:
    rank, width = 6, 5
    gram, value, lag = rank * (rank + 1) // 2, width * rank, rank * rank
    assert capacity.ridge_bytes(rank, width, 9) == 4 * (gram + value)
    assert capacity.step_bytes(rank, width, 9) == 4 * (gram + value + lag + rank)
    assert capacity.cache_bytes(rank, width, 9) == 4 * 9 * (rank + width)
    assert math.isclose(capacity.matrix_bytes(rank, width, 9), 4 * value)


SCENE = {"draws": 5, "rank": 14, "persistent": 2, "value width": 4, "tokens": 64, "ridge": 1e-4}


def test_the_normal_scene_is_what_the_theorem_assumes_and_keeps_its_bound() -> None:
    scene = persistence.normal_scene(SCENE, 0.1)
    assert float(departure_from_normality(scene.operator).max()) < 1e-12
    delta, rho = persistence.split_eigenvalues(scene.operator, 2)
    assert max(delta) <= 0.1
    assert max(rho) <= 0.5
    assert float(torch.linalg.eigvals(scene.operator).abs().max()) <= 1 + 1e-12
    levels = torch.tensor([0.0, 0.3, 3.0], dtype=torch.float64)
    size = torch.linalg.matrix_norm(scene.readout, ord=2)
    wanted = persistence.apply(scene.readout, scene.signal).norm(dim=-1)
    for order in (0, 1, 3):
        errors = persistence.errors_of(scene, order, levels)
        for error, level in zip(errors.unbind(1), levels.tolist(), strict=True):
            bound = filter_error_bound(0.1, 0.5, order, 1.0, level) * size / wanted
            assert bool((error <= bound + 1e-12).all())


def test_what_is_read_once_keeps_its_length_whatever_its_eigenvalues_say() -> None:
    torch.manual_seed(1)
    scene = persistence.chain_scene(SCENE, 0.1)
    _, rho = persistence.split_eigenvalues(scene.operator, 2)
    assert max(rho) < 0.9 < 0.98 < persistence.transient_norm(scene) <= 1
    assert float(persistence.errors_of(scene, 0, torch.zeros(1).double()).max()) == 0


def test_a_crossing_is_found_where_two_lines_cross() -> None:
    levels = torch.logspace(-3, 1, 33, dtype=torch.float64)
    flat = torch.full_like(levels, 0.2)
    assert persistence.crossing(levels, levels, flat) == pytest.approx(0.2, rel=1e-6)
    assert persistence.crossing(levels, levels, 0.95 * levels) is None
    assert persistence.crossing(levels, levels, 0.5 * levels) == pytest.approx(1e-3)


@pytest.mark.parametrize("mixer", ["attention", "SKA order 0", "SKA order 2"])
def test_the_query_path_is_the_jacobian_of_appendix_j(mixer: str) -> None:
    layer = gradients.MIXERS[mixer](8, 1, 3.0)
    gradients.hold(layer.k_proj, layer.v_proj)
    x = torch.randn(1, 12, 8, dtype=torch.float64)
    (found,) = gradients.jacobians(gradients.read([layer], x.expand(8, -1, -1), residual=False))
    found = found.unflatten(1, (12, 8))
    assert_close(found[:, :-1], torch.zeros_like(found[:, :-1]))

    def turned(y: torch.Tensor) -> torch.Tensor:
        cos, sin = rotary_tables(torch.arange(12)[None], 8, dtype=y.dtype)
        return rotate(y[:, :, None], cos, sin)[0, :, 0] if mixer == "attention" else y[0]

    def last_query(token: torch.Tensor) -> torch.Tensor:
        return turned(layer.q_proj(gradients.normed(torch.cat([x[:, :-1], token[None, None]], 1))))[
            -1
        ]

    read = gradients.normed(x)
    keys, values = turned(layer.k_proj(read)), layer.v_proj(read)[0]
    if mixer == "attention":
        head = attention_jacobian(last_query(x[0, -1]), keys, values, 8**-0.5)
    else:
        ridge = layer.ridge[0]
        head = layer.eta * readout(sums(keys, values), layer.coefficients[0].double(), ridge)
    size = layer(read)[0].square().mean().sqrt()
    to_query = torch.autograd.functional.jacobian(last_query, x[0, -1])
    assert_close(
        found[:, -1], layer.out_proj.weight @ head @ to_query / size, rtol=1e-8, atol=1e-10
    )


def test_saturated_attention_passes_nothing_through_its_queries() -> None:
    protocol = {"dim": 8, "heads": 1, "depth": 2, "tokens": 12}
    query_paths = gradients.VIEWS["query paths"]
    found = gradients.measure(protocol, "attention", 1e4, query_paths)
    assert found["largest weight"] > 1 - 1e-6
    assert max(found["norm"]) < 1e-6
    blocks = gradients.measure(protocol, "attention", 1e4, gradients.VIEWS["blocks"])
    assert min(blocks["norm"]) > 0.5


def test_tf32_rounds_to_nearest_with_ties_to_even() -> None:
    ulp = 2.0**-10
    given = torch.tensor(
        [1.0, 1 + ulp / 2, 1 + 1.5 * ulp, 1 + 0.51 * ulp, -1 - 0.49 * ulp, 2.0**-130]
    )
    wanted = torch.tensor([1.0, 1.0, 1 + 2 * ulp, 1 + ulp, -1.0, 2.0**-130])
    assert_close(precision.to_tf32(given), wanted, rtol=0, atol=0)
    strange = torch.tensor([math.inf, -math.inf, math.nan])
    assert_close(precision.to_tf32(strange), strange, equal_nan=True)
    many = torch.randn(1000)
    assert bool(((precision.to_tf32(many) - many).abs() <= ulp / 2 * many.abs()).all())


def test_the_memory_in_fp32_is_the_one_that_decodes() -> None:
    protocol = find("precision").protocol("smoke")
    memory = precision.Memory(precision.ARITHMETIC["fp32"], protocol)
    truth = precision.Truth(protocol)
    read = []
    for chunk in precision.Streams(0, protocol["rank"], protocol["value width"]).chunks(64, 192):
        memory.rebuild()
        memory.read(*chunk)
        truth.read(*chunk)
        read.append(chunk)
    keys, values = (torch.cat(parts, 1)[:, :, None] for parts in zip(*read, strict=True))
    how = {"coef": torch.ones(1, 1), "ridge": protocol["ridges"][1], "backend": "recurrent"}
    _, state = ska(keys, keys, values, **how, return_state=True)
    for sum_here, name in ((memory.gram, "gram"), (memory.lag, "lag"), (memory.value, "value")):
        assert_close(sum_here, getattr(state, name)[:, 0], rtol=1e-5, atol=1e-5)
        assert_close(getattr(truth.sums, name).float(), sum_here, rtol=1e-4, atol=1e-4)
    assert_close(memory.inverse[0, 1], state.inverse[:, 0], rtol=1e-4, atol=1e-4)


def test_sums_by_chunk_are_the_same_sums_and_nearer_to_the_truth() -> None:
    protocol = find("precision").protocol("smoke")
    memories = [
        precision.Memory(precision.ARITHMETIC[name], protocol)
        for name in ("fp32", "fp32 summed by chunk")
    ]
    truth = precision.Truth(protocol)
    for chunk in precision.Streams(0, protocol["rank"], protocol["value width"]).chunks(64, 4096):
        for memory in (*memories, truth):
            memory.read(*chunk)
    off = [
        float((memory.gram - truth.sums.gram).norm() / truth.sums.gram.norm())
        for memory in memories
    ]
    assert 3 * off[1] < off[0] < 1e-5
