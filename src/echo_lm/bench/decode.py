"""`echo-lm bench decode`: the price of the next token after a short text and after a long one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from torch import Tensor, nn

from echo_lm.bench.cache import (
    FREE,
    AttentionWithRoom,
    cache_bytes,
    free_bytes,
    give_room,
)
from echo_lm.bench.parity import ParityError, badness, error
from echo_lm.bench.record import Row, Target
from echo_lm.bench.runner import Bench, Cell, Tables, Tell, clocked, usually
from echo_lm.bench.runner import run as run_bench
from echo_lm.bench.timing import finish, interleaved, on_gpu, ratio, replayable, warm
from echo_lm.layers import Attention
from echo_lm.model.config import EchoConfig
from echo_lm.model.lm import EchoLM
from echo_lm.model.state import EchoState
from echo_lm.ops.backends import product_dtype
from echo_lm.plots import figure, line

PRESETS = {
    "gpu": ("echo-180m", "mamba2-attention-180m", "transformer-180m"),
    "cpu": ("synthetic-ska", "synthetic-attention"),
}
SAME_SHAPE = {
    "synthetic-ska": "synthetic-attention",
    "synthetic-ska-paper": "synthetic-attention",
    **{
        f"echo-{size}{paper}": f"mamba2-attention-{size}"
        for size in ("50m", "180m")
        for paper in ("", "-paper")
    },
}
"""The model with attention where another has SKA."""
CONTEXTS = {"gpu": (1024, 4096, 16384, 65536, 131072, 1048576), "cpu": (1024, 4096, 16384)}
BATCHES = {"gpu": (1, 64), "cpu": (1,)}
READ_AT_MOST = 2**23
"""Tokens of a batch, unless contexts are named."""
PIECE = {"gpu": 2**16, "cpu": 2**11}
"""Tokens of a batch that are read at a time."""
ROUNDS = {"gpu": 15, "cpu": 7}
STEPS = 64
"""In a round: exact SKA makes its inverse anew every so many tokens."""
PROMPT, WRITTEN = 70, 70
"""Tokens: both sides of a chunk's boundary."""
STEP_ERROR = 1e-3
"""In fp32 an inverse multiplies rounding by up to |k|^2 / ridge, 60 for ours and 1000 for the
paper's; the layers above pass it on."""
FLAT = 1.05
FASTER = 10.0
FASTER_AT = 131072, 64
"""Context and batch of that target."""


@dataclass(frozen=True)
class Reader:
    """A model that has read so many tokens."""

    step_seconds: Callable[[], float]
    """Of one more token, over a few."""
    nbytes: int
    """What it remembers."""
    note: str | None = None


def run(
    presets: Sequence[str],
    *,
    contexts: Sequence[int],
    batches: Sequence[int],
    rounds: int | None,
    seed: int,
    device: str,
    out: Path,
    console: Console | None = None,
) -> Path:
    """What the command does."""
    device = clocked(device)
    usual = usually(device)
    for name, numbers in (("contexts", contexts), ("batches", batches)):
        if any(number < 1 for number in numbers):
            raise ValueError(f"{name} must be at least 1, got {min(numbers)}.")
    return run_bench(
        bench(
            tuple(dict.fromkeys(presets)) or PRESETS[usual],
            {
                batch: sorted(set(contexts))
                or [n for n in CONTEXTS[usual] if n * batch <= READ_AT_MOST]
                for batch in batches or BATCHES[usual]
            },
            rounds=ROUNDS[usual] if rounds is None else rounds,
            seed=seed,
            device=device,
        ),
        out,
        console or Console(),
    )


def bench(
    presets: Sequence[str],
    contexts: Mapping[int, Sequence[int]],
    *,
    rounds: int,
    seed: int,
    device: str,
) -> Bench:
    """A table for each batch, in which all contexts of all models take turns; other models or
    contexts are other tables."""
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}.")
    for batch, some in contexts.items():
        if not some:
            raise ValueError(f"batches of {batch} are large: name the contexts they should read.")
    for preset in presets:
        EchoConfig.preset(preset)
    dtype = product_dtype(device)
    cells = [
        Cell(f"parity of {preset}", partial(check_steps, preset, device))
        for preset in presets
        if "attention" not in EchoConfig.preset(preset).mixers
    ]
    cells += [
        Cell(
            title_of(presets, batch, some),
            partial(compare, presets, some, batch, rounds, dtype, device),
        )
        for batch, some in contexts.items()
    ]
    return Bench(
        name="decode",
        device=device,
        config={
            "dtype": str(dtype)[6:],
            "steps of a round": STEPS,
            "rounds": rounds,
            "threads": torch.get_num_threads(),
            "weights": "random",
            "recurrent models": "have read random tokens, and go on through EchoLM.stream",
            "attention": "looks at a cache that lies ready, filled with random numbers; on a GPU a "
            "CUDA graph of a step",
            "ms": "of a step, in which each row of the batch gets a token: median over rounds in "
            "which all take turns",
            "x shortest": "time over that at the shortest context, median of the rounds' ratios",
            "x attention": "tokens a second over those of the model with attention in the place "
            "of SKA, likewise",
            "MiB": "of all that is remembered of a batch",
            "parity": f"of a stream in fp32, {PROMPT} tokens and {WRITTEN} written, to one pass "
            "over them in fp64, in the norm: of logits, and of the worst tensor of the state",
        },
        seed=seed,
        cells=cells,
        targets=targets if on_gpu(device) else lambda tables: [],
        draw=draw,
        remarks=[] if on_gpu(device) else ["The targets are for a GPU."],
    )


def title_of(presets: Sequence[str], batch: int, contexts: Sequence[int]) -> str:
    return f"{', '.join(presets)}; {named(batch)}; after {', '.join(map(str, contexts))} tokens"


def named(batch: int) -> str:
    return f"batch {batch}"


def batch_in(title: str) -> str:
    return title.split("; ")[1]


def check_steps(preset: str, device: str, tell: Tell) -> list[Row]:
    """Hold the steps of a model to its parallel form; raises if they are not the same."""
    model = EchoLM(EchoConfig.preset(preset)).to(device).eval()
    for mixer in model.mixers():
        nn.init.xavier_uniform_(mixer.out_proj.weight)  # SKA starts silent
    return [{"what": preset, **step_errors(model), "allowed": STEP_ERROR}]


@torch.no_grad()
def step_errors(model: EchoLM) -> Row:
    """Of logits and state after a prompt and some tokens, relative in the norm."""
    text = random_text(model, 2, PROMPT)
    stream = model.stream(text, max_new_tokens=WRITTEN)
    written = torch.stack(list(stream), dim=1)
    logits, state = stream.logits, stream.state
    truth = model.double()(torch.cat([text, written[:, :-1]], dim=1), return_state=True)
    held = state.to_dict()
    errors = {
        name: error(held[name], wanted)
        for name, wanted in truth.state.to_dict().items()
        if isinstance(wanted, Tensor)
    }
    worst = max(errors, key=lambda name: badness(errors[name]))
    off = {"error of logits": error(logits, truth.logits[:, -1]), "of state": errors[worst]}
    if not max(map(badness, off.values())) < STEP_ERROR:
        raise ParityError(
            f"Steps are not the parallel form: logits are off by {off['error of logits']:.1e}, "
            f"{worst} of the state by {errors[worst]:.1e}, and {STEP_ERROR:.0e} is what rounding "
            "may cost; no speed is reported."
        )
    return {**off, "in": worst}


@torch.inference_mode()
def compare(
    presets: Sequence[str],
    contexts: Sequence[int],
    batch: int,
    rounds: int,
    dtype: torch.dtype,
    device: str,
    tell: Tell,
) -> list[Row]:
    """Time and memory of every model at every context."""
    readers: dict[tuple[str, int], Reader] = {}
    for preset in presets:
        model = EchoLM(EchoConfig.preset(preset)).to(device, dtype).eval()
        attends = any(isinstance(mixer, Attention) for mixer in model.mixers())
        make = with_room if attends else reading
        for context, reader in make(model, contexts, batch, partial(told, tell, preset)):
            readers[preset, context] = reader
    tell("timing")
    times = interleaved({key: one.step_seconds for key, one in readers.items()}, rounds)
    rows: list[Row] = []
    for preset in presets:
        for context in contexts:
            row: Row = {"what": preset, "context": context}
            row |= dict.fromkeys(("ms", "tokens/s", "MiB", "x shortest", "x attention", "note"))
            rows.append(row)
            if (preset, context) not in readers:
                row["note"] = "did not run: its cache does not fit into memory"
                continue
            taken = times[preset, context]
            row["ms"], row["tokens/s"] = 1e3 * median(taken), batch / median(taken)
            reader = readers[preset, context]
            row["MiB"], row["note"] = reader.nbytes / 2**20, reader.note
            row["x shortest"] = ratio(taken, times[preset, contexts[0]])
            other = times.get((SAME_SHAPE.get(preset, ""), context))
            row["x attention"] = None if other is None else ratio(other, taken)
    return rows


def told(tell: Tell, preset: str, what: str) -> None:
    tell(f"{preset} {what}")


def reading(
    model: EchoLM, contexts: Sequence[int], batch: int, tell: Tell
) -> Iterator[tuple[int, Reader]]:
    """A model that reads, on from one context to the next."""
    state, read = None, 0
    device = model.embedding.weight.device
    piece = max(1, PIECE["gpu" if on_gpu(device) else "cpu"] // batch)
    for context in contexts:
        while read < context:
            tell(f"reads {read:,} of {contexts[-1]:,} tokens")
            text = random_text(model, batch, min(piece, context - read))
            state = model(text, state=state, return_state=True, logits_to_keep=1).state
            read += text.shape[1]
        assert state is not None
        yield context, Reader(partial(stream_seconds, model, state), state.nbytes)


def random_text(model: EchoLM, batch: int, tokens: int) -> Tensor:
    shape = batch, tokens
    return torch.randint(model.config.vocab_size, shape, device=model.embedding.weight.device)


def stream_seconds(model: EchoLM, state: EchoState) -> float:
    """A token of `EchoLM.stream`, once it flows: the first comes of what was read before."""
    device = state.count.device
    prompt = random_text(model, len(state.count), 1)
    stream = model.stream(prompt, state=state, max_new_tokens=2 + STEPS)
    next(stream), next(stream)
    finish(device)
    start = time.perf_counter()
    for _ in range(STEPS):
        next(stream)
    finish(device)
    return (time.perf_counter() - start) / STEPS


def with_room(
    model: EchoLM, contexts: Sequence[int], batch: int, tell: Tell
) -> Iterator[tuple[int, Reader]]:
    """A model whose attention looks at a cache, as long as that fits."""
    device = model.embedding.weight.device
    each = cache_bytes(model, batch)
    fitting = [context for context in contexts if (context + 1) * each < FREE * free_bytes(device)]
    if not fitting:
        return
    layers = give_room(model, batch, fitting[-1] + 1)
    state, token = model.init_state(batch), random_text(model, batch, 1)
    besides = state.nbytes
    for context in fitting:
        tell(f"at {context:,} tokens")
        step = partial(step_at, model, layers, context + 1, token, state)
        again, note = replayable(warm(step, device), device)
        seconds = partial(step_seconds, again, device)
        yield context, Reader(seconds, (context + 1) * each + besides, note)


def step_at(
    model: EchoLM,
    layers: Sequence[AttentionWithRoom],
    length: int,
    token: Tensor,
    state: EchoState,
) -> Tensor:
    """The next token of each row."""
    for layer in layers:
        layer.length = length
    out = model(token, state=state, return_state=True, logits_to_keep=1)
    return out.logits[:, -1].argmax(-1)


def step_seconds(step: Callable[[], object], device: torch.device) -> float:
    finish(device)
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    finish(device)
    return (time.perf_counter() - start) / STEPS


def targets(tables: Tables) -> list[Target]:
    """Flat in the context, and so many times the tokens of attention."""
    found = []
    for title, rows in timed(tables).items():
        batch = batch_in(title)
        for row in rows:
            name, context = row["what"], row["context"]
            if name not in SAME_SHAPE or row["ms"] is None:
                continue
            if context == max(other["context"] for other in rows):
                slowest = max(other["x shortest"] for other in rows if other["what"] == name)
                what = f"{name}, {batch}: time up to {context:,} tokens over the shortest context"
                found.append(Target(what, slowest, at_most=FLAT))
            if (context, batch) == (FASTER_AT[0], named(FASTER_AT[1])) and row["x attention"]:
                what = f"{name}, {batch}: tokens/s over attention at {context:,} tokens"
                found.append(Target(what, row["x attention"], at_least=FASTER))
    return found


def timed(tables: Tables) -> Tables:
    """Those of a batch."""
    return {title: rows for title, rows in tables.items() if "context" in rows[0]}


def draw(tables: Tables, path: Path) -> None:
    """Time and memory against the context, a column for each batch."""
    tables = timed(tables)
    panels = {"ms": "ms for a step", "MiB": "MiB remembered"}
    with figure(path, rows=len(panels), columns=len(tables)) as axes:
        for column, (title, rows) in enumerate(tables.items()):
            for ax, (what, label) in zip(axes[:, column], panels.items(), strict=True):
                ran = [row for row in rows if row[what] is not None]
                if not ran:
                    continue
                for i, name in enumerate(dict.fromkeys(row["what"] for row in ran)):
                    curve = [(row["context"], row[what]) for row in ran if row["what"] == name]
                    ax.plot(*zip(*curve, strict=True), **line(i, name))
                heights = [row[what] for row in ran]
                ax.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel=label)
                ax.set_ylim(min(heights) / 3, 3 * max(heights))
                contexts = sorted({row["context"] for row in rows})
                ax.set_xticks(contexts, [short(context) for context in contexts], minor=False)
                ax.minorticks_off()
            axes[0, column].set_title(batch_in(title))
            axes[0, column].legend()


def short(tokens: int) -> str:
    """`131072` as 128K."""
    for unit, name in ((2**20, "M"), (2**10, "K")):
        if tokens >= unit:
            return f"{tokens / unit:.3g}{name}"
    return str(tokens)
