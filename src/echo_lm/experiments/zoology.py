"""Zoology's MQAR: accuracy against bytes of state, on the protocol it publishes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from echo_lm.experiments.base import (
    Experiment,
    Finished,
    Scale,
    Settings,
    Table,
    Workbench,
    distinct,
    over_seeds,
    percent,
    select,
)
from echo_lm.experiments.training import fit, found_at, read_over
from echo_lm.model.config import EchoConfig, Mamba2Config, SKAConfig
from echo_lm.plots import MARKERS, band, figure, line
from echo_lm.tasks import Mixture
from echo_lm.tasks.zoology import PROTOCOL_2, PROTOCOL_2_TEST, Size, Zoology, mixed
from echo_lm.train import Diverged

BUDGET = 64 * 1024
"""Bytes of state at which the models are compared."""
RATES = (3.16e-3, 1e-3, 1e-2, 3.16e-2)
"""10^-3 to 10^-1.5 in four steps, the likely ones first."""
DROPOUT = 0.1
"""Of embeddings."""


def two_layers(width: int, mixer: Any, **settings: Any) -> EchoConfig:
    """A layer that sees a few tokens, then the one in question, as Zoology has it.

    Its first layer is a gated convolution; here it is a Mamba-2 layer that besides its convolution
    keeps one number for each channel.
    """
    return EchoConfig(
        dim=width,
        mixers=("mamba2", mixer),
        mlp="none",
        embedding_dropout=DROPOUT,
        mamba2=Mamba2Config(state_dim=1, head_dim=32, expand=1),
        **settings,
    )


def mamba2(width: int, state_dim: int) -> EchoConfig:
    """Its own convolutions see what the first layer of the others sees."""
    config = two_layers(width, "mamba2", heads=1)
    return replace(config, mamba2=Mamba2Config(state_dim=state_dim, head_dim=64))


def ska(sizes: Sequence[tuple[int, int]], **changes: Any) -> dict[str, EchoConfig]:
    """One head, as values are cheaper than Gram matrices; a bank starts it at order 0."""
    return {
        f"width {width}, rank {rank}": two_layers(
            width, "ska", heads=1, ska=SKAConfig(rank=rank, **changes)
        )
        for width, rank in sizes
    }


MODELS: dict[str, dict[str, EchoConfig]] = {
    "SKA": ska([(256, 40), (128, 32), (64, 16), (256, 32), (128, 16)]),
    "SKA, convolved": ska([(256, 38), (128, 32), (64, 16)], conv_kernel=4),
    "SKA, tied start, late": ska(
        [(256, 39), (128, 32), (64, 16)], tied_start=True, sees_itself=False
    ),
    "SKA, order 1": ska([(256, 40), (128, 32), (64, 16)], filter="power", order=1),
    "DeltaNet": {f"width {d}": two_layers(d, "delta", heads=2) for d in (128, 64, 256)},
    "Mamba-2": {
        f"width {width}, state {state}": mamba2(width, state)
        for width, state in ((128, 16), (64, 8), (256, 16), (64, 16), (256, 24))
    },
    "Attention": {f"width {d}": two_layers(d, "attention", heads=1) for d in (128, 64)},
}
"""Sizes of each by name, the telling ones first."""
SMOKE = {
    "SKA": "width 64, rank 16",
    "SKA, convolved": "width 64, rank 16",
    "SKA, tied start, late": "width 64, rank 16",
    "DeltaNet": "width 64",
    "Mamba-2": "width 64, state 8",
    "Attention": "width 64",
}
"""Small ones, which learn to recall within the steps of the smoke scale or begin to."""

PUBLISHED = {
    "Mamba-2": {8_000: 0.52, 16_000: 0.69, 33_000: 0.785, 66_000: 0.83, 98_000: 0.845},
    "DeltaNet": {9_000: 0.79, 34_000: 0.963, 134_000: 0.995},
    "Gated DeltaNet": {17_000: 0.89, 67_000: 0.988, 265_000: 0.993},
    "Based": {9_000: 0.67, 40_000: 0.91, 80_000: 0.985},
    "GLA": {18_000: 0.77, 68_000: 0.95},
    "RWKV-7": {17_000: 0.815, 132_000: 0.915},
}
"""Mean accuracy by bytes of state, read off Zoology's plot, to 0.01; attention is at about 1."""


class ZoologyMQAR(Experiment):
    """Trained on up to 64 pairs in 256 tokens, tested on up to 256 pairs in 1,024."""

    name = "zoology"
    title = "Zoology's MQAR: accuracy against bytes of state"
    source = "ours; the mixed protocol of Arora et al. (HazyResearch/zoology)"

    def protocol(self, scale: Scale) -> dict[str, Any]:
        full = scale == "full"
        trained = PROTOCOL_2 if full else (Size(64, 4, 32_768),)
        tested = PROTOCOL_2_TEST if full else (Size(64, 4, 256), Size(64, 8, 256))
        epochs, batch = (32, 256) if full else (1, 64)
        epoch = sum(size.examples for size in trained) // batch
        return {
            "trained on": [asdict(size) for size in trained],
            "tested on": [asdict(size) for size in tested],
            "epochs": epochs,
            "steps": epochs * epoch,
            "batch": batch,
            "warmup": 0,
            "floor": 0.0,
            "weight_decay": 0.1,
            "betas": [0.9, 0.999],
            "clip": None,
            "precision": "fp32",
            "embedding dropout": DROPOUT,
            "evaluate_every": epoch if full else 64,
            "evaluate_rows": 64 * len(tested),
            "read_every": 50 if full else 10,
            "checkpoint_every": 2000,
            "accuracy": "of a test the share of its answers that are right, over the whole "
            "vocabulary; then the mean over the tests, at the best learning rate",
            "state bytes": "all that a layer keeps of one sequence, in fp32: windows of "
            "convolutions, the first layer, what SKA derives from its sums; a cache after the "
            "longest test",
            "differs from what is published": "the first layer is a Mamba-2 layer with a state of "
            "one for a gated convolution; RMS norms; attention has rotary positions; the cosine "
            "falls every step, not every epoch; norms, biases and spectral parameters do not decay",
        }

    def cells(self, scale: Scale) -> list[Settings]:
        """Every size at one learning rate before the next."""
        if scale == "smoke":
            return [{"model": m, "size": size, "lr": RATES[0]} for m, size in SMOKE.items()]
        sizes = [(model, size) for model, sizes in MODELS.items() for size in sizes]
        return [{"model": m, "size": size, "lr": lr} for lr in RATES for m, size in sizes]

    def run(
        self, protocol: Mapping[str, Any], settings: Settings, seed: int, bench: Workbench
    ) -> dict[str, Any]:
        config = MODELS[settings["model"]][settings["size"]]
        source = mixed([Size(**size) for size in protocol["trained on"]])
        sizes = [Size(**size) for size in protocol["tested on"]]
        tests = [Zoology(size.pairs, size.length) for size in sizes]
        how = {"test": Mixture(tuple(tests)), "lr": settings["lr"]}
        try:
            fitted = fit(config, source, protocol, seed, bench, **how)
        except Diverged as error:
            return {"diverged": str(error)}
        readings = [
            reading
            for size, test in zip(sizes, tests, strict=True)
            for reading in read_over(
                fitted,
                [({"tokens": size.length, "pairs": size.pairs}, test)],
                rows=size.examples,
                seed=seed,
            )
        ]
        return {"diverged": "", **fitted.numbers(), "readings": readings}

    def tables(self, done: Sequence[Finished]) -> list[Table]:
        measured = [table_of_accuracy(done), table_of_rates(done)]
        return [*measured, table_of_published()] if on_the_protocol(done) else measured

    def remarks(self, done: Sequence[Finished]) -> list[str]:
        points = list(best_of(done))
        if not on_the_protocol(done):
            return [
                "Nothing is published of these tests. So few steps show who begins to recall, not "
                "who holds how much."
            ]
        within = [point for point in points if point.bytes <= BUDGET]
        return [
            *(
                f"The best with at most {BUDGET:,} bytes is {best.model} ({best.size}): "
                f"{best.accuracy:.3f} in {best.bytes:,} bytes."
                for best in sorted(within, key=lambda point: -point.accuracy)[:1]
            ),
            *(
                beside_published([point for point in points if point.model == model])
                for model in PUBLISHED
                if any(point.model == model for point in points)
            ),
        ]

    def draw(self, done: Sequence[Finished], path: Path) -> None:
        with figure(path, size=(6.4, 3.8)) as axes:
            draw_curves(list(best_of(done)), axes[0, 0], published=on_the_protocol(done))


@dataclass(frozen=True)
class Point:
    """A model of one size at its best learning rate."""

    model: str
    size: str
    cells: Sequence[Finished]

    @property
    def accuracy(self) -> float:
        return mean(found_at()(cell.numbers) for cell in self.cells)

    @property
    def bytes(self) -> int:
        """After the longest test."""
        return max(point["state bytes"] for point in self.cells[0].numbers["readings"])

    @property
    def lr(self) -> float:
        return float(self.cells[0].settings["lr"])


def best_of(done: Sequence[Finished]) -> Iterator[Point]:
    """A point for each size, in the order of its bytes; none where every run diverged."""
    for model in [model for model in MODELS if select(done, model=model)]:
        points = []
        for size in distinct(select(done, model=model), "size"):
            cells = select(done, model=model, size=size)
            by_rate = [select(cells, lr=lr) for lr in distinct(cells, "lr")]
            tried = [Point(model, size, same) for same in by_rate if not any(map(diverged, same))]
            if tried:
                points.append(max(tried, key=lambda point: point.accuracy))
        yield from sorted(points, key=lambda point: point.bytes)


def diverged(cell: Finished) -> bool:
    return bool(cell.numbers["diverged"])


def on_the_protocol(done: Sequence[Finished]) -> bool:
    """Whether what was read is what the published numbers are of."""
    theirs = [(size.length, size.pairs) for size in PROTOCOL_2_TEST]
    return all(tests_of(cell) == theirs for cell in done if not diverged(cell))


def tests_of(cell: Finished) -> list[tuple[int, int]]:
    """Tokens and pairs of each test."""
    return [(reading["tokens"], reading["pairs"]) for reading in cell.numbers["readings"]]


def table_of_accuracy(done: Sequence[Finished]) -> Table:
    points = list(best_of(done))
    tests = tests_of(points[0].cells[0]) if points else []
    rows = [
        [
            point.model,
            point.size,
            f"{point.cells[0].numbers['parameters']:,}",
            f"{point.bytes:,}",
            f"{point.lr:g}",
            over_seeds(point.cells, found_at(), percent),
            *(
                over_seeds(point.cells, found_at(tokens=tokens, pairs=pairs), percent)
                for tokens, pairs in tests
            ),
        ]
        for point in points
    ]
    named = [f"{pairs} in {tokens:,}" for tokens, pairs in tests]
    header = ["model", "size", "parameters", "state bytes", "lr", "mean", *named]
    return Table("Accuracy in percent, at the best learning rate: pairs in tokens", header, rows)


def table_of_rates(done: Sequence[Finished]) -> Table:
    """What every learning rate came to."""
    rates = sorted(distinct(done, "lr"))
    rows = [
        [model, size, *(of_rate(select(done, model=model, size=size, lr=lr)) for lr in rates)]
        for model in MODELS
        for size in MODELS[model]
        if select(done, model=model, size=size)
    ]
    header = ["model", "size", *(f"lr {lr:g}" for lr in rates)]
    return Table("Mean accuracy in percent, by learning rate", header, rows)


def of_rate(cells: Sequence[Finished]) -> str:
    whole = [cell for cell in cells if not diverged(cell)]
    lost = len(cells) - len(whole)
    if lost and not whole:
        return "diverged"
    return over_seeds(whole, found_at(), percent) + (f" ({lost} diverged)" if lost else "")


def table_of_published() -> Table:
    rows = [
        [model, f"{size:,}", percent(accuracy)]
        for model, curve in PUBLISHED.items()
        for size, accuracy in curve.items()
    ]
    title = "As published, read off a plot: mean accuracy in percent, to 1; attention about 100"
    return Table(title, ["model", "state bytes", "mean"], rows)


def beside_published(points: Sequence[Point]) -> str:
    """The sizes of one model beside what is published of it."""
    model = points[0].model
    ours = ", ".join(f"{point.accuracy:.3f} in {point.bytes:,} bytes" for point in points)
    theirs = ", ".join(f"{said:g} in {size:,}" for size, said in PUBLISHED[model].items())
    return f"{model}: {ours}; published, to 0.01: {theirs}."


def draw_curves(points: Sequence[Point], ax: Any, *, published: bool) -> None:
    """Measured in full colour; published faint, in the colour of ours where we have the model."""
    models = list(dict.fromkeys(point.model for point in points))
    looks = {model: line(i, model) for i, model in enumerate(models)}
    for model, look in looks.items():
        mine = [point for point in points if point.model == model]
        seeds = min(len(point.cells) for point in mine)
        curves = [
            [found_at()(point.cells[seed].numbers) for point in mine] for seed in range(seeds)
        ]
        band(ax, [point.bytes for point in mine], curves, **look)
    for i, (model, said) in enumerate(PUBLISHED.items() if published else ()):
        unlike = {"color": "#777777", "marker": MARKERS[i], "linestyle": "-"}
        faint = looks.get(model, unlike) | {"label": f"{model}, published", "alpha": 0.4}
        ax.plot(list(said), list(said.values()), **faint)
    ax.axvline(BUDGET, color="#999999", linewidth=0.8)
    ax.set(
        xscale="log",
        xlabel="bytes of state of one sequence, fp32 (bar: 64 KiB)",
        ylabel="mean accuracy",
        ylim=(-0.02, 1.02),
    )
    ax.figure.legend(fontsize=7, loc="outside right upper")
