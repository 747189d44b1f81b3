"""One reader for each kind of text file: a stream of texts, never the whole file at once.

A reader takes a path and the key (or column) that holds the text, and yields each document's text
with the position in the file after it, in bytes of the file as it lies on the disk.
"""

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from data.errors import DataError, listed, nearest

Reader = Callable[[Path, str], Iterator[tuple[str, int]]]

DOCUMENT_BYTES = 64 * 1024
"""A `.txt` file longer than this becomes several documents, each a little longer than this."""
LINE_BYTES = 1024 * 1024
"""A line of a `.txt` file longer than this is cut; it also bounds the reader's memory."""
JSON_LINE_BYTES = 256 * 1024 * 1024
"""A longer line in a `.jsonl` file is an error: the file is hardly one object a line."""
PARQUET_BATCH_ROWS = 64

_BLANK_LINES = re.compile(rb"\n(?:[ \t\r]*\n)+")


def read_txt(path: Path, text_key: str) -> Iterator[tuple[str, int]]:
    """Reads a text file in documents whose concatenation is the file.

    Args:
        path: A UTF-8 file. Up to `DOCUMENT_BYTES` it is one document; a longer one is cut after
            the first blank line behind that many bytes (looked for over as many bytes again), else
            at the first line end, and a line longer than `LINE_BYTES` anyway.
        text_key: Unused: the file is all text.

    Yields:
        The text of a document and the bytes of the file read so far.

    Raises:
        DataError: A byte is not UTF-8.
    """
    position = line = 0
    with path.open("rb") as file:
        buffer = bytearray(file.read(LINE_BYTES + 1))
        if not buffer:
            yield "", 0
        while buffer:
            cut = _cut(buffer)
            piece = bytes(buffer[:cut])
            try:
                text = piece.decode("utf-8")
            except UnicodeDecodeError as error:
                at_line = line + piece.count(b"\n", 0, error.start) + 1
                raise DataError(
                    f"{path}: byte {position + error.start} (line {at_line}) is not UTF-8 text: "
                    f"0x{piece[error.start]:02x}"
                ) from None
            del buffer[:cut]
            position += cut
            line += piece.count(b"\n")
            yield text, position
            buffer += file.read(LINE_BYTES + 1 - len(buffer))


def _cut(buffer: bytearray) -> int:
    """Finds where the first document of a buffer ends; a buffer that is not full is the rest."""
    if len(buffer) <= DOCUMENT_BYTES:
        return len(buffer)
    blank = _BLANK_LINES.search(buffer, DOCUMENT_BYTES, 2 * DOCUMENT_BYTES)
    if blank:
        return blank.end()
    line_end = buffer.find(b"\n", DOCUMENT_BYTES)
    if line_end >= 0:
        return line_end + 1
    if len(buffer) <= LINE_BYTES:
        return len(buffer)
    # No line end in sight: cut before a character's first byte (at most four bytes back), and
    # where there is none, the bytes are not UTF-8 and decoding says so.
    for cut in range(LINE_BYTES, LINE_BYTES - 4, -1):
        if buffer[cut] & 0xC0 != 0x80:
            return cut
    return LINE_BYTES


def read_jsonl(path: Path, text_key: str) -> Iterator[tuple[str, int]]:
    """Reads one JSON object a line, from a plain or a gzip-compressed file.

    Args:
        path: A `.jsonl` or `.jsonl.gz` file; lines of white space are passed over.
        text_key: The key of the text.

    Yields:
        The text of a line and the bytes of the file read so far.

    Raises:
        DataError: A line is not such an object, or the compressed file is damaged.
    """
    with path.open("rb") as raw:
        compressed = path.suffix == ".gz"
        file: Any = gzip.GzipFile(fileobj=raw) if compressed else raw
        try:
            for number, line in enumerate(_lines(file, path), start=1):
                if not line.isspace():
                    yield _text_of_line(line, text_key, f"{path}, line {number}"), raw.tell()
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{path}: not a whole gzip file: {error}") from None


def _lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    while line := file.readline(JSON_LINE_BYTES + 1):
        if len(line) > JSON_LINE_BYTES:
            raise DataError(f"{path}: a line is longer than {JSON_LINE_BYTES >> 20} MiB")
        yield line


def _text_of_line(line: bytes, text_key: str, where: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{where}: {type(value).__name__} where a JSON object is expected")
    if text_key not in value:
        raise DataError(
            f"{where}: no key {text_key!r}; keys present: {listed(value)}"
            f"{nearest(text_key, value)}; choose one with --text-key"
        )
    text = value[text_key]
    if not isinstance(text, str):
        raise DataError(f"{where}: {text_key!r} is {text!r:.60}, not a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: {text_key!r} has half a surrogate pair: {error}") from None
    return text


def read_parquet(path: Path, text_key: str) -> Iterator[tuple[str, int]]:
    """Reads a column of strings from a Parquet file.

    Args:
        path: The file.
        text_key: The name of the column.

    Yields:
        The text of a row and the share of the file read so far, in bytes.

    Raises:
        DataError: The file is not Parquet, has no such column, or the column is not of strings.
    """
    import pyarrow
    import pyarrow.parquet

    size, row = path.stat().st_size, 0
    try:
        # Streamed page by page: pre-buffering would hold whole row groups.
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
            _check_column(file.schema_arrow, text_key, path)
            num_rows = file.metadata.num_rows
            for batch in file.iter_batches(PARQUET_BATCH_ROWS, columns=[text_key]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    if not isinstance(text, str):
                        raise DataError(f"{path}, row {row}: {text_key!r} is null, not a string")
                    yield text, size * row // num_rows
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


def read_module(path: Path, text_key: str) -> Iterator[tuple[str, int]]:
    """Reads a file of program text as one document.

    Args:
        path: A UTF-8 file, of a size that a person wrote.
        text_key: Unused: the file is all text.

    Yields:
        The text of the file and its size in bytes.

    Raises:
        UnicodeDecodeError: A byte is not UTF-8.
    """
    content = path.read_bytes()
    yield content.decode("utf-8"), len(content)


READERS: dict[str, Reader] = {
    ".txt": read_txt,
    ".jsonl": read_jsonl,
    ".jsonl.gz": read_jsonl,
    ".parquet": read_parquet,
}
"""Reader by the ending of a file's name: a new kind of file is one function and one line here."""
