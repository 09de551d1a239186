"""`echo-lm train`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from echo_lm.data.tokenise import load_tokenizer
from echo_lm.model.lm import EchoLM
from echo_lm.ops.backends import pick_device
from echo_lm.speak import Coder
from echo_lm.tasks import find
from echo_lm.tasks.base import SPLITS
from echo_lm.train.history import History, Record
from echo_lm.train.loop import train
from echo_lm.train.parallel import processes
from echo_lm.train.recipe import Recipe, read_recipe, recipes
from echo_lm.train.track import tracked

SAMPLES_FILE = "samples.jsonl"


def list_recipes(console: Console | None = None) -> None:
    """Echo's own recipes, and what they are."""
    table = Table("Recipe", "Model", "Length", "Budget")
    for name in recipes():
        recipe = read_recipe(name)
        assert recipe.text is not None
        config = recipe.train_config(recipe.text.length)
        tokens = config.steps * config.batch * recipe.text.length
        budget = f"{config.steps:,} steps, {tokens:,} tokens"
        shape = recipe.model.get("preset", "its own")
        table.add_row(name, shape, f"{recipe.text.length:,}", budget)
    (console or Console()).print(table)


def run(name: str, changes: Sequence[str], console: Console | None = None) -> History:
    """Train as a recipe says, or go on."""
    recipe = read_recipe(name, changes)
    source, beside = open_source(recipe)
    config = recipe.train_config(source.length)
    model_config = recipe.model_config(source.vocab_size)
    folder = Path(recipe.run.folder)
    with processes(recipe.run.strategy, pick_device(recipe.run.device)) as (strategy, device):
        main = strategy.rank == 0
        console = (console or Console()) if main else None
        torch.manual_seed(config.seed)
        model = EchoLM(model_config)
        if console is not None:
            tokens = config.steps * config.batch * source.length
            console.print(
                f"{model.num_parameters():,} parameters, {config.steps:,} steps of {config.batch} "
                f"rows of {source.length:,}: {tokens:,} tokens, into {folder}.",
                highlight=False,
            )
        settings = {"model": model_config.to_dict(), "train": config.to_dict()}
        with tracked(recipe.run.track if main else "", folder, settings) as track:
            sample = sampler(recipe, model, source, console)

            def watch(record: Record) -> None:
                track(record)
                if "test_loss" in record:
                    sample(record["step"])

            return train(
                model,
                source,
                config,
                device=device,
                folder=folder,
                console=console,
                watch=watch,
                strategy=strategy,
                beside=beside,
            )


def open_source(recipe: Recipe) -> tuple[Any, list[Path]]:
    """What to train on, and the files that belong to a model trained on it."""
    if recipe.text is None:
        entries = dict(recipe.task)
        if "name" not in entries:
            raise ValueError('task needs a name, such as task.name="mqar".')
        return find(str(entries.pop("name")), **entries), []
    from echo_lm.data import TextSource, TokenShards

    settings = asdict(recipe.text)
    shards = TokenShards(settings.pop("folder"))
    shards.check_tokenizer(shards.tokenizer)
    source = TextSource(shards, **settings)
    for split in SPLITS:
        source.check_any(split)
    return source, [shards.tokenizer]


def sampler(
    recipe: Recipe, model: EchoLM, source: Any, console: Console | None
) -> Callable[[int], None]:
    """Goes on from the recipe's prompts as `echo-lm generate` does, but with the likeliest tokens;
    shows how, and keeps it. All processes must take part."""
    prompts = recipe.run.samples
    if not prompts:
        return lambda step: None
    if recipe.text is None:
        raise ValueError("run.samples are of text, and this run has a task; leave them out.")
    shards = source.shards
    coder = Coder(load_tokenizer(shards.tokenizer), shards.manifest["recipe"]["separator"]["token"])

    def write(prompt: str) -> str:
        ids = torch.tensor([coder.encode(prompt, new=True)], device=model.embedding.weight.device)
        whole = model.generate(
            ids, max_new_tokens=recipe.run.sample_tokens, eos_token_id=coder.stop
        )
        return str(coder.tokenizer.decode(whole[0].tolist()))

    def sample(step: int) -> None:
        was_training = model.training
        model.eval()
        for prompt in prompts:
            text = write(prompt)
            if console is not None:
                console.print(f"  {text!r}", highlight=False, markup=False)
                with (Path(recipe.run.folder) / SAMPLES_FILE).open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"step": step, "prompt": prompt, "text": text}) + "\n")
        model.train(was_training)

    return sample
