"""What the verification of any prepared folder tells: a report for each of its files."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

PIECE_BYTES = 2**20
"""Bytes that are read and checked together: a piece stays in a core's cache."""

Read = Callable[[int], None]
"""Called with the number of bytes, whenever some were read. What it raises ends the reading."""


class FileReport(NamedTuple):
    """The result of reading a file of a prepared folder.

    Attributes:
        name: The file's.
        bytes: Its size; 0 where it is missing.
        checked: What it was compared with, in a few words.
        reason: One line on why it is damaged; None where it is whole.
    """

    name: str
    bytes: int
    checked: str
    reason: str | None


def read_pieces(path: Path, read: Read) -> Iterator[bytes]:
    """Reads a file in pieces.

    Args:
        path: The file.
        read: Is told of each.
    """
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            read(len(piece))
            yield piece
