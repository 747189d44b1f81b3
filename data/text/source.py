"""The interface of all sources of text: documents in an order that never changes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Document(NamedTuple):
    """One document of a source, or a part of one that is too long to be held.

    Attributes:
        name: Where it comes from: the file, relative to the source, and its number there.
        text: All of it, not empty. Of a document in parts, the next of them; the last may be empty.
        bytes_read: How far into the source it ends, in bytes of the files on the disk.
        is_last: Whether the document ends here. Its other parts follow at once where it does not.
    """

    name: str
    text: str
    bytes_read: int
    is_last: bool = True


@dataclass
class Skipped:
    """Counts of what a pass over a source left out."""

    empty: int = 0
    unreadable: int = 0


class Source(Protocol):
    """Documents that can be read any number of times, always the same way."""

    @property
    def spec(self) -> str:
        """What the user wrote."""

    @property
    def total_bytes(self) -> int:
        """How much there is to read, in the unit of `Document.bytes_read`; 0 if not known."""

    def listing_digest(self) -> str:
        """A SHA-256 that says whether the source is the same as before without reading it."""

    def documents(self, skipped: Skipped | None = None) -> Iterator[Document]:
        """Reads the source from its beginning; memory holds a small part of it.

        Args:
            skipped: Counts, added to, of what is left out.

        Yields:
            The documents that are not empty, in order.

        Raises:
            DataError: It cannot be read, or does not hold what its kind promises.
        """
