"""Documents out of files, or out of a dataset by name. Free of torch, for worker processes."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, get_args

from echo_lm.extras import need

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

Value = bytes | dict[str, Any]
"""A line of JSON, not yet read, or the fields of a document."""

Split = Literal["train", "test"]
"""As tasks have it: "test" is held out."""
SPLITS: tuple[Split, ...] = get_args(Split)

SEPARATOR = "<|endoftext|>"
PIECE_BYTES = 1 << 18
"""Text that is handed to a process at once."""
ROWS = 256
"""Rows of a parquet file that are read at once."""


@dataclass(frozen=True)
class Fields:
    """What is taken of a document."""

    text: str = "text"
    source: str = "source"
    """Names where a document is from; one without it is from its file."""

    def of(self, row: dict[str, Any]) -> dict[str, Any]:
        """Only these, so that nothing else travels; all of a row that has no text, to say so."""
        return (
            {k: row[k] for k in (self.text, self.source) if k in row} if self.text in row else row
        )

    def read(self, value: Value, place: str) -> tuple[bytes, str | None]:
        """The text of a document in UTF-8 and its source; `place` is what a complaint names."""
        row = _parsed(value, place) if isinstance(value, bytes) else value
        if self.text not in row:
            raise ValueError(
                f"{place} has no field {self.text!r}, it has {', '.join(row) or 'none'}: "
                "say with --field which one is the text."
            )
        text, source = row[self.text], row.get(self.source)
        if not isinstance(text, str):
            raise ValueError(
                f"{place} has {type(text).__name__} in the field {self.text!r}, not text."
            )
        try:
            return text.encode(), None if source is None else str(source)
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{place} holds half a character ({text[error.start]!r}), which no UTF-8 has."
            ) from None


def _parsed(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(_not_utf8(place, error)) from None
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{place} is not JSON: {error.msg} at character {error.pos + 1}; "
            "a .jsonl file has one object a line."
        ) from None
    if not isinstance(row, dict):
        raise ValueError(f"{place} is JSON, but {type(row).__name__} and not an object.")
    return row


def _not_utf8(place: str, error: UnicodeDecodeError) -> str:
    return f"{place} is not UTF-8: byte {error.start + 1} is 0x{error.object[error.start]:02x}."


class Input(ABC):
    """A list of documents in an order."""

    name: str
    place: str
    """What its documents are counted in: lines, rows."""
    source: str
    """Where documents are from that do not say so."""
    size = 0
    """Bytes to read; 0 if nobody knows."""
    consumed = 0
    """Bytes read so far."""

    @abstractmethod
    def records(self, fields: Fields) -> Iterator[tuple[int, Value]]:
        """Its documents, each with the number of its line or row."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What a manifest says of it."""

    def where(self, number: int) -> str:
        """The subject of a sentence about one of them."""
        return f"{self.name}, {self.place} {number},"

    def after(self, records: int, fields: Fields) -> Iterator[tuple[int, Value]]:
        """Its documents without the first ones."""
        documents = self.records(fields)
        for _ in zip(range(records), documents, strict=False):
            pass
        return documents


class Lines(Input):
    """A file of JSON lines."""

    place = "line"

    def __init__(self, path: Path, source: str) -> None:
        self.path, self.name, self.source = path, str(path), source
        self.size = path.stat().st_size

    def identity(self) -> dict[str, Any]:
        with self.path.open("rb") as file:
            digest = file_digest(file, "sha256").hexdigest()
        return {"file": self.path.name, "bytes": self.size, "sha256": digest}

    def records(self, fields: Fields) -> Iterator[tuple[int, Value]]:
        for number, line in self.lines():
            if not line.isspace():
                yield number, line

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Numbered from 1, without a byte order mark."""
        number = 0
        with self.path.open("rb") as raw:
            try:
                for number, line in enumerate(_decompressed(self.path, raw), 1):
                    self.consumed = raw.tell()
                    yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            except _damage() as error:
                raise ValueError(
                    f"{self.path} is cut short or damaged after line {number}: {error}."
                ) from None


class Plain(Lines):
    """Text. A line that is the separator and nothing else begins another document."""

    def records(self, fields: Fields) -> Iterator[tuple[int, Value]]:
        first, parts = 1, list[str]()
        for number, line in self.lines():
            if line.strip() == SEPARATOR.encode():
                yield first, {fields.text: "".join(parts)}
                first, parts = number + 1, []
                continue
            try:
                parts.append(line.decode())
            except UnicodeDecodeError as error:
                raise ValueError(_not_utf8(self.where(number), error)) from None
        yield first, {fields.text: "".join(parts)}


class Parquet(Lines):
    """A table."""

    place = "row"

    def records(self, fields: Fields) -> Iterator[tuple[int, Value]]:
        number = 0
        try:
            with self.path.open("rb") as raw:
                table = need("pyarrow.parquet", "data").ParquetFile(_seekable(self.path, raw))
                names = table.schema_arrow.names
                wanted = [name for name in (fields.text, fields.source) if name in names]
                some = wanted if fields.text in names else names
                for batch in table.iter_batches(batch_size=ROWS, columns=some):
                    for row in batch.to_pylist():
                        number += 1
                        self.consumed = self.size * number // table.metadata.num_rows
                        yield number, row
        except (OSError, *_damage(), need("pyarrow", "data").ArrowException) as error:
            raise ValueError(
                f"{self.path} is cut short or damaged after row {number}: {_first_line(error)}."
            ) from None


class Dataset(Input):
    """A dataset of the Hugging Face hub, or of a local folder, streamed."""

    place = "row"

    def __init__(self, name: str, subset: str | None, split: str) -> None:
        self.name, self.subset, self.split = name, subset, split
        self.source = name

    def identity(self) -> dict[str, Any]:
        return {"dataset": self.name, "subset": self.subset, "split": self.split}

    def records(self, fields: Fields) -> Iterator[tuple[int, Value]]:
        return self.after(0, fields)

    def after(self, records: int, fields: Fields) -> Iterator[tuple[int, Value]]:
        datasets = need("datasets", "data")
        number = records
        try:
            rows = datasets.load_dataset(self.name, self.subset, split=self.split, streaming=True)
            for number, row in enumerate(rows.skip(records), records + 1):
                yield number, fields.of(row)
        # It raises what it likes, and what the network does.
        except Exception as error:
            raise ValueError(
                f"The dataset {self.name} could not be read after row {number}: "
                f"{_first_line(error)}."
            ) from None


KINDS: dict[str, Callable[[Path, str], Input]] = {
    ".jsonl": Lines,
    ".parquet": Parquet,
    ".txt": Plain,
}
COMPRESSED = (".xz", ".zst", ".gz")


def open_inputs(paths: Sequence[Path], without: Sequence[Path] = ()) -> list[Input]:
    """The files, each once, those of a folder by name, without some of them."""
    left_out = {file.resolve() for path in without for file in _files(path)}
    found = {file.resolve(): file for path in paths for file in _files(path)}
    return [_open(file) for place, file in found.items() if place not in left_out]


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise ValueError(f"There is no file {path}.")
    if not path.is_dir():
        return [path]
    known = sorted(file for file in path.rglob("*") if file.is_file() and _kind(file))
    if not known:
        raise ValueError(f"The folder {path} holds no {_endings()}.")
    return known


def _open(path: Path) -> Input:
    kind = _kind(path)
    if not kind:
        raise ValueError(f"{path} must end in {_endings()}: that says how to read it.")
    return KINDS[kind](path, path.name[: path.name.rindex(kind)])


def _kind(path: Path) -> str | None:
    """The ending below a compression's."""
    plain = path.with_suffix("") if path.suffix in COMPRESSED else path
    return plain.suffix if plain.suffix in KINDS else None


def _endings() -> str:
    return f"{', '.join(KINDS)}, also with {', '.join(COMPRESSED)}"


def _decompressed(path: Path, raw: BinaryIO) -> Any:
    """What a compressed file holds, to be read or taken line by line."""
    if path.suffix == ".xz":
        return lzma.open(raw)
    if path.suffix == ".gz":
        return gzip.open(raw)
    if path.suffix == ".zst":
        return io.BufferedReader(_Zstandard(raw), 1 << 20)
    return raw


def _seekable(path: Path, raw: BinaryIO) -> BinaryIO:
    return io.BytesIO(_decompressed(path, raw).read()) if path.suffix in COMPRESSED else raw


class _Zstandard(io.RawIOBase):
    """Frames one after the other. The package's own reader takes a frame cut short for whole."""

    def __init__(self, raw: BinaryIO) -> None:
        self.raw = raw
        engine = need("zstandard", "data").ZstdDecompressor(max_window_size=1 << 31)
        self.new_frame: Callable[[], Any] = engine.decompressobj
        self.frame: Any = None
        self.unread = b""
        self.ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, target: WriteableBuffer) -> int:
        while not self.ready:
            self.unread = self.unread or self.raw.read(1 << 18)
            if not self.unread:
                if self.frame is not None:
                    raise EOFError("Compressed file ended before the end of a frame")
                return 0
            self.frame = self.frame or self.new_frame()
            self.ready = memoryview(self.frame.decompress(self.unread))
            self.unread = b""
            if self.frame.eof:
                self.unread, self.frame = self.frame.unused_data, None
        count = min(len(self.ready), memoryview(target).nbytes)
        memoryview(target)[:count] = self.ready[:count]
        self.ready = self.ready[count:]
        return count


def _damage() -> tuple[type[Exception], ...]:
    """What reading raises when a file is not what it should be."""
    ours = (EOFError, OSError, lzma.LZMAError, zlib.error)
    try:
        return (*ours, need("zstandard", "data").ZstdError)
    except ValueError:
        return ours


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


@dataclass(frozen=True)
class Piece:
    """Some documents of an input in a row."""

    input: int
    """The number of the input."""
    first: int
    """How many documents the input has before these."""
    source: str
    split: Split
    documents: list[tuple[str, Value]]
    """Each with what a complaint names."""


def pieces(
    inputs: Sequence[tuple[Input, Split]], fields: Fields, start: tuple[int, int] = (0, 0)
) -> Iterator[Piece]:
    """All documents in order, from a document of an input on."""
    for number, (one, split) in enumerate(inputs[start[0] :], start[0]):
        first = start[1] if number == start[0] else 0
        for some in _grouped(one.after(first, fields), fields):
            named = [(one.where(place), value) for place, value in some]
            yield Piece(number, first, one.source, split, named)
            first += len(some)


def _grouped(
    records: Iterator[tuple[int, Value]], fields: Fields
) -> Iterator[list[tuple[int, Value]]]:
    """As many together as make up a piece."""
    some: list[tuple[int, Value]] = []
    room = PIECE_BYTES
    for record in records:
        some.append(record)
        room -= _size(record[1], fields)
        if room <= 0:
            yield some
            some, room = [], PIECE_BYTES
    if some:
        yield some


def _size(value: Value, fields: Fields) -> int:
    text = value if isinstance(value, bytes) else value.get(fields.text)
    return len(text) if isinstance(text, bytes | str) else 1
