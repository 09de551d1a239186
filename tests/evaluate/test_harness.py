"""lm-eval through the command equals lm-eval on its own, and what the model itself says."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.utils import logging

from echo_lm.evaluate.harness import Conditions, load_tokenizer, run, score, spelled, task_manager
from echo_lm.evaluate.local import NAMES, local_tasks
from echo_lm.model import EchoLM

from ..model.families import small_config, wake

logging.disable_progress_bar()

END = "<|endoftext|>"
ROWS: dict[str, list[dict[str, Any]]] = {
    "arc_challenge": [{"query": "Question: What is wet?", "choices": ["sea", "sun"], "gold": 0}],
    "arc_easy": [{"query": "Question: What is hot?", "choices": ["ice", "fire"], "gold": 1}],
    "hellaswag": [{"query": "Cooking: He", "choices": ["eats.", "flies off."], "gold": 0}],
    "lambada_openai": [{"text": "I saw the cat and fed the cat"}, {"text": "one two one two"}],
    "piqa": [
        {"goal": "Cut bread", "sol1": "Use a knife.", "sol2": "Use a spoon.", "label": 0},
        {"goal": "Boil water", "sol1": "Use ice.", "sol2": "Use a pot and heat.", "label": 1},
    ],
    "wikitext": [{"page": " = One = \n\n Words of one @-@ two . \n"}],
    "winogrande": [{"context_options": ["So Ann", "So Eve"], "continuation": "left.", "gold": 1}],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of bytes, its tokenizer, and a set for every task."""
    place = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model = wake(EchoLM(replace(small_config("echo-50m"), vocab_size=257)))
    for parameter in model.parameters():
        parameter.data *= 1.5
    model.save_pretrained(place)
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(place / "tokenizer.json"))
    (place / "sets").mkdir()
    for task, rows in ROWS.items():
        name = "wikitext_raw.jsonl" if task == "wikitext" else f"{task}.jsonl"
        (place / "sets" / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def numbers(found: Any) -> dict[str, Any]:
    """Without estimates of spread, which lm-eval draws."""
    return {
        task: {key: value for key, value in told.items() if "stderr" not in key}
        for task, told in found["results"].items()
    }


@pytest.fixture(scope="module")
def found(folder: Path) -> Any:
    return score(folder, list(NAMES), folder / "sets")


def test_the_harness_alone_says_the_same_to_the_last_digit(
    folder: Path, found: Any, tmp_path: Path
) -> None:
    load_tokenizer(folder / "tokenizer.json", END).save_pretrained(tmp_path / "tokenizer")
    manager = task_manager()
    where = {name: manager.task_index[name].yaml_path for name in NAMES}
    alone = simple_evaluate(
        model="hf",
        model_args={
            "pretrained": str(folder),
            "tokenizer": str(tmp_path / "tokenizer"),
            "max_length": 2048,
        },
        batch_size=8,
        device="cpu",
        tasks=local_tasks(list(NAMES), folder / "sets", tmp_path, where),
        task_manager=manager,
        bootstrap_iters=0,
    )
    assert numbers(alone) == numbers(found)
    assert set(alone["results"]) == set(NAMES)


def log_likelihood(model: EchoLM, coder: Tokenizer, before: str, text: str) -> float:
    """Of a text behind another one."""
    first, second = coder.encode(before).ids, coder.encode(text).ids
    with torch.no_grad():
        logits = model(torch.tensor([first + second])).logits[0].double().log_softmax(-1)
    places = range(len(first) - 1, len(first) + len(second) - 1)
    return sum(float(logits[place, token]) for place, token in zip(places, second, strict=True))


def test_the_model_itself_says_the_same(folder: Path, found: Any) -> None:
    model = EchoLM.from_pretrained(folder)
    coder = Tokenizer.from_file(str(folder / "tokenizer.json"))
    told = []
    for row in ROWS["lambada_openai"]:
        before, last = row["text"].rsplit(" ", 1)
        told.append(log_likelihood(model, coder, before, " " + last))
    wanted = math.exp(-sum(told) / len(told))
    assert found["results"]["lambada_openai"]["perplexity,none"] == pytest.approx(wanted, rel=1e-4)

    right = []
    for row in ROWS["piqa"]:
        before = f"Question: {row['goal']}\nAnswer:"
        first, second = (
            log_likelihood(model, coder, before, f" {row[name]}") for name in ("sol1", "sol2")
        )
        right.append((second > first) == bool(row["label"]))
    assert found["results"]["piqa"]["acc,none"] == sum(right) / 2

    doc = ROWS["wikitext"][0]
    read = log_likelihood(model, coder, END, wikitext_detokenizer(doc))
    told = found["results"]["wikitext"]["word_perplexity,none"]
    assert told == pytest.approx(math.exp(-read / len(re.split(r"\s+", doc["page"]))), rel=1e-4)


def test_a_table_and_a_record(folder: Path, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=100)
    run(
        folder,
        ["piqa", "winogrande"],
        data=folder / "sets",
        tokenizer=None,
        separator=END,
        conditions=Conditions(limit=1, max_length=512),
        device="cpu",
        out=tmp_path / "record.json",
        console=console,
    )
    shown = console.file.getvalue()
    assert "acc_norm" in shown
    assert "winogrande" in shown
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["questions"]["piqa"] == {"original": 2, "effective": 1}
    assert (record["limit"], record["max_length"], record["from_files"]) == (1, 512, True)
    assert set(record["results"]) == {"piqa", "winogrande"}
    assert record["versions"]["torch"] == torch.__version__


def test_what_is_wrong_is_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Name at least one task"):
        score(folder, [])
    with pytest.raises(ValueError, match="lm-eval has no task 'nonsense'"):
        score(folder, ["nonsense"])
    with pytest.raises(ValueError, match=r"must hold one piqa\*"):
        score(folder, ["piqa"], tmp_path)
    with pytest.raises(ValueError, match="There is no tokenizer"):
        score(tmp_path, ["piqa"])
    with pytest.raises(ValueError, match="There is no model directory"):
        score(tmp_path / "none", ["piqa"], tokenizer=folder / "tokenizer.json")
    with pytest.raises(ValueError, match="has no token 'none' to stand before"):
        score(folder, ["piqa"], separator="none")
    EchoLM(replace(small_config("echo-50m"))).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has 257 tokens, this model 61"):
        score(tmp_path, ["piqa"], tokenizer=folder / "tokenizer.json")


def test_an_answer_that_does_not_fit_is_said(folder: Path) -> None:
    short = Conditions(limit=1, max_length=2)
    with pytest.raises(ValueError, match="more than 2 tokens needs a larger max_length"):
        score(folder, ["piqa"], folder / "sets", conditions=short)


@pytest.mark.parametrize(
    ("conditions", "said"),
    [
        ({"limit": 0}, "limit must be a whole number from 1 on, got 0"),
        ({"batch": 0}, "batch must be a whole number from 1 on, got 0"),
        ({"shots": -1}, "shots must be a whole number from 0 on, got -1"),
        ({"max_length": 0}, "max_length must be a whole number from 2 on, got 0"),
        ({"lengths": ("1024", "4096")}, "length 4096 do not fit into max_length 2048"),
        ({"lengths": ("4k",)}, "length 4k do not fit into max_length 2048"),
    ],
)
def test_conditions_that_make_no_sense(conditions: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Conditions(**conditions)


def test_lengths_as_each_task_reads_them() -> None:
    assert spelled(()) == {}
    assert spelled(("4096", "8192")) == {"max_seq_lengths": [4096, 8192]}
    assert spelled(("4k",)) == {"max_seq_lengths": "4k"}
    with pytest.raises(ValueError, match="got 4k 8192"):
        spelled(("4k", "8192"))
