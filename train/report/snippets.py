"""The contexts of top tokens, as text: read again from the data and decoded in whole characters;
and which tokens are words or parts of words, and not only punctuation.

Shapes: B windows, T tokens of a window, V tokens of the vocabulary.
"""

import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyad.data.errors import DataError
from polyad.data.text.dataset import TokenStream
from polyad.data.text.tokenizers.tokenizer import Tokenizer

BEFORE, AFTER = 24, 12
"""Tokens shown around a token."""
_LONGEST_CHARACTER = 4
"""Bytes, each of which may be a token of its own in a byte-level vocabulary."""
AT_ONCE = 1 << 22
"""Tokens whose line ends are counted at a time."""
_UNFINISHED = "\ufffd"
_UNKNOWN = -1


class Place(NamedTuple):
    """Where a token stands, and what is shown around it; positions in the split."""

    position: int
    document: int
    """From 0."""
    offset: int
    """In the document, from 0."""
    first: int
    """The first token that is shown."""
    stop: int
    """One past the last."""
    read_first: int
    """The first token that is decoded: half a character before `first` is made whole."""
    read_stop: int
    """One past the last."""


class Piece(NamedTuple):
    """A stretch of text that belongs to one token, or to a few that share a character."""

    text: str
    coefficients: list[float]
    """The coefficients of its tokens."""
    is_peak: bool
    """Whether the token that the snippet is about is one of them."""


class Documents:
    """Finds the document of a position.

    Args:
        stream: a split.
    """

    def __init__(self, stream: TokenStream) -> None:
        self._stream = stream

    def place(self, position: int, window_first: int, window_stop: int) -> Place:
        """What to show around a token: of its own document and window, for other windows' tokens
        had another context. Only a character that the window's edge cuts is made whole.

        Args:
            position: of the token.
            window_first: position of the window's first token; may be -1, before all documents.
            window_stop: one past its last.
        """
        (document,), (offset,) = self._stream.locate(np.array([position]))
        document, begin = int(document), position - int(offset)
        end = begin + int(self._stream.document_lengths[document])
        low, high = max(begin, window_first), min(end, window_stop)
        first, stop = max(low, position - BEFORE), min(high, position + AFTER + 1)
        spare = _LONGEST_CHARACTER - 1
        return Place(
            position,
            document,
            position - begin,
            first,
            stop,
            max(begin, first - spare),
            min(end, stop + spare),
        )


def pieces(
    place: Place,
    ids: Sequence[int],
    coefficients: Sequence[float],
    decode: Callable[[Sequence[int]], str],
    end_of_text_id: int,
) -> list[Piece]:
    """Cuts a context into texts of single tokens, as far as characters allow.

    Args:
        place: says what is shown.
        ids: from `place.read_first` to `place.read_stop`.
        coefficients: as many.
        decode: of a tokenizer.
        end_of_text_id: shown as `<end of text>`.

    Returns:
        The text from `place.first` to `place.stop`; a character that an edge cuts is whole.
    """
    shown: list[Piece] = []
    begin, before = 0, ""
    for end in range(1, len(ids) + 1):
        ends = ids[end - 1] == end_of_text_id
        text = decode(ids[:end])
        new = text[len(before) :]
        unfinished = new.endswith(_UNFINISHED) and end - begin < _LONGEST_CHARACTER
        if unfinished and not ends and end < len(ids):
            continue
        low, high = place.read_first + begin, place.read_first + end
        if high > place.first and low < place.stop:
            shown.append(
                Piece(
                    "<end of text>" if ends else new,
                    [float(a) for a in coefficients[begin:end]],
                    low <= place.position < high,
                )
            )
        begin, before = end, text
    return shown


def has_word(text: str) -> bool:
    """Whether there is a letter, a digit or a picture in a text; else it is punctuation, operators,
    white space or control characters alone.

    Half a character, as a byte-level vocabulary has some, counts as a letter."""
    categories = map(unicodedata.category, text)
    # L, M and N are letters, their marks and numbers; So are pictures, and U+FFFD for half of one.
    return any(category[0] in "LMN" or category == "So" for category in categories)


def line_numbers(
    places: Iterable[Place], stream: TokenStream, tokenizer: Tokenizer
) -> dict[int, int]:
    """The lines in which tokens stand: of each the line of its first character that is no white
    space, if it has one.

    Args:
        places: of the tokens.
        stream: the split.
        tokenizer: of the ids.

    Returns:
        By position the line in the document, from 1; nothing where the tokens keep no line ends.
    """
    try:
        if sum(_breaks(tokenizer, token) for token in tokenizer.encode("a\n\na\n")) != 3:
            return {}
    except DataError:  # a vocabulary of words without one for unknown words
        return {}
    breaks_V = np.full(tokenizer.vocab_size, _UNKNOWN, dtype=np.int64)
    found: dict[int, int] = {}
    document, line, at = -1, 1, 0
    for place in sorted(set(places)):
        if place.document != document:
            document, line, at = place.document, 1, place.position - place.offset
        for first in range(at, place.position, AT_ONCE):
            tokens, counts = np.unique(
                stream.read(first, min(place.position, first + AT_ONCE)), return_counts=True
            )
            for token in tokens[breaks_V[tokens] == _UNKNOWN].tolist():
                breaks_V[token] = _breaks(tokenizer, token)
            line += int(counts @ breaks_V[tokens])
        at = place.position
        text = tokenizer.text_within(int(stream.read(at, at + 1)[0]))
        before = text[: len(text) - len(text.lstrip())] if text.strip() else ""
        found[at] = line + before.count("\n")
    return found


def _breaks(tokenizer: Tokenizer, token: int) -> int:
    return tokenizer.text_within(token).count("\n")


class WordTokens:
    """Tells words from punctuation by the ids of tokens; each id is decoded once.

    Args:
        tokenizer: of the ids. Its end of text is no word.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._is_word_V = torch.full((tokenizer.vocab_size,), _UNKNOWN, dtype=torch.int8)

    def __call__(self, ids_BT: Tensor) -> Tensor:
        """Looks at tokens.

        Args:
            ids_BT: on the CPU.

        Returns:
            Boolean, [B, T]: whether each is a word or a part of one.
        """
        for token in set(ids_BT[self._is_word_V[ids_BT] == _UNKNOWN].tolist()):
            ends = token == self._tokenizer.end_of_text_id
            self._is_word_V[token] = not ends and has_word(self._tokenizer.decode([token]))
        return self._is_word_V[ids_BT].bool()
