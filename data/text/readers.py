"""One reader for each kind of text file.

A reader takes a path and the key (or column) of the text, and yields the text of each document.
Only `read_text` holds a whole file in memory. Files that end in .gz or .zst are decompressed as
they are read.
"""

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from polyad.data.errors import DataError, listed, nearest
from polyad.data.json_reader import parse_json
from polyad.data.tables import library_errors

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
        UnicodeDecodeError: A byte is not UTF-8.
    """
    with _opened(path) as file:
        yield file.read().decode()


def read_lines(path: Path, text_key: str) -> Iterator[str]:
    """Reads a text file with one document per line; blank lines are skipped.

    Args:
        path: A UTF-8 file; lines end with a line feed, or a carriage return and a line feed.
        text_key: Unused: the file is all text.

    Raises:
        UnicodeDecodeError: A byte is not UTF-8.
    """
    for _, line in _lines(path):
        yield line.decode().removesuffix("\n").removesuffix("\r")


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
    """Reads a column of strings from a Parquet or CSV file; see `read_rows`."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs, it raises too
    options: dict[str, Any] = {"data_files": str(path), "split": "train", "streaming": True}
    with library_errors(path):
        if path.suffix.lower() == ".parquet":
            rows = datasets.load_dataset("parquet", **options)
        else:  # all columns are strings: "NA" or "1" in a text is that
            rows = datasets.load_dataset(
                "csv", **options, keep_default_na=False, converters={text_key: str}
            )
        columns = rows.column_names or list(next(iter(rows), {}))
        if text_key in columns:
            rows = rows.select_columns([text_key])
    yield from read_rows(rows, path, text_key)


def read_rows(rows: Any, place: str | Path, text_key: str) -> Iterator[str]:
    """Reads a column of strings.

    Args:
        rows: `datasets.Dataset` or `datasets.IterableDataset`.
        place: Names them in errors.
        text_key: The column.

    Raises:
        DataError: The rows cannot be read, have no such column, or a value is not a string.
    """
    row = 0
    with library_errors(place):
        for batch in rows.iter(batch_size=TABLE_ROWS):
            if text_key not in batch:
                raise DataError(
                    f"{place}: no column {text_key!r}; columns present: {listed(batch)}"
                    f"{nearest(text_key, batch)}; choose one with --text-key"
                )
            for text in batch[text_key]:
                row += 1
                if not isinstance(text, str):
                    raise DataError(
                        f"{place}, row {row}: {text_key!r} is {text!r:.60}, not a string"
                    )
                yield text


Read = Callable[[Path, str], Iterator[str]]
"""Yields the text of each document of a file."""
TEXT: frozenset[Read | None] = frozenset({read_text, read_lines})
"""Readers of plain text, whose documents the user defines."""
FORMATS: dict[str, Read] = {
    ".txt": read_text,
    ".jsonl": read_jsonl,
    ".jsonl.gz": read_jsonl,
    ".jsonl.zst": read_jsonl,
    ".csv": read_table,
    ".parquet": read_table,
}
"""Readers by file extension: to add a kind of file, write a reader and add one line here."""
