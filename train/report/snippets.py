"""Contexts of top tokens as text, read again from the data and decoded to whole characters; and
which tokens are words or parts of words, not only punctuation.

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
"""Number of tokens shown around a token."""
_LONGEST_CHARACTER = 4
"""Maximum bytes of a character; each may be a token in a byte-level vocabulary."""
AT_ONCE = 1 << 22
"""Number of tokens whose line ends are counted at a time."""
_UNFINISHED = "\ufffd"
_UNKNOWN = -1


class Place(NamedTuple):
    """The location of a token, and the context to show; positions in the split."""

    position: int
    document: int
    """From 0."""
    offset: int
    """Position in the document, from 0."""
    first: int
    """The first token to show."""
    stop: int
    """One past the last."""
    read_first: int
    """The first token to decode, to complete a character that `first` cuts."""
    read_stop: int
    """One past the last."""


class Piece(NamedTuple):
    """A piece of text that belongs to one token, or to a few that share a character."""

    text: str
    coefficients: list[float]
    """The coefficients of its tokens."""
    is_peak: bool
    """Whether it includes the snippet's top token."""


class Documents:
    """Finds the document of a position.

    Args:
        stream: a split.
    """

    def __init__(self, stream: TokenStream) -> None:
        self._stream = stream

    def place(self, position: int, window_first: int, window_stop: int) -> Place:
        """Returns what to show around a token, within its document and window.

        Tokens of other windows had a different context; they only complete a character at the edge.

        Args:
            position: the token's position.
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
    """Splits a context into texts of single tokens, as far as characters allow.

    Args:
        place: the location and context.
        ids: token ids from `place.read_first` to `place.read_stop`.
        coefficients: their coefficients.
        decode: the tokenizer's `decode`.
        end_of_text_id: shown as `<end of text>`.

    Returns:
        The text from `place.first` to `place.stop`, with whole characters at the edges.
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
    """Whether a text has a letter, a digit or a pictograph, not only punctuation, operators, white
    space or control characters.

    An incomplete character of a byte-level vocabulary counts as a letter."""
    categories = map(unicodedata.category, text)
    # L, M and N are letters, marks and numbers; So are pictographs, and U+FFFD for incomplete ones.
    return any(category[0] in "LMN" or category == "So" for category in categories)


def line_numbers(
    places: Iterable[Place], stream: TokenStream, tokenizer: Tokenizer
) -> dict[int, int]:
    """Finds the line of each token, by its first character that is not white space, if any.

    Args:
        places: the tokens' places.
        stream: the split.
        tokenizer: the tokenizer of the ids.

    Returns:
        Line in the document, from 1, by position; empty if tokens do not preserve line ends.
    """
    try:
        if sum(_breaks(tokenizer, token) for token in tokenizer.encode("a\n\na\n")) != 3:
            return {}
    except DataError:  # a word vocabulary without an unknown token
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
    """Distinguishes words from punctuation by token id; each id is decoded once.

    Args:
        tokenizer: the tokenizer of the ids. Its end-of-text token is not a word.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._is_word_V = torch.full((tokenizer.vocab_size,), _UNKNOWN, dtype=torch.int8)

    def __call__(self, ids_BT: Tensor) -> Tensor:
        """Classifies tokens.

        Args:
            ids_BT: token ids, on the CPU.

        Returns:
            Boolean [B, T]: whether each is a word or a part of one.
        """
        for token in set(ids_BT[self._is_word_V[ids_BT] == _UNKNOWN].tolist()):
            ends = token == self._tokenizer.end_of_text_id
            self._is_word_V[token] = not ends and has_word(self._tokenizer.decode([token]))
        return self._is_word_V[ids_BT].bool()
