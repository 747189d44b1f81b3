"""Sources of text: documents in an order that never changes, and the split that each belongs to.

Documents are dealt out to splits one by one, or by position where they are few.
"""

import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from polyad.data.prepared import SplitName


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


MOST_SLACK = 4096
"""Characters behind a border in which a line end, or white space, is looked for."""

_WHITE_SPACE = re.compile(r"\s")


class Sources(NamedTuple):
    """The text, by the split that it begins with, and the shares held out of the first.

    Attributes:
        by_split: A source for each.
        fractions: The shares.
        split_by: How they are held out.
        can_be_cut: Whether `part` may cut the first source.
        train_bytes: The bytes of all of the first source, where this is a part; else None.
    """

    by_split: dict[SplitName, Source]
    fractions: dict[SplitName, float]
    split_by: Literal["documents", "position"]
    can_be_cut: bool = True
    train_bytes: int | None = None

    def parts_of(self, size: int) -> int:
        """Says how many parts to cut into, so that those of the largest source have a size.

        Args:
            size: Bytes of a part, about.
        """
        if not self.can_be_cut:
            return 1
        return max(source.parts_of(size) for source in self.by_split.values())

    def part(self, number: int, parts: int) -> "Sources":
        """Cuts all sources between documents.

        Which split a document of the first source is dealt to depends on how many there are before
        it, which a part does not know: all that it has of them are of train here.

        Args:
            number: Which part, from 0.
            parts: How many.

        Returns:
            The part.
        """
        cut = {name: source.part(number, parts) for name, source in self.by_split.items()}
        train = self.by_split["train"]
        if not self.can_be_cut:
            cut["train"] = train if number == 0 else NoDocuments(train.spec)
        dealt = {} if self.split_by == "documents" else self.fractions
        return self._replace(by_split=cut, fractions=dealt, train_bytes=train.total_bytes)

    def assigned(self, skipped: Skipped) -> Iterator[tuple[SplitName, Document]]:
        """Reads all sources, each document with its split; `bytes_read` counts over all."""
        before = 0
        for name, source in self.by_split.items():
            documents = source.documents(skipped)
            fractions = self.fractions if name == "train" else {}
            if name == "train" and self.split_by == "position":
                total = self.train_bytes or source.total_bytes
                found = split_by_position(documents, total, fractions, source.offset)
            else:
                found = _dealt(documents, name, fractions)
            for split, document in found:
                done = before + document.bytes_read - source.offset
                yield split, document._replace(bytes_read=done)
            before += source.total_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all sources together."""
        return sum(source.total_bytes for source in self.by_split.values())


def split_of_documents(first: SplitName, fractions: dict[SplitName, float]) -> Iterator[SplitName]:
    """Deals documents out to the splits, evenly and always the same way.

    A held-out split takes document i (from 0) when it holds fewer than its fraction of i + 1
    documents. So each split's share is exact within one document at any time, documents that lie
    together in the source go to different splits in turn, and nothing needs to be known about what
    follows.

    Args:
        first: The split of the first document and of all that no other takes.
        fractions: The share of each other split, of all documents.

    Yields:
        The split of each document, without end.
    """
    counts = dict.fromkeys(fractions, 0)
    yield first
    number = 1
    while True:
        number += 1
        for name, fraction in fractions.items():
            if counts[name] < fraction * number:
                counts[name] += 1
                yield name
                break
        else:
            yield first


def documents_needed(fractions: dict[SplitName, float]) -> int:
    """Says how many documents it takes to deal them out one by one.

    Returns:
        So many that one is no more than the smallest share; 1 where nothing is held out.
    """
    held_out = [fraction for fraction in fractions.values() if fraction > 0]
    return math.ceil(1 / min(held_out) - 1e-6) if held_out else 1


def _dealt(
    documents: Iterator[Document], first: SplitName, fractions: dict[SplitName, float]
) -> Iterator[tuple[SplitName, Document]]:
    splits = split_of_documents(first, fractions)
    split = next(splits)
    for document in documents:
        yield split, document
        if document.is_last:
            split = next(splits)


def split_by_position(
    documents: Iterator[Document],
    total_bytes: int,
    fractions: dict[SplitName, float],
    start: int = 0,
) -> Iterator[tuple[SplitName, Document]]:
    """Lays documents end to end and holds the last parts out.

    A border lies behind the first line end at or behind its place, else before white space, both
    within a tenth of the smallest share and `MOST_SLACK` characters; else at its place. The
    document that it cuts is one document on either side.

    Yields:
        Each document or part of one, and its split.
    """
    held_out = {name: share for name, share in fractions.items() if share > 0}
    borders: list[tuple[float, SplitName]] = []
    before = 1 - sum(held_out.values())
    for name, share in held_out.items():
        borders.append((before * total_bytes, name))
        before += share
    slack = min(MOST_SLACK, int(min(held_out.values(), default=0) * total_bytes / 10))
    split: SplitName = "train"
    begun = False
    while borders and start > borders[0][0]:
        split = borders.pop(0)[1]
    for document in documents:
        text = document.text
        while borders and document.bytes_read > borders[0][0]:
            border, following = borders.pop(0)
            place = _border(text, max(0, math.ceil(border) - start), slack)
            head, text = text[:place], text[place:]
            start += len(head.encode())
            if head or begun:
                yield split, document._replace(text=head, bytes_read=start, is_last=True)
            split, begun = following, False
        start = document.bytes_read
        if text or begun:
            yield split, document._replace(text=text)
            begun = not document.is_last


def _border(text: str, offset: int, slack: int) -> int:
    """Finds the character at which a border near an offset in bytes is to lie."""
    place = len(text.encode()[:offset].decode(errors="ignore"))
    line_end = text.find("\n", max(0, place - 1), place + slack)
    if line_end >= 0:
        return line_end + 1
    space = _WHITE_SPACE.search(text, place, place + slack)
    return space.start() if space else place
