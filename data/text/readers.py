"""One reader for each kind of text file.

A reader takes a path and the key (or column) of the text, and yields the text of each document.
Only `read_text` holds a whole file in memory. Files that end in .gz or .zst are decompressed as
they are read.
"""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyad.data.errors import DataError, listed, nearest, one_line
from polyad.data.json_reader import parse_json

READ_BYTES = 2**20
"""Bytes of a file read at a time."""
_CODECS = {".gz": "gzip", ".zst": "zstd"}
TABLE_ROWS = 64
"""Rows of a table read at a time."""


def read_text(path: Path, text_key: str) -> Iterator[str]:
    """Reads a text file as one document, line ends and a byte order mark included.

    Args:
        path: A UTF-8 file.
        text_key: Unused: the file is all text.

    Raises:
        DataError: A byte is not UTF-8.
    """
    with _opened(path) as file:
        content = file.read()
    try:
        yield content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}: byte {error.start} (line {line}) is not UTF-8 text: "
            f"0x{content[error.start]:02x}"
        ) from None


def read_lines(path: Path, text_key: str) -> Iterator[str]:
    """Reads a text file with one document per line; blank lines are skipped.

    Args:
        path: A UTF-8 file; lines end with a line feed, or a carriage return and a line feed.
        text_key: Unused: the file is all text.

    Raises:
        DataError: A byte is not UTF-8.
    """
    for number, line in _lines(path):
        try:
            yield line.decode().removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise DataError(f"{path}, line {number}: is not UTF-8: {error.reason}") from None


def read_jsonl(path: Path, text_key: str) -> Iterator[str]:
    """Reads one JSON object per line; blank lines are skipped.

    Args:
        path: The file.
        text_key: The key of the text.

    Raises:
        DataError: A line is not such an object.
    """
    for number, line in _lines(path):
        try:
            yield _text_of_line(line, text_key)
        except DataError as error:
            raise DataError(f"{path}, line {number}: {error}") from None


def _opened(path: Path) -> Any:
    codec = _CODECS.get(path.suffix.lower())
    if codec is None:
        return path.open("rb", buffering=READ_BYTES)
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(path.open("rb"), codec), READ_BYTES)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields the lines of a file that are not blank, and their numbers from 1."""
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.isspace():
                yield number, line


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


def read_table(path: Path, text_key: str) -> Iterator[str]:
    """Reads a column of strings from a Parquet or CSV file.

    Raises:
        DataError: The file cannot be read, has no such column, or a value is not a string.
    """
    row = 0
    try:
        rows = _rows(path, text_key)
        columns = rows.column_names or list(next(iter(rows), {}))
        if text_key not in columns:
            raise DataError(
                f"{path}: no column {text_key!r}; columns present: "
                f"{listed(columns)}{nearest(text_key, columns)}; choose one with --text-key"
            )
        for batch in rows.select_columns([text_key]).iter(TABLE_ROWS):
            for text in batch[text_key]:
                row += 1
                if not isinstance(text, str):
                    raise DataError(
                        f"{path}, row {row}: {text_key!r} is {text!r:.60}, not a string"
                    )
                yield text
    except DataError:
        raise
    except Exception as error:  # bare ones of pyarrow and pandas
        reason = one_line(error, 200)
        raise DataError(f"{path}: cannot be read (after row {row}): {reason}") from None


def _rows(path: Path, text_key: str) -> Any:
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs, it raises too
    options: dict[str, Any] = {"data_files": str(path), "split": "train", "streaming": True}
    if path.suffix.lower() == ".parquet":
        return datasets.load_dataset("parquet", **options)
    # All columns are strings: "NA" or "1" in a text is that.
    return datasets.load_dataset(
        "csv", **options, keep_default_na=False, converters={text_key: str}
    )


def read_module(path: Path, text_key: str) -> Iterator[str]:
    """Reads a source-code file as one document.

    Raises:
        UnicodeDecodeError: A byte is not UTF-8.
    """
    yield path.read_bytes().decode("utf-8")


@dataclass(frozen=True)
class Format:
    """A kind of text file.

    Attributes:
        read: Yields the documents of a file.
        is_text: Whether it is plain text, for which the user chooses what a document is.
        has_keys: Whether it has keys or columns, of which the user chooses one.
    """

    read: Callable[[Path, str], Iterator[str]]
    is_text: bool = False
    has_keys: bool = False


TEXT = Format(read_text, is_text=True)
LINES = Format(read_lines, is_text=True)
JSONL = Format(read_jsonl, has_keys=True)
TABLE = Format(read_table, has_keys=True)
MODULE = Format(read_module)
FORMATS = {
    ".txt": TEXT, ".jsonl": JSONL, ".jsonl.gz": JSONL, ".jsonl.zst": JSONL, ".csv": TABLE,
    ".parquet": TABLE,
}  # fmt: skip
"""Formats by file extension: to add a kind of file, write a reader and add one line here."""
