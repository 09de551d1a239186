"""`echo-lm`: the command line. Heavy imports wait until a command runs."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    from echo_lm.data.inputs import Dataset

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
def demo(seed: int = 0, out: Path = Path()) -> None:
    """Train an SSM, one with attention and one with SKA to recall, then read them longer texts.

    It takes a minute or two on two cores, and ends with a table and a plot.

    Args:
        seed: Of the weights and the texts.
        out: The folder for the plot, echo-demo.png.
    """
    from echo_lm.demo import run

    run(seed, out)


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
def train(
    words: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="[RECIPE [SECTION.NAME=VALUE ...]]"),
    ] = (),
) -> None:
    """Train a model as a TOML recipe says, or go on where it stopped.

    A run is kept in its folder: checkpoints, metrics.jsonl, samples. Several processes share it
    under torchrun:

        echo-lm train laptop text.folder=tokens train.steps=2000
        torchrun --nproc-per-node 8 -m echo_lm.cli train echo-50m run.strategy=zero1

    Args:
        words: A recipe's file, or its name if it is one of Echo's, and changes to it; without a
            recipe they are listed.
    """
    from echo_lm.train.command import list_recipes, run

    if words:
        run(words[0], words[1:])
    else:
        list_recipes()


@app.command(name="held-out")
def held_out(
    checkpoint: Annotated[Path, tyro.conf.Positional],
    tokens: Annotated[Path, tyro.conf.Positional],
    length: int = 2048,
    windows: Literal["running", "packed", "apart"] = "running",
    first: int | None = None,
    out: Path | None = None,
    device: str = "auto",
) -> None:
    """What held-out text costs a model: by source, by place, and where rare tokens come again.

    Args:
        checkpoint: The folder of a model, such as a step-* that training has left, or echo-tiny.
        tokens: A folder that echo-lm data prepare made.
        length: Tokens of a window.
        windows: Running through all the text; the same with each document's memory apart
            (packed); or a padded window for each document (apart).
        first: Read only so many windows.
        out: A JSON file for the record.
        device: Where to read, such as cuda or cpu; a GPU if there is one.
    """
    from echo_lm.evaluate.command import run

    run(
        checkpoint,
        tokens,
        length=length,
        windows=windows,
        first=first,
        out=out,
        device=device,
    )


@app.command
def reproduce(
    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]")] = None,
    scale: Literal["smoke", "full"] = "smoke",
    seeds: int = 1,
    out: Path = Path("results"),
    device: str = "auto",
    share: str = "1/1",
    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SETTING=VALUE ...")] = (),
    text: Path | None = None,
    evals: Path | None = None,
    haystack: Path | None = None,
    list: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """Run an experiment of the paper, or one of ours: records, a table, a figure.

    Cells that have run are kept; the same call again runs what is missing, and goes on with a cell
    that was stopped, whose checkpoints lie in OUT/NAME/SCALE/unfinished.

    Args:
        name: The experiment; without one they are listed.
        scale: Whether all of it runs in minutes on a CPU, or as it is reported.
        seeds: How many seeds, from 0 on.
        out: The folder for OUT/NAME/SCALE.
        device: Where to run, such as cuda or cpu; a GPU if there is one.
        share: Only a part, such as 2/4 for the second of four processes.
        only: Only cells with these settings, such as gap=64 gap=256 model=SSM.
        text: For lm/sweep and lm, a folder that echo-lm data prepare made.
        evals: For lm/evals, a folder of evaluation sets, as of echo-lm eval --data.
        haystack: For lm/needle, a file of prose, as of echo-lm needle --text.
        list: Only list the experiments.
    """
    from echo_lm.experiments.command import list_experiments, run

    if name is None or list:
        list_experiments()
    else:
        material = {"text": text, "evals": evals, "haystack": haystack}
        run(
            name,
            scale=scale,
            seeds=seeds,
            out=out,
            device=device,
            share=share,
            only=only,
            material=material,
        )


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
        checkpoint: The folder of a model, such as a step-* that training has left, or echo-tiny.
        task: Read test examples of a task, such as mqar pairs=8.
        text: Read the beginning of this file, also with .xz or .gz.
        tokenizer: The tokenizer.json of the model, for a text; it may also lie beside it.
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


@app.command
def generate(
    words: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[CHECKPOINT] PROMPT")
    ] = (),
    tokenizer: Path | None = None,
    state: Path | None = None,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float = 0.95,
    repetition_penalty: float = 1.0,
    separator: str = "<|endoftext|>",
    seed: int = 0,
    device: str = "auto",
) -> None:
    """Go on with a text, token by token; with --state a later call goes on from its memory.

        echo-lm generate "The river"
        echo-lm generate runs/laptop/step-00001000 "The river" --state memory.safetensors

    Args:
        words: The folder of a model, or its name if it comes with the package (echo-tiny if none
            is given), and how the text begins, or "-" for what comes in.
        tokenizer: The tokenizer.json of the model; it may also lie beside it.
        state: A file that keeps what was read and written, and is read first if it is there.
        max_new_tokens: How much to write at most.
        temperature: How far to stray from the likeliest; 0 takes it every time.
        top_k: Choose among so many tokens.
        top_p: Choose among the likeliest that together are so probable.
        repetition_penalty: Above 1, tokens of the prompt and those written become less likely.
        separator: The token that stands before every text; if the model writes it, it has ended.
        seed: Of the choices.
        device: Where to run, such as cuda or cpu; a GPU if there is one.
    """
    from echo_lm.speak import run, split_words

    checkpoint, prompt = split_words(words)
    run(
        checkpoint,
        sys.stdin.read() if prompt == "-" else prompt,
        tokenizer=tokenizer,
        separator=separator,
        state=state,
        seed=seed,
        device=device,
        temperature=temperature,
        options={
            "max_new_tokens": max_new_tokens,
            "top_k": top_k,
            "top_p": top_p,
            "repetition_penalty": repetition_penalty,
        },
    )


@app.command
def export(
    checkpoint: Annotated[Path, tyro.conf.Positional],
    out: Annotated[Path, tyro.conf.Positional],
    dtype: Literal["same", "float32", "bfloat16", "float16"] = "same",
) -> None:
    """Write a checkpoint as a model to pass on: configuration, weights, tokenizer, nothing else.

    Args:
        checkpoint: The folder of a model, such as a step-* that training has left.
        out: A folder that is empty or new.
        dtype: Of the weights.
    """
    import torch

    from echo_lm.export import run

    run(checkpoint, out, dtype=None if dtype == "same" else getattr(torch, dtype))


@app.command(name="eval")
def evaluate(
    checkpoint: Annotated[Path, tyro.conf.Positional],
    tasks: tuple[str, ...],
    data: Path | None = None,
    tokenizer: Path | None = None,
    separator: str = "<|endoftext|>",
    shots: int | None = None,
    limit: int | None = None,
    lengths: tuple[str, ...] = (),
    max_length: int = 2048,
    batch: int = 8,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    device: str = "auto",
    out: Path | None = None,
) -> None:
    """Score a model with lm-evaluation-harness: a table, and a JSON file with --out.

    Any task of lm-eval by its name, such as hellaswag, piqa, arc_easy, arc_challenge, winogrande,
    lambada_openai, wikitext, niah_single_1 (RULER) or babilong_qa1. With --data the first seven are
    read from files whose names begin with theirs, such as piqa.jsonl or wikitext_raw.txt, also with
    .xz or .gz.

    Args:
        checkpoint: The folder of a model, or echo-tiny, which comes with the package.
        tasks: What to score it on.
        data: A folder of files; without it lm-eval fetches what it needs.
        tokenizer: The tokenizer.json of the model; it may also lie beside it.
        separator: The token that stands before a text.
        shots: Solved examples before each question; as the task says if not given.
        limit: Only so many questions of each task.
        lengths: For tasks that come in several, such as 4096 8192 (RULER) or 4k (BABILong).
        max_length: Longer texts are read in windows of so many tokens.
        batch: Questions at a time.
        dtype: Of the weights; that of the file if auto.
        device: Where to run, such as cuda or cpu; a GPU if there is one.
        out: A JSON file for the record.
    """
    from echo_lm.evaluate.harness import Conditions, run

    run(
        checkpoint,
        tasks,
        data=data,
        tokenizer=tokenizer,
        separator=separator,
        conditions=Conditions(shots, limit, lengths, max_length, batch, dtype),
        device=device,
        out=out,
    )


@app.command
def needle(
    checkpoint: Annotated[Path, tyro.conf.Positional],
    text: tuple[Path, ...],
    tokenizer: Path | None = None,
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768, 65536),
    depths: int = 11,
    rows: int = 8,
    seed: int = 0,
    device: str = "auto",
    out: Path = Path("needle"),
) -> None:
    """Hide a number in prose at every depth and length, and ask for it at the end.

    A table is shown, a heat map and a JSON file written.

    Args:
        checkpoint: The folder of a model, or echo-tiny, which comes with the package.
        text: Files of prose, also .jsonl with a text in each line, and with .xz or .gz.
        tokenizer: The tokenizer.json of the model; it may also lie beside it.
        lengths: How many tokens to read.
        depths: How many depths, from the beginning to the end.
        rows: How many numbers at each.
        seed: Of the numbers and of what surrounds them.
        device: Where to run, such as cuda or cpu; a GPU if there is one.
        out: The folder for what is written.
    """
    from echo_lm.evaluate.prose import run

    run(
        checkpoint,
        text,
        tokenizer=tokenizer,
        lengths=lengths,
        depths=depths,
        rows=rows,
        seed=seed,
        out=out,
        device=device,
    )


bench = tyro.extras.SubcommandApp()
app.command(bench, name="bench", help="Time Echo beside its competitors: ops, decode, train.")

Presets = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[PRESET ...]")]


@bench.command
def ops(
    names: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[OPERATOR ...]")
    ] = (),
    shapes: tuple[str, ...] = (),
    rounds: int | None = None,
    seed: int = 0,
    device: str = "auto",
    out: Path = Path("results/bench"),
) -> None:
    """Time SKA beside flash attention, flash-linear-attention and the paper's form.

    First every operator of ours is held to a slower form in fp64; nothing is timed while one is
    off. Tables are shown, a JSON file and a plot written; the same call again goes on where one
    stopped.

    Args:
        names: Some of the operators; flash attention is always among them.
        shapes: Rows and tokens of each, such as 16x2048.
        rounds: How often all take turns.
        seed: Of the inputs.
        device: Where to run, such as cuda or cpu; a GPU if there is one.
        out: The folder for what is written.
    """
    from echo_lm.bench.ops import run

    run(names, shapes=shapes, rounds=rounds, seed=seed, device=device, out=out)


@bench.command
def decode(
    presets: Presets = (),
    contexts: tuple[int, ...] = (),
    batches: tuple[int, ...] = (),
    rounds: int | None = None,
    seed: int = 0,
    device: str = "auto",
    out: Path = Path("results/bench"),
) -> None:
    """Time the next token, and weigh the memory, after texts of different lengths.

    Models that read have read so much; attention looks at a cache of that length. Tables are shown,
    a JSON file and a plot written; the same call again goes on where one stopped.

    Args:
        presets: The models, with random weights.
        contexts: How many tokens they have read.
        batches: Rows that go on at a time.
        rounds: How often all take turns.
        seed: Of weights and tokens.
        device: Where to run, such as cuda or cpu; a GPU if there is one.
        out: The folder for what is written.
    """
    from echo_lm.bench.decode import run

    run(
        presets,
        contexts=contexts,
        batches=batches,
        rounds=rounds,
        seed=seed,
        device=device,
        out=out,
    )


@bench.command(name="train")
def bench_train(
    presets: Presets = (),
    shapes: tuple[str, ...] = (),
    rounds: int | None = None,
    seed: int = 0,
    device: str = "auto",
    out: Path = Path("results/bench"),
) -> None:
    """Time a training step of models side by side, on a GPU compiled and not.

    Tables are shown, a JSON file and a plot written; the same call again goes on where one stopped.

    Args:
        presets: The models, which are compared with each other.
        shapes: Rows and tokens of a step, such as 16x2048.
        rounds: How often all take turns.
        seed: Of weights and tokens.
        device: Where to run, such as cuda or cpu; a GPU if there is one.
        out: The folder for what is written.
    """
    from echo_lm.bench.train import run

    run(presets, shapes=shapes, rounds=rounds, seed=seed, device=device, out=out)


data = tyro.extras.SubcommandApp()
app.command(data, name="data", help="Text into tokens to train on: prepare, train-tokenizer.")

Files = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[FILE ...]")]


@data.command
def prepare(
    files: Files = (),
    *,
    tokenizer: Path,
    out: Path,
    held_out: tuple[Path, ...] = (),
    held_out_share: float = 0.0,
    dataset: str | None = None,
    subset: str | None = None,
    dataset_split: str = "train",
    field: str = "text",
    source_field: str = "source",
    separator: str = "<|endoftext|>",
    shard_tokens: int = 1 << 24,
    max_tokens: int | None = None,
    processes: int | None = None,
) -> None:
    """Tokenise text into shards to train on; the same call again goes on where one stopped.

    Files, or folders of them, end in .jsonl (an object a line), .parquet or .txt (a document, or
    several between lines "<|endoftext|>"), also with .xz, .zst or .gz. Or a dataset is streamed:

        echo-lm data prepare --dataset HuggingFaceFW/fineweb-edu --subset sample-10BT
            --held-out-share 0.001 --tokenizer tokenizer.json --out fineweb-edu

    Args:
        files: Text to train on.
        tokenizer: A tokenizer.json.
        out: The folder to fill.
        held_out: Text for testing; it is left out of FILE.
        held_out_share: The share of the other documents that is for testing, such as 0.01.
        dataset: A dataset of the Hugging Face hub.
        subset: The configuration of the dataset.
        dataset_split: The split of the dataset.
        field: What the text of a document is called.
        source_field: What names where a document is from, if anything does.
        separator: The token that is put before every document.
        shard_tokens: How large a shard is.
        max_tokens: Stop at so many to train on.
        processes: How many work; as many as there are cores.
    """
    from echo_lm.data.command import run_prepare
    from echo_lm.data.inputs import Fields

    run_prepare(
        files,
        tokenizer=tokenizer,
        out=out,
        held_out=held_out,
        held_out_share=held_out_share,
        dataset=_dataset(dataset, subset, dataset_split),
        fields=Fields(field, source_field),
        separator=separator,
        shard_tokens=shard_tokens,
        max_tokens=max_tokens,
        processes=processes,
    )


@data.command
def train_tokenizer(
    files: Files = (),
    *,
    out: Path,
    vocab_size: int = 32_000,
    dataset: str | None = None,
    subset: str | None = None,
    dataset_split: str = "train",
    field: str = "text",
    max_bytes: int | None = None,
) -> None:
    """Learn a byte-level BPE tokenizer from text, which is read as `prepare` does.

    Args:
        files: Text to learn from.
        out: The tokenizer.json to write.
        vocab_size: How many tokens.
        dataset: A dataset of the Hugging Face hub.
        subset: The configuration of the dataset.
        dataset_split: The split of the dataset.
        field: What the text of a document is called.
        max_bytes: Read no more text than this.
    """
    from echo_lm.data.command import run_train_tokenizer
    from echo_lm.data.inputs import Fields

    run_train_tokenizer(
        files,
        out=out,
        vocab_size=vocab_size,
        dataset=_dataset(dataset, subset, dataset_split),
        fields=Fields(field),
        max_bytes=max_bytes,
    )


def _dataset(name: str | None, subset: str | None, split: str) -> Dataset | None:
    from echo_lm.data.inputs import Dataset

    if name is None and subset is not None:
        raise ValueError(f"subset {subset!r} is of a dataset: name that too.")
    return None if name is None else Dataset(name, subset, split)


def main() -> None:
    """Run a command; what is wrong with its arguments or files is said in one sentence."""
    try:
        app.cli(prog="echo-lm", description="Echo: recall with a memory of fixed size.")
        sys.stdout.flush()
    except BrokenPipeError:
        # Who read along has had enough, such as head; nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except (ValueError, OSError) as error:
        print(f"echo-lm: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
