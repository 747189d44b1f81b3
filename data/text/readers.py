"""One reader for each kind of text file.

A reader takes a path and the column (or key) of the text, and yields the text of each document.
Only `read_text` holds a whole file in memory. Files that end in .gz or .zst are decompressed as
they are read.
"""

import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from polyad.data.errors import DataError, listed, nearest
from polyad.data.files import parse_json
from polyad.data.tables import library_errors

READ_BYTES = 2**20
"""Bytes of a file read at a time."""
_CODECS = {".gz": "gzip", ".zst": "zstd"}
TABLE_ROWS = 64
"""Rows of a table read at a time."""


class Column(NamedTuple):
    """The column (or key) of a table that holds the text."""

    key: str
    """Its name."""
    render: Callable[[Any], str] | None = None
    """Makes the text of a conversation, a list of messages; None: conversations are refused."""

    def of(self, row: Mapping[str, Any], place: str | Path) -> Any:
        """Returns what an object, or a batch of rows, has in this column.

        Raises:
            DataError: It has no such column.
        """
        if self.key not in row:
            raise DataError(
                f"{place}: no key or column {self.key!r}; there are {listed(row)}"
                f"{nearest(self.key, row)}; choose one with --text-key"
            )
        return row[self.key]

    def text(self, value: Any, place: str) -> str:
        """Returns the text of a value.

        Raises:
            DataError: It is neither Unicode text nor a conversation that can be rendered.
        """
        if isinstance(value, list):
            if self.render is None:
                raise DataError(
                    f"{place}: {self.key!r} is a list; --special-tokens parse renders messages by "
                    "the tokenizer's chat template"
                )
            try:
                value = self.render(value)
            except DataError as error:
                raise DataError(f"{place}: {self.key!r}: {error}") from None
        try:
            value.encode()
        except (AttributeError, UnicodeEncodeError):  # JSON may hold half a surrogate pair
            raise DataError(f"{place}: {self.key!r} is {value!r:.60}, not Unicode text") from None
        return str(value)


def read_text(path: Path, column: Column) -> Iterator[str]:
    """Reads a text file as one document, line ends and a byte order mark included.

    Args:
        path: A UTF-8 file.
        column: Unused: the file is all text.

    Raises:
        UnicodeDecodeError: A byte is not UTF-8.
    """
    with _opened(path) as file:
        yield file.read().decode()


def read_lines(path: Path, column: Column) -> Iterator[str]:
    """Reads a text file with one document per line; blank lines are skipped.

    Args:
        path: A UTF-8 file; lines end with a line feed, or a carriage return and a line feed.
        column: Unused: the file is all text.

    Raises:
        UnicodeDecodeError: A byte is not UTF-8.
    """
    for _, line in _lines(path):
        yield line.decode().removesuffix("\n").removesuffix("\r")


def read_jsonl(path: Path, column: Column) -> Iterator[str]:
    """Reads one JSON object per line; blank lines are skipped.

    Args:
        path: The file.
        column: The key of the text.

    Raises:
        DataError: A line is not such an object.
    """
    for number, line in _lines(path):
        place = f"{path}, line {number}"
        row = parse_json(line, place)
        if not isinstance(row, dict):
            raise DataError(f"{place}: is not a JSON object")
        yield column.text(column.of(row, place), place)


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


def read_table(path: Path, column: Column) -> Iterator[str]:
    """Reads a column of strings from a Parquet or CSV file; see `read_rows`."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs, it raises too
    options: dict[str, Any] = {"data_files": str(path), "split": "train", "streaming": True}
    with library_errors(path):
        if path.suffix.lower() == ".parquet":
            rows = datasets.load_dataset("parquet", **options)
        else:  # all columns are strings: "NA" or "1" in a text is that
            rows = datasets.load_dataset(
                "csv", **options, keep_default_na=False, converters={column.key: str}
            )
        columns = rows.column_names or list(next(iter(rows), {}))
        if column.key in columns:
            rows = rows.select_columns([column.key])
    yield from read_rows(rows, path, column)


def read_rows(rows: Any, place: str | Path, column: Column) -> Iterator[str]:
    """Reads a column of strings.

    Args:
        rows: `datasets.Dataset` or `datasets.IterableDataset`.
        place: Names them in errors.
        column: The column.

    Raises:
        DataError: The rows cannot be read, have no such column, or a value is not a string.
    """
    row = 0
    with library_errors(place):
        for batch in rows.iter(batch_size=TABLE_ROWS):
            for value in column.of(batch, place):
                row += 1
                yield column.text(value, f"{place}, row {row}")


Read = Callable[[Path, Column], Iterator[str]]
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
