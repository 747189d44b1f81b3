"""One reader for each kind of text file.

A reader streams texts and never holds the whole file: it takes a path and the key (or column) of
the text, and yields each document; documents of a text file, which may be of any length, come in
parts.
"""

import codecs
import gzip
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from polyad.data.errors import DataError, listed, nearest
from polyad.data.json_reader import parse_json

PART_BYTES = 64 * 1024
"""Size of the parts in which a text file is read, and a longer document is yielded, in bytes."""
PARQUET_BATCH_ROWS = 64


class Part(NamedTuple):
    """A document, or a part of one.

    Attributes:
        text: The text of the document or part.
        position: Where it ends in the file, in bytes on disk.
        is_last: Whether the document ends here.
    """

    text: str
    position: int
    is_last: bool = True


def read_text(path: Path, text_key: str) -> Iterator[Part]:
    """Reads a text file as one document.

    Args:
        path: A UTF-8 file of any size.
        text_key: Unused: the file is all text.

    Yields:
        Parts of about `PART_BYTES` whose concatenation is the file; cuts may be at any character.

    Raises:
        DataError: A byte is not UTF-8.
    """
    pending = Part("", 0)
    for text, position in _decoded(path):
        if pending.text:
            yield pending._replace(is_last=False)
        pending = Part(text, position)
    yield pending


def read_lines(path: Path, text_key: str) -> Iterator[Part]:
    """Reads a text file with one document per line; blank lines are skipped.

    Args:
        path: A UTF-8 file; lines end with a line feed, or a carriage return and a line feed.
        text_key: Unused: the file is all text.

    Yields:
        The text of each line without its end; a line much longer than `PART_BYTES` in parts.

    Raises:
        DataError: A byte is not UTF-8.
    """
    held, position, begun = "", 0, False
    for text, _ in _decoded(path):
        *lines, held = (held + text).split("\n")
        for line in lines:
            position += len(line.encode()) + 1
            if begun or not (line.isspace() or not line):
                yield Part(line.removesuffix("\r"), position)
            begun = False
        # A trailing carriage return is held back until the next character is known.
        if len(held) > PART_BYTES and (begun or not held.isspace()) and held[-1] != "\r":
            position += len(held.encode())
            yield Part(held, position, is_last=False)
            held, begun = "", True
    if begun or not (held.isspace() or not held):
        yield Part(held, position + len(held.encode()))


def _decoded(path: Path) -> Iterator[tuple[str, int]]:
    """Reads a text file unchanged, line ends included, with the position after each part."""
    position = line = 0
    rest, at_end = b"", False
    with path.open("rb") as file:
        while not at_end:
            block = file.read(PART_BYTES)
            at_end = not block
            buffer = rest + block
            try:
                text, used = codecs.utf_8_decode(buffer, "strict", at_end)
            except UnicodeDecodeError as error:
                at_line = line + buffer.count(b"\n", 0, error.start) + 1
                raise DataError(
                    f"{path}: byte {position + error.start} (line {at_line}) is not UTF-8 text: "
                    f"0x{buffer[error.start]:02x}"
                ) from None
            position += used
            line += text.count("\n")
            rest = buffer[used:]
            if text:
                yield text, position


def read_jsonl(path: Path, text_key: str) -> Iterator[Part]:
    """Reads one JSON object per line, from a plain or gzip-compressed file.

    Args:
        path: A `.jsonl` or `.jsonl.gz` file; blank lines are skipped.
        text_key: The key of the text.

    Yields:
        The text of a line, and the number of bytes of the file read so far.

    Raises:
        DataError: A line is not such an object, or the compressed file is damaged.
    """
    with path.open("rb") as raw:
        compressed = path.suffix.lower() == ".gz"
        file: Any = gzip.GzipFile(fileobj=raw) if compressed else raw
        try:
            for number, line in enumerate(file, start=1):
                if not line.isspace():
                    try:
                        text = _text_of_line(line, text_key)
                    except DataError as error:
                        raise DataError(f"{path}, line {number}: {error}") from None
                    yield Part(text, raw.tell())
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{path}: not a whole gzip file: {error}") from None


def _text_of_line(line: bytes, text_key: str) -> str:
    value = parse_json(line, "")
    if not isinstance(value, dict):
        raise DataError(f"{type(value).__name__} where a JSON object is expected")
    if text_key not in value:
        raise DataError(
            f"no key {text_key!r}; keys present: {listed(value)}"
            f"{nearest(text_key, value)}; choose one with --text-key"
        )
    text = value[text_key]
    if not isinstance(text, str):
        raise DataError(f"{text_key!r} is {text!r:.60}, not a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{text_key!r} has half a surrogate pair: {error}") from None
    return text


def read_parquet(path: Path, text_key: str) -> Iterator[Part]:
    """Reads a column of strings from a Parquet file.

    Yields:
        The text of a row, and the fraction of the file read so far, in bytes.

    Raises:
        DataError: The file is not Parquet, has no such column, or the column is not of strings.
    """
    import pyarrow
    import pyarrow.parquet

    size, row = path.stat().st_size, 0
    try:
        # Streamed page by page: with pre-buffering, whole row groups would be in memory.
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
            _check_column(file.schema_arrow, text_key, path)
            num_rows = file.metadata.num_rows
            for batch in file.iter_batches(PARQUET_BATCH_ROWS, columns=[text_key]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    if not isinstance(text, str):
                        raise DataError(f"{path}, row {row}: {text_key!r} is null, not a string")
                    yield Part(text, size * row // num_rows)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path}: cannot be read as Parquet (after row {row}): {reason}") from None


def _check_column(schema: Any, text_key: str, path: Path) -> None:
    from pyarrow import types

    if text_key not in schema.names:
        raise DataError(
            f"{path}: no column {text_key!r}; columns present: "
            f"{listed(schema.names)}{nearest(text_key, schema.names)}; choose one with --text-key"
        )
    if schema.names.count(text_key) > 1:
        raise DataError(f"{path}: has {schema.names.count(text_key)} columns called {text_key!r}")
    kind = schema.field(text_key).type
    if types.is_dictionary(kind):
        kind = kind.value_type
    is_text = (types.is_string, types.is_large_string, types.is_string_view)
    if not any(holds(kind) for holds in is_text):
        raise DataError(f"{path}: column {text_key!r} is of {kind}, not of strings")


def read_module(path: Path, text_key: str) -> Iterator[Part]:
    """Reads a source-code file, assumed to fit in memory, as one document.

    Raises:
        UnicodeDecodeError: A byte is not UTF-8.
    """
    content = path.read_bytes()
    yield Part(content.decode("utf-8"), len(content))


@dataclass(frozen=True)
class Format:
    """A kind of text file.

    Attributes:
        read: Yields the documents of a file.
        is_text: Whether it is plain text, for which the user chooses what a document is.
        has_keys: Whether it has keys or columns, of which the user chooses one.
    """

    read: Callable[[Path, str], Iterator[Part]]
    is_text: bool = False
    has_keys: bool = False


TEXT = Format(read_text, is_text=True)
LINES = Format(read_lines, is_text=True)
JSONL = Format(read_jsonl, has_keys=True)
PARQUET = Format(read_parquet, has_keys=True)
MODULE = Format(read_module)
FORMATS = {".txt": TEXT, ".jsonl": JSONL, ".jsonl.gz": JSONL, ".parquet": PARQUET}
"""Formats by file extension: to add a kind of file, write a reader and add one line here."""
