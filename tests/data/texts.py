"""Small texts in every format there is."""

from __future__ import annotations

import gzip
import json
import lzma
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import zstandard

from echo_lm.data import prepare

WORDS = ("river", "Koopman", "and", "the", "ünïcode", "漢字", "remembers", "42", "...", "\n")
SQUEEZE = {
    "": bytes,
    ".xz": lzma.compress,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def some_texts(count: int, seed: int = 0) -> list[str]:
    """Of a few to a few dozen words."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 40))) for _ in range(count)]


def lines(rows: Sequence[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def write_lines(path: Path, texts: Sequence[str], **more: Any) -> Path:
    """JSON lines, squeezed as the ending says."""
    rows = [{"id": i, "text": text, **more} for i, text in enumerate(texts)]
    path.write_bytes(SQUEEZE.get(path.suffix, bytes)(lines(rows)))
    return path


def write_plain(path: Path, texts: Sequence[str]) -> Path:
    content = "<|endoftext|>\n".join(f"{text}\n" for text in texts)
    path.write_bytes(SQUEEZE.get(path.suffix, bytes)(content.encode()))
    return path


def write_table(path: Path, texts: Sequence[str]) -> Path:
    table = pyarrow.table({"text": texts, "source": [f"s{i % 3}" for i in range(len(texts))]})
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, sink, row_group_size=7)
    path.write_bytes(SQUEEZE.get(path.suffix, bytes)(sink.getvalue().to_pybytes()))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def prepared(folder: Path, tokenizer: Path, texts: Sequence[str], **settings: Any) -> Path:
    """A folder of tokens beside its text."""
    folder.mkdir(exist_ok=True)
    file = write_lines(folder / "text.jsonl", texts)
    out = folder / "tokens"
    prepare([file], tokenizer=tokenizer, out=out, **{"processes": 1, **settings})
    return out


def tokens_of(path: Path) -> list[int]:
    return np.load(path, allow_pickle=False).tolist()
