"""Language models side by side: the whole chain on a tiny text, and what is refused on the way."""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.data.texts import prepared, some_texts, write_lines

from echo_lm.data import TextSource, TokenShards
from echo_lm.data.tokenise import load_tokenizer
from echo_lm.evaluate.prose import Prose
from echo_lm.evaluate.text import text_loss
from echo_lm.experiments import language, lm, lm_evals, lm_needle, lm_sweep
from echo_lm.experiments.base import Finished
from echo_lm.experiments.command import prepared as open_experiment
from echo_lm.experiments.runner import reproduce
from echo_lm.model import EchoLM
from echo_lm.train import loop

MODELS = ("Echo (ours, tied start)", "Echo (paper)", "Transformer")
TASKS = ("piqa", "wikitext")
LENGTH, STEPS, ROWS = 24, 4, 2
READS = {"lm/sweep": "text", "lm": "text", "lm/evals": "evals", "lm/needle": "haystack"}
STAGES = tuple(READS)


@contextmanager
def brief() -> Iterator[None]:
    """Fewer models, steps, sets and depths; all else is as it is."""
    with pytest.MonkeyPatch.context() as patch:
        for name in set(language.MODELS) - set(MODELS):
            patch.delitem(language.MODELS, name)
        for task in set(lm_evals.METRICS) - set(TASKS):
            patch.delitem(lm_evals.METRICS, task)
        shape = {"heads": 1, "depth": 4}
        patch.setitem(language.SHAPES, "smoke", {"sweep": shape, "full": shape})
        schedule, protocol = language.OnText.schedule, lm_needle.NeedlesInProse.protocol
        short = {
            "length": LENGTH,
            "batch": ROWS,
            "steps": STEPS,
            "tokens": LENGTH * ROWS * STEPS,
            "warmup": 1,
            "evaluate_every": 2,
            "evaluate_rows": 2,
            "read_every": 1,
        }
        few = {
            "steps": 2,
            "batch": 2,
            "warmup": 1,
            "evaluate_every": 1,
            "evaluate_rows": 2,
            "trained on lengths": [400, 420],
            "read at lengths": [400, 500],
            "depths": 2,
            "rows": 2,
        }
        patch.setattr(language.OnText, "schedule", lambda *given: schedule(*given) | short)
        patch.setattr(
            lm_needle.NeedlesInProse, "protocol", lambda self, scale: protocol(self, scale) | few
        )
        yield


@dataclass
class Chain:
    """What the user brings, what has come out, and what each model has read."""

    folder: Path
    material: dict[str, Path]
    read: list[list[bytes]] = field(default_factory=list)

    @property
    def results(self) -> Path:
        return self.folder / "results"

    def run(self, stage: str, results: Path | None = None, **changes: Any) -> Path:
        results = results or self.results
        option = READS[stage]
        given = {name: path if name == option else None for name, path in self.material.items()}
        how: dict[str, Any] = {"scale": "smoke", "seeds": 1, "device": "cpu"} | changes
        with brief():
            experiment = open_experiment(stage, given, results)
            return reproduce(experiment, out=results, console=Console(quiet=True), **how)

    def records(self, stage: str) -> dict[str, dict[str, Any]]:
        cells = sorted((self.results / stage / "smoke" / "cells").iterdir())
        # NaN is no JSON.
        told = [json.loads(cell.read_text(), parse_constant=pytest.fail) for cell in cells]
        return {",".join(map(str, record["settings"].values())): record for record in told}

    def report(self, stage: str) -> str:
        folder = self.results / stage / "smoke"
        assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
        return (folder / "README.md").read_text()


@pytest.fixture(scope="module")
def chain(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """All four, one after the other."""
    folder = tmp_path_factory.mktemp("lm")
    held_out = [
        write_lines(folder / f"{source}.jsonl", some_texts(12, seed), source=source)
        for seed, source in enumerate(("news", "books"), start=1)
    ]
    sets = folder / "sets"
    sets.mkdir()
    piqa = [{"goal": "Cut", "sol1": "A knife.", "sol2": "A sea.", "label": 0}]
    write_rows(sets / "piqa.jsonl", piqa)
    write_rows(sets / "wikitext_raw.jsonl", [{"page": " = One = \n\n Words of one . \n"}])
    draw = random.Random(0)
    words = ["river", "stone", "winter", "letter", "garden", "window"]
    sentences = [" ".join(draw.choices(words, k=6)).capitalize() + "." for _ in range(120)]
    (folder / "book.txt").write_text(" ".join(sentences))
    text = prepared(folder / "text", tokenizer, some_texts(60), held_out=held_out)
    chain = Chain(folder, {"text": text, "evals": sets, "haystack": folder / "book.txt"})
    with pytest.MonkeyPatch.context() as patch:
        watch(patch, chain.read)
        for stage in STAGES[:2]:
            chain.run(stage)
    for stage in STAGES[2:]:
        chain.run(stage)
    return chain


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def watch(patch: pytest.MonkeyPatch, read: list[list[bytes]]) -> None:
    """Note what every run has read."""
    batch = TextSource.batch

    def noted(self: TextSource, rows: int, **how: Any) -> Any:
        some = batch(self, rows, **how)
        if how.get("split", "train") == "train":
            if how["step"] == 0:
                read.append([])
            read[-1].append(some.tokens.numpy().tobytes())
        return some

    patch.setattr(TextSource, "batch", noted)


def test_every_model_reads_the_same_tokens_in_the_same_order(chain: Chain) -> None:
    cells = len(MODELS) * (len(lm_sweep.RATES["smoke"]) + 1)
    assert [len(steps) for steps in chain.read] == [STEPS] * cells
    assert len({tuple(steps) for steps in chain.read}) == 1
    assert len(set(chain.read[0])) == STEPS
    assert "All models of a seed have read the same windows in the same order." in chain.report(
        "lm"
    )


def test_the_best_rate_is_carried_to_the_full_width(chain: Chain) -> None:
    swept = chain.records("lm/sweep")
    (carried,) = {str(r["protocol"]["learning rates"]) for r in chain.records("lm").values()}
    best = {
        model: min(
            lm_sweep.RATES["smoke"], key=lambda lr: swept[f"{model},{lr}"]["numbers"]["loss"]
        )
        for model in MODELS
    }
    assert carried == str(best)  # The widths are the same here.
    for model, record in chain.records("lm").items():
        assert record["numbers"]["learning rate"] == best[model]
    assert "At the edge of what was tried" in chain.report("lm/sweep")


def test_what_is_compared_stands_in_the_report(chain: Chain) -> None:
    report = chain.report("lm")
    assert "have not run" not in report
    assert f"Held-out text after {LENGTH * ROWS * STEPS:,} tokens, which are " in report
    for part in ("By source", "| news |", "| books |", "By place", "| 16-23 |", "--text ..."):
        assert part in report
    for model in MODELS:
        assert f"| {model} |" in report
    assert "Echo (ours, tied start) against Transformer, the best without SKA: " in report
    assert "Echo (ours, tied start) against Echo (paper): " in report
    assert str(chain.folder) not in report
    for stage in STAGES:
        for path in (chain.results / stage / "smoke" / "cells").iterdir():
            assert str(chain.folder) not in path.read_text()


def test_the_weights_that_are_kept_are_those_that_were_measured(chain: Chain) -> None:
    for model, record in chain.records("lm").items():
        folder = language.weights_path(chain.results / "lm" / "smoke", {"model": model}, 0)
        loaded = EchoLM.from_pretrained(folder)
        shards = TokenShards(chain.material["text"])
        found = text_loss(loaded, TextSource(shards, LENGTH), first=128)
        assert found.loss == record["numbers"]["held out"]["loss"]
        assert {path.name for path in folder.iterdir()} == {
            "config.json",
            "model.safetensors",
            "tokenizer.json",
        }


def test_the_table_is_like_the_papers_and_says_what_budget_it_is(chain: Chain) -> None:
    report, tokens = chain.report("lm/evals"), LENGTH * ROWS * STEPS
    records = chain.records("lm/evals")
    assert len(records) == len(MODELS) * len(TASKS)
    for model in MODELS:
        score = records[f"{model},piqa"]["numbers"]["score"]
        assert f"| {100 * score:.1f} |" in next(
            line for line in report.splitlines() if line.startswith(f"| {model} |")
        )
        assert records[f"{model},wikitext"]["numbers"]["score"] > 1
    assert f"| 3,000,000,000 ({3_000_000_000 / tokens:,.0f}x) |" in report
    assert "As the paper has it, of another budget and another text" in report


def test_the_best_are_asked_for_needles(chain: Chain) -> None:
    done = [Finished(r["settings"], r["seed"], r["numbers"]) for r in chain.records("lm").values()]
    best = {cell.settings["model"]: cell.numbers["held out"]["loss"] for cell in done}
    echo = min(MODELS[:2], key=lambda model: best[model])
    records = chain.records("lm/needle")
    assert records["the best Echo"]["numbers"]["name"] == echo
    assert records["the best without SKA"]["numbers"]["name"] == "Transformer"
    for record in records.values():
        assert len(record["numbers"]["map"]) == 4
        assert (
            record["numbers"]["weights"]
            == (chain.records("lm")[record["numbers"]["name"]]["numbers"]["weights"])
        )
    assert f"{echo}, the best Echo: finds 90% of the numbers at no length" in chain.report(
        "lm/needle"
    )


def test_needles_are_learned_in_one_half_and_asked_for_in_the_other(
    chain: Chain, tokenizer: Path
) -> None:
    learned, asked = lm_needle.NeedlesInProse(chain.material["haystack"]).halves
    assert learned + asked == chain.material["haystack"].read_text()
    assert abs(len(learned) - len(asked)) < 20
    source = lm_needle.Needles(Prose(learned, load_tokenizer(tokenizer)), (400, 420))
    batches = [source.batch(2, seed=0, step=step).tokens for step in range(3)]
    assert [batch.shape[1] for batch in batches] == [400, 420, 400]
    assert not torch.equal(batches[0], batches[2])


def test_an_interrupted_run_goes_on_elsewhere(
    chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped as `timeout -s INT` does, after step 2; then its folder travels."""
    here, there = tmp_path / "here", tmp_path / "there"
    shutil.copytree(chain.results / "lm" / "sweep", here / "lm" / "sweep")
    take_step, taken = loop.Run.take_step, []

    def interrupted(run: loop.Run) -> None:
        take_step(run)
        taken.append(run.step)
        if len(taken) == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(loop.Run, "take_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        chain.run("lm", here, share="1/3")
    (kept,) = (here / "lm" / "smoke" / "unfinished").iterdir()
    assert (kept / "step-00000002").is_dir()
    here.rename(there)
    folder = chain.run("lm", there, share="1/3")
    assert taken == [1, 2, 3, 4]
    assert not (folder / "unfinished").exists()
    (cell,) = (folder / "cells").iterdir()
    again, whole = json.loads(cell.read_text())["numbers"], chain.records("lm")[MODELS[0]]
    for numbers in (again, whole["numbers"]):
        numbers.pop("tokens per second")
    assert again == whole["numbers"]
    assert "**2 of 3 have not run yet.**" in (folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("lm", {}, "lm reads a folder of tokens, which echo-lm data prepare makes: name it with"),
        ("lm/needle", {}, "lm/needle reads a file of prose, .*: name it with --haystack"),
        ("lm/evals", {"text": "tokens"}, r"lm/evals reads .*: leave out --text"),
        ("zoology", {"text": "tokens"}, "zoology reads nothing of yours: leave out --text"),
    ],
)
def test_material_that_is_missing_or_not_read(
    name: str, given: dict[str, str], said: str, tmp_path: Path
) -> None:
    nothing: dict[str, Path | None] = dict.fromkeys(("text", "evals", "haystack"))
    with pytest.raises(ValueError, match=said):
        open_experiment(name, nothing | {k: Path(v) for k, v in given.items()}, tmp_path)


def test_what_has_to_run_first_is_named(chain: Chain, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lm goes on from lm/sweep, of which 6 of 6 cells have"):
        chain.run("lm", tmp_path)
    with pytest.raises(ValueError, match=r"There is no model in .*: run echo-lm reproduce lm "):
        chain.run("lm/evals", tmp_path)
    with pytest.raises(ValueError, match=r"lm/needle goes on from lm, of which 3 of 3 cells have"):
        chain.run("lm/needle", tmp_path)


def test_a_sweep_on_another_text_is_not_gone_on_from(
    chain: Chain, tokenizer: Path, tmp_path: Path
) -> None:
    other = prepared(tmp_path / "text", tokenizer, some_texts(50, 9), held_out_share=0.2)
    with pytest.raises(ValueError, match="was run with text="):
        Chain(chain.folder, {**chain.material, "text": other}).run("lm")


def test_weights_that_are_missing_or_others_are_named(chain: Chain, tmp_path: Path) -> None:
    results = tmp_path / "results"
    shutil.copytree(chain.results / "lm" / "smoke", results / "lm" / "smoke")
    weights = language.weights_path(results / "lm" / "smoke", {"model": MODELS[0]}, 0)
    file = weights / "model.safetensors"
    file.write_bytes(file.read_bytes()[::-1])
    with pytest.raises(ValueError, match="holds other weights than those"):
        chain.run("lm/evals", results)
    shutil.rmtree(weights)
    with pytest.raises(ValueError, match=r"does not hold the weights of .*: bring them from where"):
        chain.run("lm/evals", results)
    with pytest.raises(ValueError, match=r"There is no .*seed=1.json: .* for this seed too"):
        language.trained(MODELS[0], 1, "smoke", results)


def cell(model: str, seed: int = 0, loss: float = 1.0, order: str = "a") -> Finished:
    pairs = [{"name": "first", "tokens": 2, "loss": 5.0}, {"name": "again", "tokens": 2, "loss": 3}]
    held_out = {"loss": loss, "rare_pairs": pairs}
    return Finished({"model": model}, seed, {"diverged": "", "order": order, "held out": held_out})


def test_remarks_are_of_the_numbers() -> None:
    done = [
        *(cell("Echo (ours)", seed, 2.0 + seed) for seed in (0, 1)),
        cell("Echo (ours, tied start)", 0, 4.0),
        *(cell("Transformer", seed, 1.5 + 1.2 * seed) for seed in (0, 1)),
        cell("Mamba-2 + SwiGLU", 0, 4.0),
        cell("Echo (paper)", 0, 2.5),
        cell("Mamba-2 + SKA + SwiGLU", 0, 1.0),
        Finished({"model": "Mamba-2 + attention"}, 0, {"diverged": "Step 3"}),
    ]
    assert lm.LanguageModels().remarks(done) == [
        "All models of a seed have read the same windows in the same order.",
        "Echo (ours) against Transformer, the best without SKA: +0.4000 nats a token ± 0.1414 over "
        "2 seeds, worse.",
        "Echo (ours) against Echo (paper): -0.5000 nats a token in one seed, no worse.",
        "Echo (ours) against Mamba-2 + SKA + SwiGLU: +1.0000 nats a token in one seed, worse.",
        "The second token of a rare pair costs less again than first, by nats: Echo (ours) 2.000, "
        "Echo (ours, tied start) 2.000, Transformer 2.000, Mamba-2 + SwiGLU 2.000, Echo (paper) "
        "2.000, Mamba-2 + SKA + SwiGLU 2.000. What comes again is commoner too, so that only what "
        "models differ in tells of recall.",
        lm.SPEED,
        "Mamba-2 + attention: Step 3",
    ]
    apart = lm.same_order([cell("Transformer"), cell("Echo (ours)", order="b")])
    assert apart == "Not comparable: models of seed 0 have read different windows."


def test_a_rate_at_which_a_seed_diverged_is_not_chosen(tmp_path: Path) -> None:
    def at(lr: float, loss: float | None, seed: int = 0) -> Finished:
        told = {"diverged": "Step 1"} if loss is None else {"diverged": "", "loss": loss}
        return Finished({"model": "Transformer", "lr": lr}, seed, told)

    swept = [at(0.1, 1.0), at(0.1, None, 1), at(0.01, 2.0), at(0.01, 3.0, 1), at(0.001, 4.0)]
    assert lm_sweep.best_rate(swept) == 0.01
    assert lm_sweep.loss_at(swept[:2]) == "1.000 (1 diverged)"
    with pytest.raises(ValueError, match="Transformer diverged in lm/sweep at every learning rate"):
        lm.rate_of("Transformer", swept[1:2])
    lost = lm_sweep.Sweep()
    lost.draw(swept[1:2], tmp_path / "figure.png")
    assert list(lost.tables(swept[1:2])[0].rows[0]) == ["Transformer", "–", "diverged", "–"]
    assert lost.remarks(swept[1:2]) == ["At every rate a run diverged: Transformer."]
    assert lost.remarks(swept) == ["Every best rate lies between others that were tried."]


def test_a_reach_ends_at_the_first_length_that_is_not_read() -> None:
    def reading(*found: float) -> str:
        told = [
            {"length": 256 * 2**i, "depth": 0.0, "found": share, "state_bytes": 8}
            for i, share in enumerate(found)
        ]
        numbers = {"name": "Echo", "map": told, "trained on at most": 256}
        return lm_needle.reach([Finished({"model": "the best Echo"}, 0, numbers)])

    assert "finds 90% of the numbers in up to 512 tokens" in reading(1.0, 0.9, 0.1, 1.0)
    assert "finds 90% of the numbers at no length" in reading(0.2, 0.1, 0.95)


@pytest.mark.parametrize("kind", ["sweep", "full"])
def test_models_are_of_one_size(kind: str) -> None:
    sizes = {}
    for model, config in language.MODELS.items():
        made = language.shaped(config, **language.SHAPES["full"][kind])
        assert kind == "sweep" or made == config
        assert len(made.mixers) == len(config.mixers)
        assert (made.dim // made.heads, made.ska.rank) == (64, 56)
        with torch.device("meta"):
            sizes[model] = EchoLM(made).num_parameters()
    assert max(sizes.values()) < 1.02 * min(sizes.values())
