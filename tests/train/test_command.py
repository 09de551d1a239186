"""`echo-lm train` from text on disk to a checkpoint."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from shutil import copytree

import pytest
from rich.console import Console
from tests.data.texts import prepared, some_texts

from echo_lm import EchoLM, speak
from echo_lm.model.generate import GenerationOptions
from echo_lm.train.command import list_recipes, run
from echo_lm.train.history import METRICS_FILE

from .runs import told

SMALLER = (
    "model.dim=32",
    "model.heads=2",
    "model.mixers=['mamba2', 'ska']",
    "model.ska.rank=8",
    "model.mamba2={head_dim = 16, state_dim = 8}",
    "text.length=16",
    "train.batch=4",
    "train.warmup=2",
    "train.evaluate_rows=4",
    "train.read_every=2",
)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("text")
    return prepared(folder, tokenizer, some_texts(200), held_out_share=0.2)


def changes(tokens: Path, folder: Path, steps: int = 6) -> list[str]:
    return [
        *SMALLER,
        f"text.folder={tokens}",
        f"run.folder={folder}",
        f"train.steps={steps}",
        "train.evaluate_every=3",
        "train.checkpoint_every=3",
    ]


def test_text_in_checkpoint_out(tokens: Path, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    history = run("laptop", changes(tokens, tmp_path / "run"), console)
    said = console.file.getvalue()
    assert "6 steps of 4 rows of 16: 384 tokens" in said
    assert "of the matrix rate" in said

    checkpoint = tmp_path / "run" / "step-00000006"
    assert (checkpoint / "tokenizer.json").read_bytes() == (tokens / "tokenizer.json").read_bytes()
    assert EchoLM.from_pretrained(checkpoint).config.vocab_size == 300
    lines = (tmp_path / "run" / METRICS_FILE).read_text().splitlines()
    assert [json.loads(line) for line in lines] == history.records
    samples = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in samples] == [3, 6]
    assert all(json.loads(line)["text"].startswith("The river ") for line in samples)

    again = run("laptop", changes(tokens, tmp_path / "run"), console)
    assert told(again) == told(history)


def test_what_text_lacks_is_said_before_training(
    tokens: Path, tokenizer: Path, tmp_path: Path
) -> None:
    train_only = prepared(tmp_path / "text", tokenizer, some_texts(20))
    with pytest.raises(ValueError, match="holds no text to test: prepare some with --held-out"):
        run("laptop", changes(train_only, tmp_path / "run"), Console(file=io.StringIO()))
    other = tmp_path / "other"
    copytree(tokens, other)
    (other / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="was made with another tokenizer than"):
        run("laptop", changes(other, tmp_path / "run"), Console(file=io.StringIO()))
    assert not (tmp_path / "run").exists()


def test_samples_are_written_as_generate_writes(tokens: Path, tmp_path: Path) -> None:
    """Behind the separator, and without dropout."""
    prompts = ["The river ", ""]
    settings = [f"run.samples={json.dumps(prompts)}", "model.embedding_dropout=0.5"]
    quiet = Console(file=io.StringIO())
    run("laptop", [*changes(tokens, tmp_path / "run"), *settings], quiet)
    lines = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    kept = {line["prompt"]: line["text"] for line in map(json.loads, lines)}
    for prompt in prompts:
        how = GenerationOptions(max_new_tokens=48)
        out = io.StringIO()
        speak.run(
            tmp_path / "run" / "step-00000006",
            prompt,
            tokenizer=None,
            separator="<|endoftext|>",
            state=None,
            seed=0,
            device="cpu",
            temperature=0.0,
            options=how,
            out=out,
        )
        # Bytes that make no character yet are shown by one and not by the other.
        assert kept[prompt].rstrip("\ufffd") == out.getvalue().rstrip("\n").rstrip("\ufffd")


@pytest.mark.parametrize("change", ["train.accumulate=2", "train.recompute=true"])
def test_what_saves_memory_changes_no_more_than_rounding(
    change: str, tokens: Path, tmp_path: Path
) -> None:
    quiet = Console(file=io.StringIO())
    plain = run("laptop", changes(tokens, tmp_path / "plain"), quiet)
    spared = run("laptop", [*changes(tokens, tmp_path / "spared"), change], quiet)
    for (_, a), (_, b) in zip(plain.curve("loss"), spared.curve("loss"), strict=True):
        assert a == pytest.approx(b, rel=1e-4)


def test_a_task_instead_of_text(tmp_path: Path) -> None:
    recipe = tmp_path / "task.toml"
    recipe.write_text(
        "[model]\npreset = 'synthetic-ska'\n[task]\nname = 'mqar'\npairs = 2\ngap = 4\n"
        f"[train]\nsteps = 2\nbatch = 2\nwarmup = 1\nevaluate_rows = 4\n"
        f"[run]\nfolder = '{tmp_path / 'run'}'\n"
    )
    small = [change for change in SMALLER if change.startswith("model.")]
    history = run(str(recipe), small, Console(file=io.StringIO()))
    assert history.steps == 2
    recipe.write_text(recipe.read_text().replace("name = 'mqar'", ""))
    with pytest.raises(ValueError, match="task needs a name"):
        run(str(recipe), small, Console(file=io.StringIO()))


def test_recipes_are_listed() -> None:
    console = Console(file=io.StringIO(), width=200)
    list_recipes(console)
    for part in ("echo-50m", "15,259 steps", "echo-180m", "50,000 steps", "laptop"):
        assert part in console.file.getvalue()


def torchrun(*words: str) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", "echo_lm.cli", "train", *words),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_ctrl_c_stops_two_processes_with_a_checkpoint(tokens: Path, tmp_path: Path) -> None:
    words = [*changes(tokens, tmp_path / "run", steps=100_000), "run.strategy=zero1"]
    started = torchrun("laptop", *words)
    metrics = tmp_path / "run" / METRICS_FILE
    deadline = time.monotonic() + 120
    while not metrics.exists():
        assert started.poll() is None, started.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    started.send_signal(signal.SIGINT)
    said, _ = started.communicate(timeout=120)
    kept = list((tmp_path / "run").glob("step-*"))
    assert len(kept) == 1, said
    step = int(kept[0].name.removeprefix("step-"))
    assert f"Stopped after step {step:,}, which is kept in" in said
