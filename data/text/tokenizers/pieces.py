"""Cuts long texts so that the tokens of the pieces are those of the whole."""

import re
from collections.abc import Iterator

from polyad.data.text.tokenizers.tokenizer import Tokenizer

PIECE_CHARACTERS = 128 * 1024
"""A document longer than this is encoded in pieces of about this many characters."""
HELD_CHARACTERS = 4 * 1024 * 1024
"""Characters at most that are held until there is a place to cut at."""

# Behind a lone line feed, or before a lone space and a letter: the pre-tokenizers of GPT-2 and its
# kin begin a token there whatever comes before. Runs of white space are another matter.
_TOKEN_BOUNDARY = re.compile(r"(?<=\S)(?:\n(?=\S)|(?= [^\W\d_]))")
_BOUNDARY_CHARACTERS = 3
"""Adjacent characters that are needed to find a boundary."""


class PieceCutter:
    """Cuts a document that comes in parts as it would be cut whole.

    Memory holds the text since the last cut. Where that grows to `HELD_CHARACTERS` and the document
    goes on, it is cut behind the last line feed in it, else before the last word, else at its end.

    Args:
        size: Fewest characters of a piece but the last; None cuts only where memory demands it.
        most: Characters held.

    Attributes:
        held: Text since the last cut.
        forced: Cuts that memory demanded, at which the tokens of the whole may be others.
    """

    def __init__(self, size: int | None = PIECE_CHARACTERS, most: int = HELD_CHARACTERS) -> None:
        self._size, self._most = size, most
        self.held = ""
        self.forced = 0

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "PieceCutter":
        """Makes a cutter for a tokenizer, by whether it encodes in pieces and how much text grows.

        Args:
            tokenizer: That encodes the pieces.
        """
        size = PIECE_CHARACTERS if tokenizer.encodes_in_pieces() else None
        return cls(size, HELD_CHARACTERS // tokenizer.growth)

    def add(self, text: str, *, is_last: bool) -> Iterator[str]:
        """Takes the next part of a document.

        Args:
            text: Any text.
            is_last: Whether the document ends with it; `take_rest` then gives the last piece.

        Yields:
            The pieces before the last place to cut at.
        """
        # A boundary at the end of what was held is seen with what follows it.
        searched = len(self.held) - _BOUNDARY_CHARACTERS
        whole, start = self.held + text, 0
        while self._size is not None and len(whole) - start > self._size:
            match = _TOKEN_BOUNDARY.search(whole, max(start + self._size - 1, searched))
            if match is None:
                break
            yield whole[start : match.end()]
            start = match.end()
        self.held = whole[start:]
        if len(self.held) > self._most and not is_last:
            cut = _last_place(self.held)
            piece, self.held = self.held[:cut], self.held[cut:]
            self.forced += 1
            yield piece

    def take_rest(self) -> str:
        """Ends the document.

        Returns:
            Its last piece.
        """
        rest, self.held = self.held, ""
        return rest


def cut_between_words(text: str, size: int = PIECE_CHARACTERS) -> Iterator[str]:
    """Cuts a text where no token of a GPT-2-like tokenizer reaches across.

    Args:
        text: Any text, all of it.
        size: Fewest characters of a piece but the last.

    Yields:
        Pieces whose concatenation is the text, each cut behind a single line feed, or before a
        single space and a letter, between characters that are not white space; a text without such
        a place comes in one.
    """
    cutter = PieceCutter(size)
    yield from cutter.add(text, is_last=True)
    yield cutter.take_rest()


def _last_place(text: str) -> int:
    """Finds the last place where a text may be cut that has no better one."""
    if line_end := text.rfind("\n", 1) + 1:
        return line_end
    words = text.rsplit(maxsplit=1)
    return max(1, text.rfind(words[1]) - 1) if len(words) == 2 else len(text)
