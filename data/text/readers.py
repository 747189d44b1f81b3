"""One reader for each kind of text file, and the places where such a file may be cut.

A reader streams texts and never holds the whole file: it takes a path and the key (or column) of
the text, and yields each document; documents of a text file, which may be of any length, come in
parts. Files are cut only between documents: `.jsonl` and text by line at line ends, Parquet between
row groups; a text file that is one document, a module and a compressed file cannot be cut.
"""

import codecs
import gzip
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from polyad.data.errors import DataError, listed, nearest, one_line
from polyad.data.json_reader import parse_json

PART_BYTES = 64 * 1024
"""Size of the parts in which a text file is read, and a longer document is yielded, in bytes."""
JSON_LINE_BYTES = 256 * 1024 * 1024
"""Maximum length of a line in a `.jsonl` file: a longer one is hardly one object per line."""
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


class Extent(NamedTuple):
    """A range of a file that begins and ends at boundaries of documents.

    Attributes:
        start: First byte of a file of lines, or first row group of a Parquet file.
        stop: One past the last.
    """

    start: int
    stop: int


WHOLE = Extent(0, sys.maxsize)


def read_text(path: Path, text_key: str, extent: Extent = WHOLE) -> Iterator[Part]:
    """Reads a text file as one document.

    Args:
        path: A UTF-8 file of any size.
        text_key: Unused: the file is all text.
        extent: Unused: the document is the file.

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


def read_lines(path: Path, text_key: str, extent: Extent = WHOLE) -> Iterator[Part]:
    """Reads a text file with one document per line; blank lines are skipped.

    Args:
        path: A UTF-8 file; lines end with a line feed, or a carriage return and a line feed.
        text_key: Unused: the file is all text.
        extent: A range of bytes between beginnings of lines.

    Yields:
        The text of each line without its end; a line much longer than `PART_BYTES` in parts.

    Raises:
        DataError: A byte is not UTF-8.
    """
    held, position, begun = "", extent.start, False
    for text, _ in _decoded(path, extent):
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


def _decoded(path: Path, extent: Extent = WHOLE) -> Iterator[tuple[str, int]]:
    """Reads a text file unchanged, line ends included, with the position after each part."""
    at = position = extent.start
    line = 0
    rest, at_end = b"", False
    with path.open("rb") as file:
        file.seek(at)
        while not at_end:
            # Blocks end at the same offsets as in the whole file, so that lines come in the same
            # parts.
            block = file.read(min(PART_BYTES - at % PART_BYTES, extent.stop - at))
            at += len(block)
            at_end = not block
            buffer = rest + block
            try:
                text, used = codecs.utf_8_decode(buffer, "strict", at_end)
            except UnicodeDecodeError as error:
                at_line = line + buffer.count(b"\n", 0, error.start) + 1
                at_line += _lines_before(path, extent.start)
                raise DataError(
                    f"{path}: byte {position + error.start} (line {at_line}) is not UTF-8 text: "
                    f"0x{buffer[error.start]:02x}"
                ) from None
            position += used
            line += text.count("\n")
            rest = buffer[used:]
            if text:
                yield text, position


def _lines_before(path: Path, place: int) -> int:
    """Counts the lines before an offset, for an error message."""
    count = 0
    with path.open("rb") as file:
        while place > 0 and (block := file.read(min(place, 1 << 20))):
            count += block.count(b"\n")
            place -= len(block)
    return count


def read_jsonl(path: Path, text_key: str, extent: Extent = WHOLE) -> Iterator[Part]:
    """Reads one JSON object per line, from a plain or gzip-compressed file.

    Args:
        path: A `.jsonl` or `.jsonl.gz` file; blank lines are skipped.
        text_key: The key of the text.
        extent: A range of bytes between beginnings of lines, for a plain file.

    Yields:
        The text of a line, and the number of bytes of the file read so far.

    Raises:
        DataError: A line is not such an object, or the compressed file is damaged.
    """
    with path.open("rb") as raw:
        compressed = path.suffix.lower() == ".gz"
        file: Any = gzip.GzipFile(fileobj=raw) if compressed else raw
        try:
            raw.seek(extent.start)
            for number, line in enumerate(_lines(file, path, extent.stop), start=1):
                if not line.isspace():
                    try:
                        text = _text_of_line(line, text_key)
                    except DataError as error:
                        at_line = number + _lines_before(path, extent.start)
                        raise DataError(f"{path}, line {at_line}: {error}") from None
                    yield Part(text, raw.tell())
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{path}: not a whole gzip file: {error}") from None


def _lines(file: BinaryIO, path: Path, stop: int) -> Iterator[bytes]:
    while file.tell() < stop and (line := file.readline(JSON_LINE_BYTES + 1)):
        if len(line) > JSON_LINE_BYTES:
            raise DataError(f"{path}: a line is longer than {JSON_LINE_BYTES >> 20} MiB")
        yield line


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


def read_parquet(path: Path, text_key: str, extent: Extent = WHOLE) -> Iterator[Part]:
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
            groups = list(range(file.metadata.num_row_groups))
            row = sum(file.metadata.row_group(each).num_rows for each in groups[: extent.start])
            groups = groups[extent.start : extent.stop]
            for batch in file.iter_batches(PARQUET_BATCH_ROWS, groups, columns=[text_key]):
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


def read_module(path: Path, text_key: str, extent: Extent = WHOLE) -> Iterator[Part]:
    """Reads a source-code file, assumed to fit in memory, as one document.

    Raises:
        UnicodeDecodeError: A byte is not UTF-8.
    """
    content = path.read_bytes()
    yield Part(content.decode("utf-8"), len(content))


_BLOCK = 1 << 16


class Place(NamedTuple):
    """The beginning of a document, in the unit of an extent and in bytes of the file."""

    unit: int
    position: int


def _line(path: Path, size: int, place: int) -> Place:
    """Finds the first line that begins at or after an offset."""
    if place <= 0:
        return Place(0, 0)
    with path.open("rb") as file:
        at = file.seek(min(place, size) - 1)
        while block := file.read(_BLOCK):
            found = block.find(b"\n")
            if found >= 0:
                return Place(at + found + 1, at + found + 1)
            at += len(block)
    return Place(size, size)


def _row_group(path: Path, size: int, place: int) -> Place:
    """Finds the first row group at or after an offset, by its share of the rows."""
    import pyarrow
    import pyarrow.parquet

    try:
        metadata = pyarrow.parquet.read_metadata(path)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: cannot be read as Parquet: {one_line(error)}") from None
    rows = 0
    for group in range(metadata.num_row_groups):
        position = size * rows // max(1, metadata.num_rows)
        if position >= place:
            return Place(group, position)
        rows += metadata.row_group(group).num_rows
    return Place(metadata.num_row_groups, size)


class FilePart(NamedTuple):
    """A range of a file's documents.

    Attributes:
        extent: The range.
        start: Offset of the first document in the file, in bytes.
        stop: Offset of the end of the last.
    """

    extent: Extent
    start: int
    stop: int


@dataclass(frozen=True)
class Format:
    """A kind of text file.

    Attributes:
        read: Yields the documents of a file, or of an extent of it.
        place: Given a path, a size and an offset, finds the first document that begins at or after
            the offset; None if such files cannot be cut.
        is_text: Whether it is plain text, for which the user chooses what a document is.
        has_keys: Whether it has keys or columns, of which the user chooses one.
    """

    read: Callable[[Path, str, Extent], Iterator[Part]]
    place: Callable[[Path, int, int], Place] | None = None
    is_text: bool = False
    has_keys: bool = False

    def can_be_cut(self, path: Path) -> bool:
        """Returns whether a file may be cut between its documents."""
        return self.place is not None and not path.name.lower().endswith(".gz")

    def part(self, path: Path, size: int, first: int, last: int) -> FilePart | None:
        """Finds the documents of a file that begin within a range of bytes.

        Args:
            path: The file.
            size: Its size in bytes.
            first: First byte of the range; may lie before the file.
            last: One past its last byte; may lie after the file.

        Returns:
            Those documents; None if there are none. A file that cannot be cut begins at its byte 0.

        Raises:
            DataError: The file cannot be read.
        """
        find = self.place
        if find is None or not self.can_be_cut(path) or (first <= 0 and size < last):
            return FilePart(WHOLE, 0, size) if first <= 0 < last else None
        if last <= 0 or first >= size:
            return None
        try:
            begin, end = find(path, size, first), find(path, size, last)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
        if begin.unit >= end.unit:
            return None
        return FilePart(Extent(begin.unit, end.unit), begin.position, end.position)


TEXT = Format(read_text, is_text=True)
LINES = Format(read_lines, _line, is_text=True)
JSONL = Format(read_jsonl, _line, has_keys=True)
PARQUET = Format(read_parquet, _row_group, has_keys=True)
MODULE = Format(read_module)
FORMATS = {".txt": TEXT, ".jsonl": JSONL, ".jsonl.gz": JSONL, ".parquet": PARQUET}
"""Formats by file extension: to add a kind of file, write a reader and add one line here."""


def share(total: int, number: int, parts: int) -> tuple[int, int]:
    """Computes the range of a source that one part has.

    Args:
        total: Bytes or rows of the source.
        number: The number of the part, from 0.
        parts: The number of parts.

    Returns:
        Where the part begins and ends. The last part ends after the total, so that it includes an
        empty file at the end.
    """
    last = number == parts - 1
    return total * number // parts, total + 1 if last else total * (number + 1) // parts
