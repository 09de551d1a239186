"""Evaluation sets from files: whichever form they come in, the questions are the same."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from echo_lm.evaluate.local import ORIGINALS, find_file, local_task, pages, read_rows

READY: dict[str, Any] = {
    "arc_easy": {"query": "Question: What is hot?", "choices": ["ice", "fire"], "gold": 1},
    "winogrande": {
        "context_options": ["Ann paid Eve since Ann", "Ann paid Eve since Eve"],
        "continuation": "had won.",
        "gold": 1,
    },
    "hellaswag": {"query": "Cooking: He", "choices": ["eats.", "flies."], "gold": 0},
}
ORIGINAL: dict[str, Any] = {
    "arc_easy": {
        "question": "What is hot?",
        "choices": {"text": ["ice", "fire"], "label": ["0", "1"]},
        "answerKey": "1",
    },
    "winogrande": {
        "sentence": "Ann paid Eve since _ had won.",
        "option1": "Ann",
        "option2": "Eve",
        "answer": "2",
    },
    "hellaswag": {
        "activity_label": "Cooking",
        "ctx_a": "He [title]",
        "ctx_b": "",
        "endings": ["eats [nothing].", "flies."],
        "label": "0",
    },
}


@pytest.mark.parametrize("task", ["arc_easy", "winogrande"])
def test_a_ready_row_becomes_the_original(task: str) -> None:
    assert ORIGINALS[task](READY[task]) == ORIGINAL[task]
    assert ORIGINALS[task](ORIGINAL[task] | {"id": 7}) == ORIGINAL[task]


def test_hellaswag_is_made_ready_as_the_harness_does() -> None:
    ready = {"query": "Cooking: He. ", "choices": ["eats .", "flies."], "label": 0}
    assert ORIGINALS["hellaswag"](ORIGINAL["hellaswag"]) == ready
    plain = ORIGINALS["hellaswag"](READY["hellaswag"])
    assert plain == {"query": "Cooking: He", "choices": ["eats.", "flies."], "label": 0}
    endings = {"query": "Cooking: He", "endings": ["eats.", "flies."], "label": "0"}
    assert ORIGINALS["hellaswag"](endings) == plain


def test_options_that_begin_alike_are_told_apart() -> None:
    row = {"context_options": ["So Ann", "So Anna"], "continuation": "left.", "gold": 0}
    made = ORIGINALS["winogrande"](row)
    before, after = made["sentence"].split("_")
    assert [before + made[f"option{i}"] for i in (1, 2)] == row["context_options"]
    assert after == " left."


@pytest.mark.parametrize(("suffix", "opener"), [("", open), (".xz", lzma.open), (".gz", gzip.open)])
def test_compressed_or_not(suffix: str, opener: Any, tmp_path: Path) -> None:
    rows = [{"text": "a\u2028b"}, {"text": "c"}]
    path = tmp_path / f"lambada_openai_test.jsonl{suffix}"
    with opener(path, "wt", encoding="utf-8") as file:
        file.write("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n")
    assert find_file("lambada_openai", tmp_path) == path
    assert list(read_rows(path)) == rows


def test_articles_of_a_raw_text(tmp_path: Path) -> None:
    path = tmp_path / "wiki.raw"
    first = " = One = \n\n Words . \n\n = = Part = = \n\n More . \n"
    path.write_text(f"\n{first} = Two = \n\n End . \n", encoding="utf-8")
    found = [row["page"] for row in pages(path)]
    assert found == [first.removesuffix("\n"), " = Two = \n\n End . \n"]


def test_the_definition_is_the_stock_one_but_for_the_rows(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps(READY["hellaswag"]) + "\n")
    definition = local_task("hellaswag", tmp_path / "data.jsonl", tmp_path, tmp_path / "stock.yaml")
    told = json.loads(definition.read_text())
    assert told["include"] == str(tmp_path / "stock.yaml")
    assert (told["validation_split"], told["test_split"]) == ("validation", None)
    rows = list(read_rows(Path(told["dataset_kwargs"]["data_files"]["validation"])))
    assert rows == [ORIGINALS["hellaswag"](READY["hellaswag"])]


def test_what_is_wrong_with_a_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must hold one piqa\*\.jsonl\* for piqa; there is none"):
        find_file("piqa", tmp_path)
    for name in ("piqa.jsonl", "piqa_val.jsonl.xz"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"there is piqa\.jsonl, piqa_val\.jsonl\.xz"):
        find_file("piqa", tmp_path)
    file = tmp_path / "piqa.jsonl"
    for text, sentence in (
        ("", "holds nothing"),
        ('{"goal": "a"}', "does not look like piqa: KeyError"),
        ("{", "line 1, is not JSON"),
        ("3", "line 1, is not an object"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=sentence):
            local_task("piqa", file, tmp_path, tmp_path / "stock.yaml")
    broken = tmp_path / "piqa_val.jsonl.xz"
    broken.write_bytes(lzma.compress(b'{"goal": "a"}')[:-9])
    with pytest.raises(ValueError, match="cannot be read as text"):
        list(read_rows(broken))
