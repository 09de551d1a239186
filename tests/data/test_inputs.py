"""Every format gives the same documents; what is wrong with one is said with its place."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from echo_lm.data import prepare
from echo_lm.data.inputs import Fields, Input, open_inputs, pieces

from .texts import SQUEEZE, lines, some_texts, write_lines, write_plain, write_table

FIELDS = Fields()
TEXTS = some_texts(60)


def texts_of(one: Input, after: int = 0) -> list[str]:
    return [
        FIELDS.read(value, one.where(number))[0].decode()
        for number, value in one.after(after, FIELDS)
    ]


@pytest.mark.parametrize("squeezed", SQUEEZE)
@pytest.mark.parametrize(
    ("kind", "write", "end"),
    [(".jsonl", write_lines, ""), (".parquet", write_table, ""), (".txt", write_plain, "\n")],
)
def test_documents_of_every_format(
    kind: str, write: Callable[..., Path], end: str, squeezed: str, tmp_path: Path
) -> None:
    (found,) = open_inputs([write(tmp_path / f"some.text{kind}{squeezed}", TEXTS)])
    expected = [text + end for text in TEXTS]
    assert texts_of(found) == expected
    assert found.consumed == found.size
    assert texts_of(found, after=23) == expected[23:]
    assert texts_of(found, after=len(TEXTS)) == []
    assert found.source == "some.text"


@pytest.mark.parametrize("squeezed", [".xz", ".gz", ".zst"])
def test_compressed_files_one_after_the_other(squeezed: str, tmp_path: Path) -> None:
    """As `cat a.gz b.gz` makes them."""
    squeeze = SQUEEZE[squeezed]
    parts = [lines([{"text": text}]) for text in TEXTS]
    path = tmp_path / f"text.jsonl{squeezed}"
    path.write_bytes(b"".join(squeeze(part) for part in parts))
    assert texts_of(*open_inputs([path])) == TEXTS


def test_a_large_frame_is_read_in_parts(tmp_path: Path) -> None:
    many = TEXTS * 1000
    assert texts_of(*open_inputs([write_lines(tmp_path / "text.jsonl.zst", many)])) == many


def test_a_folder_is_its_files_by_name_without_what_is_held_out(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.txt", "test.jsonl.xz"):
        write_lines(tmp_path / name, TEXTS)
    (tmp_path / "README.md").touch()
    twice = [tmp_path, tmp_path / "a.txt"]
    found = open_inputs(twice, without=[tmp_path / "test.jsonl.xz"])
    assert [Path(one.name).name for one in found] == ["a.txt", "b.jsonl"]


def test_marks_and_blank_lines_are_no_documents(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\r\n \n{"text": "two"}')
    assert texts_of(*open_inputs([path])) == ["one", "two"]


def test_pieces_hold_every_document_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo_lm.data.inputs.PIECE_BYTES", 500)
    names = ("a.jsonl", "b.jsonl")
    inputs = [
        (one, "train") for one in open_inputs([write_lines(tmp_path / n, TEXTS) for n in names])
    ]
    everything = [
        (p.input, p.first + i) for p in pieces(inputs, FIELDS) for i in range(len(p.documents))
    ]
    assert everything == [(i, n) for i in range(2) for n in range(len(TEXTS))]
    rest = [(p.input, p.first) for p in pieces(inputs, FIELDS, (1, 50))]
    assert rest[0] == (1, 50)
    assert {number for number, _ in rest} == {1}


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def squeezed(ending: str, content: bytes) -> bytes:
    return SQUEEZE[ending](content)


LONG = lines([{"text": text} for text in some_texts(3000)])
GOOD = lines([{"text": "one"}, {"text": "two"}])


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl.xz", cut(squeezed(".xz", LONG)), r"xz is cut short or damaged after line \d+"),
        ("a.jsonl.gz", cut(squeezed(".gz", LONG)), r"gz is cut short or damaged after line \d+"),
        ("a.jsonl.zst", cut(squeezed(".zst", LONG)), r"a.jsonl.zst is cut short .* after line \d+"),
        ("a.jsonl.zst", squeezed(".zst", GOOD)[:-1], r"a.jsonl.zst is cut short .* after line \d+"),
        ("a.jsonl.xz", b"no such thing", r"a.jsonl.xz is cut short or damaged after line 0"),
        ("a.jsonl.gz", b"no such thing", r"a.jsonl.gz is cut short or damaged after line 0"),
        ("a.jsonl.zst", b"no such thing", r"a.jsonl.zst is cut short or damaged after line 0"),
        ("a.parquet", b"PAR1 and no more", r"a.parquet is cut short or damaged after row 0"),
        ("a.jsonl", GOOD[:-4], r"a.jsonl, line 2, is not JSON: .* at character \d+"),
        ("a.jsonl", GOOD + b'{"text": "\xff"}\n', r"line 3, is not UTF-8: byte 11 is 0xff\."),
        ("a.txt", b"fine\nnot \xe9\n", r"a.txt, line 2, is not UTF-8: byte 5 is 0xe9\."),
        ("a.jsonl", GOOD + b"[1, 2]\n", r"line 3, is JSON, but list and not an object"),
        ("a.jsonl", b'{"body": 1, "id": 1}', r"line 1, has no field 'text', it has body, id: "),
        ("a.jsonl", GOOD + b'{"text": null}\n', r"line 3, has NoneType in the field 'text', not"),
        ("a.jsonl", b'{"text": "a\\ud800b"}\n', r"line 1, holds half a character \('\\ud800'\)"),
        ("a.csv", b"text\nx\n", r"a.csv must end in .jsonl, .parquet, .txt, also with .xz, .zst"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_place(
    name: str, content: bytes, said: str, tokenizer: Path, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=said) as error:
        prepare([path], tokenizer=tokenizer, out=tmp_path / "out", processes=1)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_table_without_the_field_is_named(tokenizer: Path, tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.parquet", TEXTS)
    fields = Fields("body")
    with pytest.raises(ValueError, match=r"row 1, has no field 'body', it has text, source"):
        prepare([path], tokenizer=tokenizer, out=tmp_path / "out", fields=fields, processes=1)


@pytest.mark.parametrize(
    ("path", "said"),
    [("nowhere.jsonl", "There is no file"), ("empty", r"The folder .*empty holds no \.jsonl")],
)
def test_what_is_not_there_is_named(path: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=said) as error:
        open_inputs([tmp_path / path])
    assert re.search(re.escape(path), str(error.value))
