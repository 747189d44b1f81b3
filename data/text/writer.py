"""Writes documents to the files of their splits: encodes them in batches, with bounded memory.

A long text is cut into pieces that have the same tokens as the whole.
"""

import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from polyad.data.errors import DataError
from polyad.data.prepared import SPLITS, SplitName
from polyad.data.text.indexed import SplitWriter
from polyad.data.text.manifest import SplitInfo
from polyad.data.text.tokenizers.tokenizer import Tokenizer, UnknownWordError

PIECE_CHARACTERS = 128 * 1024
"""A document longer than this is encoded in pieces of about this many characters."""
HELD_CHARACTERS = 4 * 1024 * 1024
"""Maximum number of characters held while looking for a place to cut."""

# After a single line feed, or before a single space and a letter: pre-tokenizers like GPT-2's begin
# a token there whatever comes before. This does not hold for runs of white space.
_TOKEN_BOUNDARY = re.compile(r"(?<=\S)(?:\n(?=\S)|(?= [^\W\d_]))")
_BOUNDARY_CHARACTERS = 3
"""Number of adjacent characters needed to recognize a boundary."""


class PieceCutter:
    """Cuts a document that arrives in parts exactly as if it had arrived whole.

    Memory holds the text since the last cut. If that reaches `HELD_CHARACTERS` before the document
    ends, it is cut after the last line feed in it, else before the last word, else at its end.

    Args:
        size: Minimum length of a piece except the last; None cuts only to bound memory.
        most: Maximum number of characters held.

    Attributes:
        held: Text since the last cut.
        forced: Number of cuts made to bound memory, which may change the tokens.
    """

    def __init__(self, size: int | None = PIECE_CHARACTERS, most: int = HELD_CHARACTERS) -> None:
        self._size, self._most = size, most
        self.held = ""
        self.forced = 0

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "PieceCutter":
        """Makes a cutter for a tokenizer.

        Args:
            tokenizer: The tokenizer that encodes the pieces.
        """
        size = PIECE_CHARACTERS if tokenizer.encodes_in_pieces() else None
        return cls(size)

    def add(self, text: str, *, is_last: bool) -> Iterator[str]:
        """Adds the next part of a document.

        Args:
            text: Any text.
            is_last: Whether the document ends with it; `take_rest` then gives the last piece.

        Yields:
            The complete pieces so far.
        """
        # A boundary at the end of the held text is recognized only with the text that follows.
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
    """Cuts a text only where no token of a GPT-2-like tokenizer spans the cut.

    Yields:
        Pieces whose concatenation is the text, each cut after a single line feed, or before a
        single space and a letter, between characters that are not white space; a text without such
        a place is one piece.
    """
    cutter = PieceCutter(size)
    yield from cutter.add(text, is_last=True)
    yield cutter.take_rest()


def _last_place(text: str) -> int:
    """Finds the last acceptable place to cut a text that has no better one."""
    if line_end := text.rfind("\n", 1) + 1:
        return line_end
    words = text.rsplit(maxsplit=1)
    return max(1, text.rfind(words[1]) - 1) if len(words) == 2 else len(text)


BATCH_CHARACTERS = 512 * 1024
"""Characters encoded per batch; document lengths differ too much to count documents."""


class DatasetWriter:
    """Encodes documents of all splits together and writes each to the files of its split.

    A batch is encoded in a separate thread, which needs Python's lock only at its end, while the
    documents of the next batch are read and the tokens of the previous one are written.

    Args:
        folder: The folder to write to.
        tokenizer: Encodes the text.

    Attributes:
        special: Special tokens in the text that were encoded as ordinary characters.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.special: Counter[str] = Counter()
        self._cutter = PieceCutter.of(tokenizer)
        self._pending: list[_Piece] = []
        self._pending_characters = 0
        self._running: tuple[list[_Piece], Future[list[list[int]]]] | None = None
        self._splits = {name: SplitWriter(folder / name, tokenizer) for name in SPLITS}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="encode")

    @property
    def tokens(self) -> int:
        """Tokens written so far, in all splits."""
        return sum(writer.tokens for writer in self._splits.values())

    @property
    def forced_cuts(self) -> int:
        """Number of cuts at which the tokens may differ from those of the whole text."""
        return self._cutter.forced

    def add(self, split: SplitName, text: str, name: str, is_last: bool = True) -> None:
        """Appends a document, or the next part of one.

        Args:
            split: The split that it belongs to.
            text: Its text.
            name: Its name, for error messages.
            is_last: Whether the document ends here.
        """
        for piece in self._cutter.add(text, is_last=is_last):
            self._add_piece(_Piece(split, piece, False, name))
        if is_last:
            self._add_piece(_Piece(split, self._cutter.take_rest(), True, name))

    def finish(self) -> dict[SplitName, SplitInfo]:
        """Encodes what is pending and finishes all files.

        Returns:
            The counts of each split.
        """
        self._encode_pending()
        self._write_encoded()
        return {name: writer.finish() for name, writer in self._splits.items()}

    def close(self) -> None:
        """Closes the files, finished or not."""
        self._thread.shutdown(cancel_futures=True)
        for writer in self._splits.values():
            writer.close()

    def _add_piece(self, piece: "_Piece") -> None:
        self._pending.append(piece)
        self._pending_characters += len(piece.text)
        if self._pending_characters >= BATCH_CHARACTERS:
            self._encode_pending()

    def _encode_pending(self) -> None:
        """Waits for the previous batch, starts to encode the pending one, writes the previous."""
        pieces, self._pending, self._pending_characters = self._pending, [], 0
        before = self._running
        texts = [piece.text for piece in pieces]
        self._running = (pieces, self._thread.submit(self._encode, texts))
        self._write(before)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        batch = self._tokenizer.encode_batch(texts)
        self.special += self._tokenizer.special_in(texts, batch)
        return batch

    def _write_encoded(self) -> None:
        running, self._running = self._running, None
        self._write(running)

    def _write(self, encoded: "tuple[list[_Piece], Future[list[list[int]]]] | None") -> None:
        if encoded is None:
            return
        pieces, future = encoded
        try:
            batch = future.result()
        except UnknownWordError as error:
            raise DataError(f"{pieces[error.row].name}: {error}") from None
        for piece, ids in zip(pieces, batch, strict=True):
            self._splits[piece.split].add(ids, piece.text, is_last=piece.is_last)


class _Piece(NamedTuple):
    split: SplitName
    text: str
    is_last: bool
    name: str
