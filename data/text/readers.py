"""One reader for each kind of text file.

A reader takes a path and the key (or column) of the text, and yields the text of each document.
Only `read_text` holds a whole file in memory. Files that end in .gz or .zst are decompressed as
they are read.
"""

import io
from collections.abc import Callable, Iterator, Mapping
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
        place = f"{path}, line {number}"
        row = parse_json(line, place)
        if not isinstance(row, dict):
            raise DataError(f"{place}: is not a JSON object")
        yield _string(_column(row, text_key, place), text_key, place)


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


def _column(row: Mapping[str, Any], text_key: str, place: str | Path) -> Any:
    """Returns what an object, or a batch of rows, has under the key of the text."""
    if text_key not in row:
        raise DataError(
            f"{place}: no key or column {text_key!r}; there are {listed(row)}"
            f"{nearest(text_key, row)}; choose one with --text-key"
        )
    return row[text_key]


def _string(text: Any, text_key: str, place: str) -> str:
    try:
        text.encode()
    except (AttributeError, UnicodeEncodeError):  # JSON may hold half a surrogate pair
        raise DataError(f"{place}: {text_key!r} is {text!r:.60}, not Unicode text") from None
    return str(text)


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
            for text in _column(batch, text_key, place):
                row += 1
                yield _string(text, text_key, f"{place}, row {row}")


Read = Callable[[Path, str], Iterator[str]]
"""Yields the text of each document of a file."""
FORMATS: dict[str, Read] = {
    ".txt": read_text,
    ".jsonl": read_jsonl,
    ".jsonl.gz": read_jsonl,
    ".jsonl.zst": read_jsonl,
    ".csv": read_table,
    ".parquet": read_table,
}
"""Readers by file extension: to add a kind of file, write a reader and add one line here."""
