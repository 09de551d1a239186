"""`echo-lm`: the command line. Heavy imports wait until a command runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

app = tyro.extras.SubcommandApp()


@app.command
def info(
    preset: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[PRESET]")] = None,
) -> None:
    """Show this machine and who computes what on it, or what a preset is made of.

    Args:
        preset: A model by name, such as echo-180m; without one the names are listed.
    """
    from echo_lm.info import show_machine, show_preset

    if preset is None:
        show_machine()
    else:
        show_preset(preset)


@app.command
def demo(tokens: int = 100_000, seed: int = 0) -> None:
    """Read a long text in pieces: the memory keeps its size, and steps equal the parallel pass.

    Args:
        tokens: How much to read.
        seed: Of the weights and the text.
    """
    from echo_lm.demo import run

    if not run(tokens, seed):
        sys.exit(1)


@app.command
def tasks(
    words: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[NAME [SETTING=VALUE ...]]")
    ] = (),
    seed: int = 0,
    split: Literal["train", "test"] = "train",
) -> None:
    """List the recall tasks, or show an example of one with its facts and answers marked.

    Args:
        words: The task, and settings such as pairs=4; without a task they are listed.
        seed: Of the example.
        split: What it is for.
    """
    from echo_lm.tasks import parse_settings
    from echo_lm.tasks.show import show_example, show_tasks

    if words:
        show_example(words[0], parse_settings(words[1:]), seed=seed, split=split)
    else:
        show_tasks()


@app.command
def reproduce(
    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]")] = None,
    scale: Literal["smoke", "full"] = "smoke",
    seeds: int = 1,
    out: Path = Path("results"),
    device: str = "auto",
    share: str = "1/1",
) -> None:
    """Run an experiment of the paper, or one of ours: records, a table, a figure.

    Cells that have run are kept; the same call again runs what is missing.

    Args:
        name: The experiment; without one they are listed.
        scale: Whether all of it runs in minutes on a CPU, or as it is reported.
        seeds: How many seeds, from 0 on.
        out: The folder for OUT/NAME/SCALE.
        device: Where to run, such as cuda or cpu; a GPU if there is one.
        share: Only a part, such as 2/4 for the second of four processes.
    """
    from echo_lm.experiments.command import list_experiments, run

    if name is None:
        list_experiments()
    else:
        run(name, scale=scale, seeds=seeds, out=out, device=device, share=share)


@app.command
def analyze(
    checkpoint: Annotated[Path, tyro.conf.Positional],
    task: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME [SETTING=VALUE ...]")] = (),
    text: Path | None = None,
    tokenizer: Path | None = None,
    tokens: int = 1024,
    rows: int = 8,
    seed: int = 0,
    out: Path = Path("analysis"),
    device: str = "auto",
) -> None:
    """Look into the SKA layers of a model while it reads: spectra, conditioning, filters, keys.

    Tables are shown, figures and a JSON file written. Without a task or a text it reads random
    tokens.

    Args:
        checkpoint: The folder of a model, such as a step-* that training has left.
        task: Read test examples of a task, such as mqar pairs=8.
        text: Read the beginning of this file.
        tokenizer: The tokenizer.json of the model, for a text.
        tokens: How much of a text to read, or of random tokens.
        rows: How many examples, or sequences of random tokens.
        seed: Of the examples or random tokens.
        out: The folder for what is written.
        device: Where to read, such as cuda or cpu; a GPU if there is one.
    """
    from echo_lm.analysis.command import run

    run(
        checkpoint,
        task=task,
        text=text,
        tokenizer=tokenizer,
        tokens=tokens,
        rows=rows,
        seed=seed,
        out=out,
        device=device,
    )


def main() -> None:
    """Run a command; what is wrong with its arguments is said in one sentence."""
    try:
        app.cli(prog="echo-lm", description="Echo: recall with a memory of fixed size.")
    except ValueError as error:
        print(f"echo-lm: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
