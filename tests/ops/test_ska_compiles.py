"""The Triton kernels of SKA compile for a GPU that is not here, fit it, and take little memory."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import pytest
from benchmarks import compiled

SPILLED = {
    "chunk": {"inverse_cholesky": 560, "chunk_backward": 280},
    "exact": {"inverse_cholesky": 560, "factor": 352, "exact_forward": 48, "exact_backward": 912},
}
"""Bytes that a thread spills, at the most, as the triton of constraints.txt compiles; else none."""
ORDERS = {"chunk": 2, "exact": 1}
"""The paper's; but exact mode takes twice as long to compile with that."""
FLASH_ATTENTION = 0.5654
"""GiB that flash attention held at either of `compiled.SHAPES`: the peak in
`results/gpu/kernels.json` less the 64 MiB by which measured peaks of ours exceeded the count, taken
to be workspaces of cuBLAS. Its inputs lay as [B, H, T, D]; from [B, T, H, D] it may take up to 96
MiB less, so that this is a bound on our memory and no comparison."""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    """A process in which kernels are not interpreted."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("TRITON_INTERPRET")
            patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
            process.submit(compiled.peak, "chunk", 1, 64).result()  # starts it
        yield process


@pytest.mark.parametrize("mode", compiled.MODES)
def test_kernels_fit_and_spill_no_more_than_they_did(
    elsewhere: ProcessPoolExecutor, mode: str
) -> None:
    call = partial(compiled.ska_call, mode, order=ORDERS[mode])
    launches = elsewhere.submit(compiled.compiled, call).result()
    assert launches[0].name == "sums"
    assert launches[-1].name == "spread"
    for launch in launches:
        assert launch.shared_bytes <= compiled.SHARED_BYTES, launch
        assert launch.programs_at_once >= 2, launch
        assert launch.spilled_bytes <= SPILLED[mode].get(launch.name, 0), launch


@pytest.mark.parametrize("shape", compiled.SHAPES)
@pytest.mark.parametrize("mode", compiled.MODES)
def test_peak_of_memory_stays_below_what_flash_attention_held(
    elsewhere: ProcessPoolExecutor, mode: str, shape: tuple[int, int]
) -> None:
    assert elsewhere.submit(compiled.peak, mode, *shape).result()["GiB"] <= FLASH_ATTENTION


def test_nothing_is_compiled_where_kernels_are_interpreted() -> None:
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is set"):
        compiled.compiled(partial(compiled.ska_call, "chunk"))
