"""Evaluation sets from files, as lm-eval would have fetched them.

A set may have the fields of the original, or come ready: a `query` with its `choices` and the
number `gold` of the right one. Either way the questions put to the model are the same.
"""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from echo_lm.extras import need

Row = dict[str, Any]

NAMES = {
    "arc_challenge": "arc_challenge*.jsonl*",
    "arc_easy": "arc_easy*.jsonl*",
    "hellaswag": "hellaswag*.jsonl*",
    "lambada_openai": "lambada*.jsonl*",
    "piqa": "piqa*.jsonl*",
    "wikitext": "wikitext*raw*",
    "winogrande": "winogrande*.jsonl*",
}
"""The file of each task."""
SPLIT = {"arc_challenge": "test", "arc_easy": "test", "lambada_openai": "test", "wikitext": "test"}
"""What lm-eval scores; elsewhere it is "validation"."""
OPEN: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}
QUESTION = "Question: "


def local_tasks(
    tasks: Sequence[str], data: Path, scratch: Path, stock: Mapping[str, Path]
) -> list[str]:
    """Each task with its file; those that make their questions up themselves are left as they are.

    `scratch` is a folder for what lm-eval then reads, `stock` where its own tasks are defined.
    """
    return [
        str(local_task(task, find_file(task, data), scratch, stock[task]))
        if task in NAMES
        else task
        for task in tasks
    ]


def find_file(task: str, data: Path) -> Path:
    found = sorted(data.glob(NAMES[task]))
    if len(found) != 1:
        there = ", ".join(path.name for path in found) or "none"
        raise ValueError(f"{data} must hold one {NAMES[task]} for {task}; there is {there}.")
    return found[0]


def local_task(task: str, file: Path, scratch: Path, stock: Path) -> Path:
    """The definition of lm-eval, but for where its rows are."""
    rows = list(pages(file) if task == "wikitext" else read_rows(file))
    if not rows:
        raise ValueError(f"{file} holds nothing.")
    try:
        rows = [ORIGINALS[task](row) for row in rows]
    except (KeyError, ValueError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} does not look like {task}: {error!r}.") from None
    questions = scratch / f"{task}.jsonl"
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    split = SPLIT.get(task, "validation")
    changes = {
        "include": str(stock),
        "task": task,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {split: str(questions)}, "cache_dir": str(scratch)},
        "training_split": None,
        "validation_split": None,
        "test_split": None,
        f"{split}_split": split,
    }
    if task == "hellaswag":
        changes["process_docs"] = None
    definition = scratch / f"{task}.yaml"
    # JSON is YAML.
    definition.write_text(json.dumps(changes), encoding="utf-8")
    return definition


def _hellaswag(row: Row) -> Row:
    """Made ready here, since files that are cannot be unmade."""
    if "ctx_a" in row:
        preprocess = need("lm_eval.tasks.hellaswag.utils", "eval").preprocess
        context = row["ctx_a"] + " " + row["ctx_b"].capitalize()
        query = preprocess(row["activity_label"] + ": " + context)
        choices = [preprocess(ending) for ending in row["endings"]]
    else:
        query, choices = row["query"], row.get("choices") or row["endings"]
    gold = int(row["gold"] if "gold" in row else row["label"])
    return {"query": query, "choices": choices, "label": gold}


def _piqa(row: Row) -> Row:
    return {"goal": row["goal"], "sol1": row["sol1"], "sol2": row["sol2"], "label": row["label"]}


def _arc(row: Row) -> Row:
    if "question" in row:
        return {name: row[name] for name in ("question", "choices", "answerKey")}
    labels = [str(i) for i in range(len(row["choices"]))]
    return {
        "question": row["query"].removeprefix(QUESTION),
        "choices": {"text": row["choices"], "label": labels},
        "answerKey": labels[row["gold"]],
    }


def _winogrande(row: Row) -> Row:
    if "sentence" in row:
        return {name: row[name] for name in ("sentence", "option1", "option2", "answer")}
    first, second = row["context_options"]
    pairs = zip(first, second, strict=False)
    shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
    before = first[:shared]
    if "_" in before:
        raise ValueError("context_options")
    return {
        "sentence": f"{before}_ {row['continuation']}",
        "option1": first[shared:],
        "option2": second[shared:],
        "answer": str(row["gold"] + 1),
    }


def _text(row: Row) -> Row:
    return {"text": row["text"]}


def _page(row: Row) -> Row:
    return {"page": row["page"]}


ORIGINALS: dict[str, Callable[[Row], Row]] = {
    "arc_challenge": _arc,
    "arc_easy": _arc,
    "hellaswag": _hellaswag,
    "lambada_openai": _text,
    "piqa": _piqa,
    "wikitext": _page,
    "winogrande": _winogrande,
}


def read_text(path: Path) -> str:
    """What is in a file, compressed or not."""
    opener = OPEN.get(path.suffix, open)
    try:
        with opener(path, "rt", encoding="utf-8", newline="") as file:
            return str(file.read())
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as text: {error}.") from None


def read_rows(path: Path) -> Iterator[Row]:
    """The objects of a .jsonl file."""
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}, is not JSON: {error}.") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}, is not an object.")
        yield row


def pages(path: Path) -> Iterator[Row]:
    """The articles of a raw WikiText file, or of a .jsonl with one in each `page`.

    An article begins with a line " = Title = "; what comes before the first is one too.
    """
    if ".jsonl" in path.name:
        yield from read_rows(path)
        return
    page: list[str] = []
    for line in read_text(path).split("\n"):
        title = line.replace("= = =", "===").replace("= =", "==").strip()
        if title.startswith("= ") and title.endswith(" ="):
            if "".join(page).strip():
                yield {"page": "\n".join(page)}
            page = []
        page.append(line)
    yield {"page": "\n".join(page)}
