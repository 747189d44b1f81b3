"""Splits documents one by one, or by position if there are few; shares are of bytes."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from polyad.data.names import SplitName
from polyad.data.text.sources import Document, Source

MOST_SLACK = 4096
"""Characters after a border in which a line end, or white space, is searched for."""

_WHITE_SPACE = re.compile(r"\s")


class Sources(NamedTuple):
    """The text by its initial split, and the shares held out of the first source.

    Attributes:
        by_split: A source for each split.
        fractions: The shares to hold out.
        split_by: How they are held out.
    """

    by_split: dict[SplitName, Source]
    fractions: dict[SplitName, float]
    split_by: Literal["documents", "position"]

    def assigned(self, left_out: Counter[str]) -> Iterator[tuple[SplitName, Document]]:
        """Reads all sources, each document with its split.

        Args:
            left_out: Counts what is left out of the text.
        """
        for name, source in self.by_split.items():
            documents = source.documents(left_out)
            if name != "train":
                yield from ((name, document) for document in documents)
            elif self.split_by == "position":
                yield from split_by_position(list(documents), self.fractions)
            else:
                yield from split_by_bytes(documents, self.fractions)

    @property
    def total_bytes(self) -> int:
        """Bytes of all sources together."""
        return sum(source.total_bytes for source in self.by_split.values())


def split_by_bytes(
    documents: Iterable[Document], fractions: dict[SplitName, float]
) -> Iterator[tuple[SplitName, Document]]:
    """Holds documents out by shares of the bytes of all so far.

    A held-out split that has less than its fraction takes the next document of at most twice the
    mean size, and any document that brings its share closer to the fraction. So each split keeps
    its fraction within about a document of usual size, and does not prefer small documents to usual
    ones. Until there are `documents_needed`, no mean is known, and the second rule holds alone.

    Args:
        documents: The documents.
        fractions: The fraction of all bytes for each held-out split; train takes the others.

    Yields:
        Each document and its split.
    """
    needed, total = documents_needed(fractions), 0
    held = dict.fromkeys(fractions, 0)
    for number, document in enumerate(documents, start=1):
        size = document.size
        total += size
        is_usual = number >= needed and size * number <= 2 * total
        split: SplitName = "train"
        for name, fraction in fractions.items():
            goal = fraction * total
            # The second: |held + size - goal| < |held - goal|.
            if (is_usual and held[name] < goal) or held[name] + size / 2 < goal:
                held[name] += size
                split = name
                break
        yield split, document


def documents_needed(fractions: dict[SplitName, float]) -> int:
    """Returns the number of documents needed to assign them one by one.

    Returns:
        The number at which one document is at most the smallest share; 1 if nothing is held out.
    """
    held_out = [fraction for fraction in fractions.values() if fraction > 0]
    return math.ceil(1 / min(held_out) - 1e-6) if held_out else 1


def split_by_position(
    documents: Sequence[Document], fractions: dict[SplitName, float]
) -> Iterator[tuple[SplitName, Document]]:
    """Lays a few documents end to end and holds the last parts out.

    A border is after the first line end at or behind its nominal place, else before white space,
    both within a tenth of the smallest share and `MOST_SLACK` characters; else at the nominal
    place. A document that it cuts becomes one document on either side.

    Yields:
        Each document or part of one, and its split.
    """
    held_out = {name: share for name, share in fractions.items() if share > 0}
    total = sum(document.size for document in documents)
    borders: list[tuple[float, SplitName]] = []
    before = 1 - sum(held_out.values())
    for name, share in held_out.items():
        borders.append((before * total, name))
        before += share
    slack = min(MOST_SLACK, int(min(held_out.values(), default=0) * total / 10))
    split: SplitName = "train"
    start = 0
    for document in documents:
        text, stop = document.text, start + document.size
        while borders and stop > borders[0][0]:
            border, following = borders.pop(0)
            place = _border(text, max(0, math.ceil(border) - start), slack)
            if head := text[:place]:
                yield split, document._replace(text=head)
            start += len(head.encode())
            text, split = text[place:], following
        if text:
            yield split, document._replace(text=text)
        start = stop


def _border(text: str, offset: int, slack: int) -> int:
    """Finds the character position of a border near a byte offset."""
    place = len(text.encode()[:offset].decode(errors="ignore"))
    line_end = text.find("\n", max(0, place - 1), place + slack)
    if line_end >= 0:
        return line_end + 1
    space = _WHITE_SPACE.search(text, place, place + slack)
    return space.start() if space else place
