"""The interface of all sources of text: documents in an order that never changes."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Document(NamedTuple):
    """One document of a source, or a part of one that is too long to be held.

    Attributes:
        name: Where it comes from: the file, relative to the source, and its number there.
        text: All of it, not empty. Of a document in parts, the next of them; the last may be empty.
        bytes_read: How far into the source it ends, in bytes of the files on the disk; in a part of
            one counted from the beginning of the whole.
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
    def offset(self) -> int:
        """Where it begins in the source that it is a part of, in bytes of that; else 0."""

    @property
    def total_bytes(self) -> int:
        """How much there is to read, in the unit of `Document.bytes_read`; 0 if not known."""

    def listing_digest(self) -> str:
        """A SHA-256 that says whether the source is the same as before without reading it."""

    def cut_by(self) -> str:
        """Says what `part` counts, and how many of it there are; equal where it cuts alike."""

    def parts_of(self, size: int) -> int:
        """Says how many parts it may be cut into, none of which needs to have fewer bytes.

        Args:
            size: Bytes of a part, about.

        Returns:
            At least 1, which is all where there is no place to cut at.
        """

    def part(self, number: int, parts: int) -> "Source":
        """Cuts the source between documents.

        Args:
            number: Which part, from 0.
            parts: How many: their documents, one part after the other, are those of the source.

        Returns:
            The part; it is empty where the source has no place to cut at.
        """

    def documents(self, skipped: Skipped | None = None) -> Iterator[Document]:
        """Reads the source from its beginning; memory holds a small part of it.

        Args:
            skipped: Counts, added to, of what is left out.

        Yields:
            The documents that are not empty, in order.

        Raises:
            DataError: It cannot be read, or does not hold what its kind promises.
        """


@dataclass(frozen=True)
class NoDocuments:
    """The part of a source that has none of it.

    Attributes:
        spec: What the user wrote.
    """

    spec: str
    offset: int = 0
    total_bytes: int = 0

    def listing_digest(self) -> str:
        """Returns that of no file."""
        return hashlib.sha256().hexdigest()

    def cut_by(self) -> str:
        """Says that there is nothing to cut."""
        return "nothing"

    def parts_of(self, size: int) -> int:
        """Returns 1: there is nothing to cut."""
        return 1

    def part(self, number: int, parts: int) -> "Source":
        """Returns itself."""
        return self

    def documents(self, skipped: Skipped | None = None) -> Iterator[Document]:
        """Gives none."""
        return iter(())
