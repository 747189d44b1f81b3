"""Documents in, token files out: batches of text are encoded together, memory stays bounded."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from data.errors import DataError
from data.indexed import indexed_dataset
from data.manifest import SPLITS, SplitInfo, SplitName, ends_digest, flush_to_disk
from data.tokenizer import Tokenizer, UnknownWordError

PIECE_CHARACTERS = 128 * 1024
"""A document longer than this is encoded in pieces of about this many characters."""
BATCH_CHARACTERS = 512 * 1024
"""Text encoded at once: by its amount, not by documents, whose lengths differ by thousands."""
MOST_TOKENS = 2**31 - 1
"""Tokens of a document: the index holds lengths in 32 bits."""

# Behind a lone line feed, or before a lone space and a letter: the pre-tokenizers of GPT-2 and its
# kin begin a token there whatever comes before. Runs of white space are another matter.
_TOKEN_BOUNDARY = re.compile(r"(?<=\S)(?:\n(?=\S)|(?= [^\W\d_]))")


class _Piece(NamedTuple):
    split: SplitName
    text: str
    is_last: bool
    name: str


def cut_between_words(text: str, size: int = PIECE_CHARACTERS) -> Iterator[str]:
    r"""Cuts a text where no token of a GPT-2-like tokenizer reaches across.

    Args:
        text: Any text.
        size: Fewest characters of a piece but the last.

    Yields:
        Pieces whose concatenation is the text, each cut behind a single line feed, or before a
        single space and a letter, between characters that are not white space; a text without such
        a place comes in one.
    """
    start = 0
    while len(text) - start > size and (match := _TOKEN_BOUNDARY.search(text, start + size - 1)):
        yield text[start : match.end()]
        start = match.end()
    yield text[start:]


class SplitWriter:
    """Writes one split's `.bin` and `.idx` and counts what goes in.

    megatron-core's builder keeps a number per document in a Python list until the end: 40 bytes a
    document is what memory grows by.

    Args:
        prefix: The files' common path, without `.bin` and `.idx`.
        tokenizer: Says how wide a token is, and which one ends a document.
    """

    def __init__(self, prefix: Path, tokenizer: Tokenizer) -> None:
        module = indexed_dataset()
        self.dtype = np.dtype(module.DType.optimal_dtype(tokenizer.vocab_size))
        self.documents = self.tokens = self.words = self.bytes = 0
        self._bin, self._idx = prefix.with_suffix(".bin"), prefix.with_suffix(".idx")
        self._builder = module.IndexedDatasetBuilder(str(self._bin), dtype=self.dtype.type)
        self._digest = hashlib.sha256()
        self._end = np.array([tokenizer.end_of_text_id], dtype=self.dtype)
        self._parts: list[npt.NDArray[np.integer]] = []

    def add(self, ids: list[int], text: str, *, is_last: bool, name: str) -> None:
        """Appends a piece of a document.

        Args:
            ids: Its tokens.
            text: Its text, to be counted.
            is_last: Whether the document ends here; the end-of-text token is added then.
            name: The document's name, for an error.
        """
        self.words += len(text.split())
        self.bytes += len(text.encode("utf-8"))
        self._parts.append(np.array(ids, dtype=self.dtype))
        if not is_last:
            return
        tokens = np.concatenate([*self._parts, self._end])
        self._parts.clear()
        if len(tokens) > MOST_TOKENS:
            raise DataError(
                f"{name}: {len(tokens):,} tokens; a document has at most {MOST_TOKENS:,}"
            )
        self._builder.add_document(tokens, [len(tokens)])
        self._digest.update(tokens.data)
        self.documents += 1
        self.tokens += len(tokens)

    def finish(self) -> SplitInfo:
        """Writes the index and waits until both files are on the disk.

        Returns:
            What the split holds.
        """
        self._builder.finalize(str(self._idx))
        flush_to_disk(self._bin)
        flush_to_disk(self._idx)
        return SplitInfo(
            documents=self.documents,
            tokens=self.tokens,
            words=self.words,
            bytes=self.bytes,
            sha256=self._digest.hexdigest(),
            ends_sha256=ends_digest(self._bin, self._idx),
        )

    def close(self) -> None:
        """Closes the file of an unfinished split."""
        self._builder.data_file.close()


class DatasetWriter:
    """Encodes documents of all splits together and hands each split its own.

    Args:
        folder: Where the files go.
        tokenizer: Encodes the text.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cuts = tokenizer.encodes_in_pieces()
        self._pending: list[_Piece] = []
        self._pending_characters = 0
        self._splits = {name: SplitWriter(folder / name, tokenizer) for name in SPLITS}
        self.dtype = self._splits["train"].dtype

    @property
    def tokens(self) -> int:
        """Tokens written so far, in all splits."""
        return sum(writer.tokens for writer in self._splits.values())

    def add(self, split: SplitName, text: str, name: str) -> None:
        """Appends a document.

        Args:
            split: The split that it belongs to.
            text: Its text.
            name: Its name, for an error.
        """
        held = ""
        for piece in cut_between_words(text) if self._cuts else (text,):
            if held:
                self._add_piece(_Piece(split, held, False, name))
            held = piece
        self._add_piece(_Piece(split, held, True, name))

    def finish(self) -> dict[SplitName, SplitInfo]:
        """Encodes what is pending and completes the files.

        Returns:
            What each split holds.
        """
        self._encode_pending()
        return {name: writer.finish() for name, writer in self._splits.items()}

    def close(self) -> None:
        """Closes the files of an unfinished data set."""
        for writer in self._splits.values():
            writer.close()

    def _add_piece(self, piece: _Piece) -> None:
        self._pending.append(piece)
        self._pending_characters += len(piece.text)
        if self._pending_characters >= BATCH_CHARACTERS:
            self._encode_pending()

    def _encode_pending(self) -> None:
        try:
            batch = self._tokenizer.encode_batch([piece.text for piece in self._pending])
        except UnknownWordError as error:
            raise DataError(f"{self._pending[error.row].name}: {error}") from None
        for piece, ids in zip(self._pending, batch, strict=True):
            self._splits[piece.split].add(ids, piece.text, is_last=piece.is_last, name=piece.name)
        self._pending.clear()
        self._pending_characters = 0
