"""Where a file may be cut, so that its parts can be read without what comes before them.

A cut never goes through a document: lines of `.jsonl` and of text are cut between lines, Parquet
between row groups; a text file that is one document, a module and a compressed file not at all.
"""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from polyad.data.errors import DataError
from polyad.data.text.readers import Extent, Part, Reader, read_jsonl, read_lines, read_parquet

_BLOCK = 1 << 16


class FilePart(NamedTuple):
    """Some of a file's documents.

    Attributes:
        read: Gives them.
        start: Where the first begins, in bytes of the file.
        stop: Where the last ends.
    """

    read: Reader
    start: int
    stop: int


class Place(NamedTuple):
    """Where a document begins: in the unit of an extent, and in bytes of the file."""

    unit: int
    position: int


def share(total: int, number: int, parts: int) -> tuple[int, int]:
    """Gives the part of a source that a number has.

    Args:
        total: Bytes, or rows, of the source.
        number: Of the part, from 0.
        parts: How many there are.

    Returns:
        The place where the part begins, and where it ends. The last one ends behind the total, so
        that an empty file at the end is in it.
    """
    last = number == parts - 1
    return total * number // parts, total + 1 if last else total * (number + 1) // parts


def part_of_file(read: Reader, path: Path, size: int, first: int, last: int) -> FilePart | None:
    """Finds the documents of a file that begin within some bytes of it.

    Args:
        read: The reader of the whole file.
        path: The file.
        size: Its bytes.
        first: The first of the bytes; may lie before the file.
        last: One behind the last of them; may lie behind the file.

    Returns:
        Those documents; None if there are none. A file that cannot be cut begins at its byte 0.

    Raises:
        DataError: The file cannot be read.
    """
    find = _PLACES.get(read)
    if find is None or not can_be_cut(read, path) or (first <= 0 and size < last):
        return FilePart(read, 0, size) if first <= 0 < last else None
    if last <= 0 or first >= size:
        return None
    try:
        begin, end = find(path, size, first), find(path, size, last)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    if begin.unit >= end.unit:
        return None
    cuttable: Callable[..., Iterator[Part]] = read
    partly = functools.partial(cuttable, extent=Extent(begin.unit, end.unit))
    return FilePart(partly, begin.position, end.position)


def _line(path: Path, size: int, place: int) -> Place:
    """The first line that begins at or behind a place."""
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
    """The first row group that begins at or behind a place, by its share of the rows."""
    import pyarrow
    import pyarrow.parquet

    try:
        metadata = pyarrow.parquet.read_metadata(path)
    except pyarrow.ArrowException as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path}: cannot be read as Parquet: {reason}") from None
    rows = 0
    for group in range(metadata.num_row_groups):
        position = size * rows // max(1, metadata.num_rows)
        if position >= place:
            return Place(group, position)
        rows += metadata.row_group(group).num_rows
    return Place(metadata.num_row_groups, size)


_PLACES: dict[Reader, Callable[[Path, int, int], Place]] = {
    read_lines: _line,
    read_jsonl: _line,
    read_parquet: _row_group,
}
"""By reader what finds the first document that begins at or behind a byte."""


def can_be_cut(read: Reader, path: Path) -> bool:
    """Tells whether a file may be cut between its documents.

    Args:
        read: Its reader.
        path: The file.
    """
    return read in _PLACES and not path.name.lower().endswith(".gz")
