"""Needles in prose: the best of the language models, after a little training on such questions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from echo_lm.data.manifest import file_hash
from echo_lm.data.tokenise import tokenizer_of
from echo_lm.evaluate.prose import Needle, Prose, evenly, read_map, read_prose, show_map, told
from echo_lm.experiments.base import (
    Finished,
    OnMaterial,
    Scale,
    Settings,
    Table,
    Workbench,
    distinct,
    over_seeds,
    percent,
    select,
)
from echo_lm.experiments.language import (
    ECHO,
    LANGUAGE_MODELS,
    MODELS,
    WITHOUT_SKA,
    as_finished,
    budget,
    kept,
    protocol_of_training,
    trained,
    whole,
)
from echo_lm.experiments.lm import best_of
from echo_lm.experiments.training import Fitted, train_config
from echo_lm.model.lm import EchoLM
from echo_lm.plots import figure
from echo_lm.tasks.base import Batch, Split
from echo_lm.train import Diverged, train

CHOSEN = {
    "the best Echo": ECHO,
    "the best without SKA": WITHOUT_SKA,
}
MOST = 0.9
"""The share of the numbers at which a length counts as read."""


@dataclass(frozen=True)
class Needles:
    """Needles in texts of several lengths, one length a step."""

    prose: Prose
    lengths: tuple[int, ...]

    def batch(
        self,
        rows: int,
        *,
        seed: int,
        step: int = 0,
        split: Split = "train",
        device: torch.device | str = "cpu",
    ) -> Batch:
        needle = Needle(self.prose, self.lengths[step % len(self.lengths)])
        return needle.batch(rows, seed=seed, step=step, split=split, device=device)

    def describe(self) -> dict[str, Any]:
        return {"lengths": list(self.lengths), "tokens": len(self.prose.tokens)}


class NeedlesInProse(OnMaterial):
    """Trained on numbers hidden in the first half of a text, asked for those in the second."""

    name = "lm/needle"
    title = "Needles in prose: language models that have learned to be asked"
    source = "ours; 4.1 has needles among symbols"
    reads = "haystack"

    def __init__(self, material: Path | None = None, results: Path = Path("results")) -> None:
        super().__init__(material, results)
        self._chosen: dict[Scale, dict[str, str]] = {}

    def protocol(self, scale: Scale) -> dict[str, Any]:
        full = scale == "full"
        steps = 600 if full else 60
        return {
            "scale": scale,
            "models": self.chosen(scale),
            "models are": protocol_of_training(scale, self.results),
            "haystack": file_hash(self.material)[:16],
            "steps": steps,
            "batch": 32 if full else 4,
            "warmup": steps // 10,
            "share of the learning rate": 0.3,
            "weight_decay": 0.1,
            "evaluate_every": max(1, steps // 10),
            "evaluate_rows": 64 if full else 16,
            "checkpoint_every": 100,
            "trained on lengths": [256, 512, 1024, 2048] if full else [192, 256],
            "read at lengths": [2**n for n in range(8, 17)] if full else [256, 512, 1024],
            "depths": 6 if full else 3,
            "rows": 8 if full else 4,
        }

    def chosen(self, scale: Scale) -> dict[str, str]:
        """Which models these are, by their loss on held-out text."""
        if scale not in self._chosen:
            cells = [{"model": model} for model in MODELS]
            records = kept(LANGUAGE_MODELS, cells, scale, self.results, by=self.name)
            done = whole(as_finished(records))
            best = {name: best_of(done, models) for name, models in CHOSEN.items()}
            self._chosen[scale] = {name: model for name, model in best.items() if model}
        return self._chosen[scale]

    def cells(self, scale: Scale) -> list[Settings]:
        return [{"model": name} for name in CHOSEN]

    @cached_property
    def halves(self) -> tuple[str, str]:
        """Of the text."""
        text = read_prose([self.material])
        cut = text.find(" ", len(text) // 2)
        return text[:cut], text[cut:]

    def run(
        self, protocol: Mapping[str, Any], settings: Settings, seed: int, bench: Workbench
    ) -> dict[str, Any]:
        name = protocol["models"].get(settings["model"])
        if name is None:
            raise ValueError(f"All of {', '.join(CHOSEN[settings['model']])} diverged.")
        of_model, weights = trained(name, seed, protocol["scale"], self.results)
        model = EchoLM.from_pretrained(weights, device=bench.device)
        coder = tokenizer_of(weights, None, model.config.vocab_size)
        learned, asked = (Prose(half, coder) for half in self.halves)
        lengths = protocol["read at lengths"]
        source = Needles(learned, tuple(protocol["trained on lengths"]))
        # Whether they fit is said before the training.
        for prose, length in ((learned, min(source.lengths)), (asked, max(lengths))):
            Needle(prose, length).batch(8, seed=seed)
        how = train_config(
            protocol, seed, lr=of_model["learning rate"] * protocol["share of the learning rate"]
        )
        try:
            history = train(
                model,
                source,
                how,
                device=bench.device,
                folder=bench.folder,
                test=Needles(asked, (max(source.lengths),)),
                console=bench.console,
            )
        except Diverged as error:
            return {"diverged": str(error)}
        depths = evenly(protocol["depths"])
        found = read_map(model, asked, lengths, depths, rows=protocol["rows"], seed=seed)
        fitted = Fitted(model, history, how.facts_only)
        return {
            "diverged": "",
            **fitted.numbers(),
            "name": name,
            **of_model,
            "trained on at most": max(source.lengths),
            "map": told(found),
        }

    def tables(self, done: Sequence[Finished]) -> list[Table]:
        good = whole(done)
        if not good:
            return []
        lengths = lengths_of(good[0])
        rows = [
            [
                title_of(cells),
                f"{cells[0].numbers['parameters']:,}",
                f"{cells[0].numbers['learning rate']:g}",
                *(over_seeds(cells, found_at(length), percent) for length in lengths),
            ]
            for model in distinct(good, "model")
            if (cells := select(good, model=model))
        ]
        told = good[0].numbers
        title = (
            f"Numbers found at any depth, in percent, by tokens of text: after {budget(good)}, "
            f"{told['steps']:,} steps of needles in at most {told['trained on at most']:,}"
        )
        return [
            Table(title, ["model", "parameters", "lr before", *(f"{n:,}" for n in lengths)], rows)
        ]

    def remarks(self, done: Sequence[Finished]) -> list[str]:
        lost = [cell.numbers["diverged"] for cell in done if cell.numbers["diverged"]]
        return [
            *(reach(select(whole(done), model=m)) for m in distinct(whole(done), "model")),
            *lost,
        ]

    def draw(self, done: Sequence[Finished], path: Path) -> None:
        models = distinct(whole(done), "model")
        with figure(path, columns=max(1, len(models)), size=(4.6, 2.8)) as axes:
            for ax, model in zip(axes[0], models, strict=False):
                cells = select(whole(done), model=model)
                lengths = lengths_of(cells[0])
                depths = sorted({point["depth"] for point in cells[0].numbers["map"]})
                found = [[share(cells, length, depth) for length in lengths] for depth in depths]
                show_map(ax, found, lengths, depths)
                ax.set_title(title_of(cells))
                ax.tick_params(axis="x", rotation=45)


def title_of(cells: Sequence[Finished]) -> str:
    return f"{cells[0].numbers['name']}, {cells[0].settings['model']}"


def lengths_of(cell: Finished) -> list[int]:
    return sorted({point["length"] for point in cell.numbers["map"]})


def found_at(length: int) -> Callable[[Mapping[str, Any]], float]:
    """The share of the numbers found in so many tokens, at any depth."""
    return lambda numbers: mean(p["found"] for p in numbers["map"] if p["length"] == length)


def share(cells: Sequence[Finished], length: int, depth: float) -> float:
    """Over the seeds."""
    return mean(
        point["found"]
        for cell in cells
        for point in cell.numbers["map"]
        if (point["length"], point["depth"]) == (length, depth)
    )


def reach(cells: Sequence[Finished]) -> str:
    """How far a model finds most numbers, beside how far it was trained."""
    far = list(
        takewhile(
            lambda length: mean(found_at(length)(cell.numbers) for cell in cells) >= MOST,
            lengths_of(cells[0]),
        )
    )
    told = f"in up to {max(far):,} tokens" if far else "at no length"
    sizes = sorted({point["state_bytes"] for point in cells[0].numbers["map"]})
    held = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    return (
        f"{title_of(cells)}: finds {MOST:.0%} of the numbers {told}; it was trained on at most "
        f"{cells[0].numbers['trained on at most']:,}. It remembers a text in {held} bytes."
    )
