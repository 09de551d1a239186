"""Single tokens on a GPU: the kernels of a step, and whole models as a CUDA graph.

Nothing is timed before the kernels are shown to be the naive form in fp64 over several chunks, with
rows at different counts, and the graph to write what steps without one write.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from echo_lm import EchoConfig, EchoLM, SKAState, ska
from echo_lm.bench.record import Findings, Row, Target
from echo_lm.model.decoder import Decoder, check_decoding

SEED = 0
CHUNK, BEFORE, STEPS = 16, 24, 40
"""Rows differ by up to a chunk and a half; each begins two or three chunks."""
CHECKS: tuple[tuple[torch.dtype, int, int, int, dict[str, Any]], ...] = (
    (torch.bfloat16, 48, 64, 2, {"causal": "exact"}),
    (torch.bfloat16, 56, 64, 2, {"causal": "exact", "decay": 0.5}),
    (torch.bfloat16, 48, 64, 2, {"causal": "chunk"}),
    (torch.bfloat16, 56, 64, 2, {"causal": "chunk", "relative_ridge": True}),
    (torch.float32, 16, 16, 0, {"causal": "exact"}),
    (torch.float32, 24, 20, 4, {"causal": "exact"}),
    (torch.float32, 50, 60, 1, {"causal": "chunk", "decay": 0.7}),
    (torch.float32, 128, 128, 2, {"causal": "exact"}),
    (torch.bfloat16, 128, 128, 2, {"causal": "chunk", "relative_ridge": "trace"}),
)
PARITY = {torch.bfloat16: 1e-2, torch.float32: 5e-5}
"""Largest error to the naive form in fp64, in the norm; answers are rounded to 4e-3 in bf16. fp32:
the inverse is made of products of three TF32, 5e-7 each, and multiplies that by up to
|k|^2 / ridge = 60."""
PRESETS = ("echo-50m", "echo-50m-paper", "mamba3-50m", "echo-180m")
BATCHES = (1, 64)
NEW_TOKENS, ROUNDS = 130, 5


def measure() -> Findings:
    torch.manual_seed(SEED)
    errors = [check(*case) for case in CHECKS]
    rows, targets = [], []
    for preset in PRESETS:
        for batch in BATCHES:
            row = compare(preset, batch)
            rows.append(row)
            name = f"{preset}, {batch} rows: a graph is replayed"
            targets.append(Target(name, float(row["captured"]), at_least=1))
    config = {
        "chunk_size": CHUNK,
        "steps": STEPS,
        "errors": "to the naive form in fp64, in the norm, the largest of answers and state",
        "weights": "bfloat16",
        "times": "milliseconds for one token of every row, greedy choice and all: median of runs "
        f"of {NEW_TOKENS} tokens, with and without a CUDA graph in turn",
        "state off by": f"after {NEW_TOKENS} greedy tokens, to steps that write over nothing",
    }
    return Findings(config, SEED, {"errors": errors, "times": rows}, targets, device="gpu")


@torch.no_grad()
def check(
    dtype: torch.dtype,
    rank: int,
    width: int,
    order: int,
    options: dict[str, Any],
    device: str = "cuda",
) -> Row:
    """Errors at one size; raises if one is too large."""
    heads = 2
    given = {
        "q": torch.randn(3, BEFORE + STEPS, heads, rank, device=device).to(dtype),
        "k": torch.randn(3, BEFORE + STEPS, heads, rank, device=device).to(dtype),
        "v": torch.randn(3, BEFORE + STEPS, heads, width, device=device).to(dtype),
    }
    how = options | {
        "coef": torch.randn(heads, order + 1, device=device),
        "ridge": torch.full((heads,), 0.03 * rank, device=device),
        "chunk_size": CHUNK,
        "return_state": True,
    }
    if options.get("relative_ridge"):
        how["ridge"] = torch.full((heads,), 0.03, device=device)
    wide = {name: x.double() if isinstance(x, Tensor) else x for name, x in how.items()}
    before = {name: x[:, :BEFORE] for name, x in given.items()}
    lengths = torch.tensor([BEFORE, CHUNK, 0], device=device)
    _, state = ska(**before, **how, lengths=lengths, backend="recurrent")
    _, truth = ska(
        **{name: x.double() for name, x in before.items()}, **wide, lengths=lengths, backend="naive"
    )
    worst = 0.0
    for t in range(BEFORE, BEFORE + STEPS):
        now = {name: x[:, t : t + 1] for name, x in given.items()}
        y, state = ska(**now, **how, state=state, in_place=True, backend="triton")
        now = {name: x.double() for name, x in now.items()}
        expected, truth = ska(**now, **wide, state=truth, backend="naive")
        worst = max(worst, off(y, expected))
    size = f"{str(dtype)[6:]} r={rank} P={width} K={order} {options}"
    error = max(worst, *(off(x, y) for x, y in pairs(state, truth)))
    if not error < PARITY[dtype]:
        raise RuntimeError(f"The kernels are {error:.1e} off at {size}; no speed is reported.")
    return {"size": size, "error": error}


def pairs(found: SKAState, wanted: SKAState) -> list[tuple[Tensor, Tensor]]:
    ours = found.to_dict()
    return [(ours[name], x) for name, x in wanted.to_dict().items() if isinstance(x, Tensor)]


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.double().norm().clamp_min(1e-30))


def compare(preset: str, batch: int) -> Row:
    """Parity of a model's decoder, then its times with and without a graph."""
    model = EchoLM(EchoConfig.preset(preset)).eval().requires_grad_(False)
    for mixer in model.mixers():
        nn.init.xavier_uniform_(mixer.out_proj.weight)
    model = model.to("cuda", torch.bfloat16)
    prompt = torch.randint(model.config.vocab_size, (batch, 100), device="cuda")
    shown = check_decoding(model, prompt, NEW_TOKENS)
    with torch.no_grad():
        state = model(prompt, return_state=True).state
    runs: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(ROUNDS):
        for capture, times in runs.items():
            times.append(milliseconds(Decoder(model, state, capture=capture), prompt[:, -1]))
    return {
        "model": preset,
        "rows": batch,
        "graph": median(runs[True]),
        "no graph": median(runs[False]),
        **shown,
    }


def milliseconds(decoder: Decoder, token: Tensor) -> float:
    """Of one token, once the decoder has begun."""
    token = decoder.read(token).argmax(-1)
    token = decoder.read(token).argmax(-1)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(NEW_TOKENS):
        token = decoder.read(token).argmax(-1)
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / NEW_TOKENS
