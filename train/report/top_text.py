"""Tokens of held-out text with each expert's highest weights, in their context.

Shapes: B windows, T tokens of a window, S experts of all levels side by side.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from polyad.train.experts.probing import RoutedLayer
from polyad.train.reading import Reading
from polyad.train.report.top_tokens import ShownExpert, TopTokens
from polyad.train.tasks.samples import TextSamples

BEFORE, AFTER = 16, 8
"""Number of tokens shown around a token."""
OF_ONE_DOCUMENT = 2
"""Maximum number of an expert's contexts from one document."""
CANDIDATES = 4
"""Number of tokens kept per context shown, since those of one document are left out."""
LONGEST_CHARACTER = 4
"""Maximum bytes of a character; each may be a token in a byte-level vocabulary."""
UNFINISHED = "\ufffd"


class Context(NamedTuple):
    """A token with a high weight of an expert, and the text of its document around it."""

    weight: float
    position: int
    """The token's position in its split."""
    document: int
    """From 0."""
    offset: int
    """The token's position in its document, from 0."""
    before: str
    token: str
    after: str


def split_text(
    ids: Sequence[int], at: int, decode: Callable[[Sequence[int]], str]
) -> tuple[str, str, str]:
    """Splits a text at one of its tokens, with the other tokens of a character that it is part of.

    Args:
        ids: token ids.
        at: the token's index.
        decode: the tokenizer's `decode`.

    Returns:
        The text before, the token's, and the text after, without incomplete characters at the ends.
    """
    first, stop = at, at + 1
    while decode(ids[:first]).endswith(UNFINISHED) and first > max(0, at - LONGEST_CHARACTER + 1):
        first -= 1
    while decode(ids[:stop]).endswith(UNFINISHED) and stop < min(len(ids), at + LONGEST_CHARACTER):
        stop += 1
    before, upto, whole = (decode(ids[:end]) for end in (first, stop, len(ids)))
    return before.lstrip(UNFINISHED), upto[len(before) :], whole[len(upto) :].rstrip(UNFINISHED)


class TopText:
    """Collects the top tokens of each expert.

    Args:
        layers: the layers whose experts are shown.
        text: the text to read.
        top: number of contexts per expert.
        device: the model's device.
    """

    def __init__(
        self, layers: Sequence[RoutedLayer], text: TextSamples, top: int, device: str
    ) -> None:
        self._text, self._top = text, top
        self._tops = {each.name: TopTokens(each, CANDIDATES * top, device) for each in layers}

    def add(self, reading: Reading) -> None:
        """Adds a batch."""
        position_BT = self._text.position_BT(reading.batch)
        for name, decision in reading.of_all_tokens.items():
            a_BTS = decision.coefficients().view(*position_BT.shape, -1)
            self._tops[name].add(a_BTS, position_BT)

    @property
    def tokens(self) -> int:
        """Number of tokens read."""
        return next(iter(self._tops.values())).tokens

    def result(self, experts: Sequence[str]) -> dict[str, list[ShownExpert]]:
        """Returns the experts to show in each layer.

        Args:
            experts: names of experts in every layer; empty: some are picked.

        Raises:
            ConfigError: weights are not finite.
        """
        return {
            name: [
                top.shown(column, [self._context(*at) for at in self._places(top, column)])
                for column in top.columns(experts)
            ]
            for name, top in self._tops.items()
        }

    def _places(self, top: TopTokens, column: int) -> list[tuple[float, int, int, int]]:
        """Weight, position, document and offset of an expert's tokens."""
        places, of_document = list[tuple[float, int, int, int]](), Counter[int]()
        for weight, position in top.highest(column):
            (document,), (offset,) = self._text.stream.locate(np.array([position]))
            of_document[document] += 1
            if of_document[document] <= OF_ONE_DOCUMENT and len(places) < self._top:
                places.append((weight, position, int(document), int(offset)))
        return places

    def _context(self, weight: float, position: int, document: int, offset: int) -> Context:
        stream, tokenizer = self._text.stream, self._text.tokenizer
        length = int(stream.document_lengths[document])
        first, stop = max(0, offset - BEFORE), min(length, offset + AFTER + 1)
        ids = stream.read(position - offset + first, position - offset + stop).tolist()
        before, token, after = split_text(ids, offset - first, tokenizer.decode)
        if ids[offset - first] == tokenizer.end_of_text_id:
            token = "<end of text>"
        return Context(weight, position, document, offset, before, token, after)
