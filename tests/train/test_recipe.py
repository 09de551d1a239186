"""What a recipe says, and how it is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echo_lm import EchoConfig
from echo_lm.train.recipe import merged, parse_change, read_recipe, recipes

SMALL = """
[model]
preset = "synthetic-ska"
ska = { rank = 8 }

[task]
name = "mqar"
pairs = 2
gap = 4

[train]
steps = 4
warmup = 1

[run]
folder = "here"
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return str(path)


def test_a_file_and_its_changes(file: str) -> None:
    recipe = read_recipe(
        file, ["train.lr=0.5", "model.ska.order=3", "task.pairs=3", "run.folder=x"]
    )
    config = recipe.model_config(128)
    wanted = EchoConfig.preset("synthetic-ska")
    assert (config.ska.rank, config.ska.order) == (8, 3)
    assert (config.mixers, config.vocab_size) == (wanted.mixers, 128)
    assert recipe.task == {"name": "mqar", "pairs": 3, "gap": 4}
    assert recipe.train_config(16).lr == 0.5
    assert (recipe.run.folder, recipe.run.strategy) == ("x", "alone")


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_of_ours_is_whole(name: str) -> None:
    recipe = read_recipe(name)
    assert recipe.text is not None
    config = recipe.train_config(recipe.text.length)
    assert config.warmup < config.steps
    assert recipe.model_config(1000).vocab_size == 1000


@pytest.mark.parametrize(
    ("name", "steps", "tokens"),
    [("echo-50m", 15_259, 3.0e9), ("echo-180m", 50_000, 9.83e9)],
)
def test_the_papers_budgets(name: str, steps: int, tokens: float) -> None:
    recipe = read_recipe(name)
    assert recipe.text is not None
    config = recipe.train_config(recipe.text.length)
    assert (config.steps, config.batch, recipe.text.length) == (steps, 96, 2048)
    assert config.steps * 96 * 2048 == pytest.approx(tokens, rel=1e-3)


def test_tokens_stand_for_steps(file: str) -> None:
    recipe = read_recipe(file, ["train.batch=8"])
    recipe.train.pop("steps")
    recipe.train["tokens"] = 8 * 16 * 5 + 3
    assert recipe.train_config(16).steps == 5
    recipe.train["tokens"] = float("inf")
    with pytest.raises(ValueError, match=r"train\.tokens must be a positive number, got inf"):
        recipe.train_config(16)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ("train.lr=1e-3", {"train": {"lr": 1e-3}}),
        ("train.compile=true", {"train": {"compile": True}}),
        ("run.folder=runs/a b", {"run": {"folder": "runs/a b"}}),
        ("model.ska.rank=64", {"model": {"ska": {"rank": 64}}}),
        ('run.samples=["The "]', {"run": {"samples": ["The "]}}),
        ("run.track=", {"run": {"track": ""}}),
    ],
)
def test_changes_are_read_as_toml(change: str, wanted: dict[str, Any]) -> None:
    assert parse_change(change) == wanted


def test_merging_leaves_what_is_not_named() -> None:
    before = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert merged(before, {"a": {"c": {"d": 4}}}) == {"a": {"b": 1, "c": {"d": 4}}, "e": 3}
    assert before["a"] == {"b": 1, "c": {"d": 2}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["lr=1"], "A change is written like \"train.lr=1e-3\", got 'lr=1'"),
        (["train.lr"], "A change is written like"),
        (["optimiser.lr=1"], "has a section 'optimiser'; there are model, text, task, train, run"),
        (["text.folder=tokens"], r"must have one of the sections \[text\] and \[task\]"),
        (["run.colour=1"], r"holds run\.colour, which this version of Echo does not know"),
        (["run.track=paper"], r"run\.track must be one of '', 'trackio', 'wandb'; got 'paper'"),
        (["run.samples=The"], "samples must be a list of prompts, got 'The'"),
        (["run.samples=[1]"], r"samples must be a list of prompts, got \[1\]"),
        (["run.folder=2024"], r"run\.folder must be text, got 2024; put it in quotes"),
        (["run.device=0"], r"run\.device must be text, got 0"),
    ],
)
def test_a_recipe_that_makes_no_sense(changes: list[str], said: str, file: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_recipe(file, changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["train.tokens=5"], "train needs steps or tokens, one of the two"),
        (["train.speed=5"], r"holds train\.speed, which this version"),
        (["train.lr=fast"], r"train\.lr must be a positive number, got 'fast'"),
        (["train.lr=-1"], r"train\.lr must be a positive number, got -1"),
        (["train.betas=3"], r"train\.betas must be two numbers from 0 to below 1, got 3"),
        (["train.betas=[0.9]"], r"train\.betas must be two numbers"),
        (["train.betas=[0.9, 1]"], r"train\.betas must be two numbers"),
    ],
)
def test_settings_of_the_loop_are_checked(changes: list[str], said: str, file: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_recipe(file, changes).train_config(16)


def test_a_model_that_cannot_read_the_text(file: str) -> None:
    recipe = read_recipe(file, ["model.vocab_size=64"])
    with pytest.raises(ValueError, match=r"model.vocab_size is 64, which is less than the 128"):
        recipe.model_config(128)


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"There is no recipe 'nothing'.*echo-50m"):
        read_recipe("nothing")
    path = tmp_path / "broken.toml"
    path.write_text("[model\n")
    with pytest.raises(ValueError, match="is not TOML"):
        read_recipe(str(path))
    path.write_text("[model]\npreset='echo-50m'\n[run]\nfolder='x'\n")
    with pytest.raises(ValueError, match=r"has no section \[train\]"):
        read_recipe(str(path))
