"""Writes documents to the files of their splits: encodes them in batches, with bounded memory."""

import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from polyad.data.errors import DataError
from polyad.data.prepared import SPLITS, SplitName
from polyad.data.text.dataset import token_dtype
from polyad.data.text.manifest import SplitInfo
from polyad.data.text.tokenizers.tokenizer import Tokenizer

PIECE_CHARACTERS = 128 * 1024
"""A document longer than this is encoded in pieces of about this many characters, on all cores."""
BATCH_CHARACTERS = 512 * 1024
"""Characters encoded per batch; document lengths differ too much to count documents."""

# After a single line feed, or before a single space and a letter: pre-tokenizers like GPT-2's begin
# a token there whatever comes before. This does not hold for runs of white space.
_TOKEN_BOUNDARY = re.compile(r"(?<=\S)(?:\n(?=\S)|(?= [^\W\d_]))")


def cut_between_words(text: str, size: int = PIECE_CHARACTERS) -> Iterator[str]:
    """Cuts a text only where no token of a GPT-2-like tokenizer spans the cut.

    Args:
        text: Any text.
        size: Minimum length of a piece except the last, in characters.

    Yields:
        Pieces whose concatenation is the text, each cut after a single line feed, or before a
        single space and a letter, between characters that are not white space; a text without such
        a place is one piece.
    """
    start = 0
    while match := _TOKEN_BOUNDARY.search(text, start + size - 1):
        yield text[start : match.end()]
        start = match.end()
    yield text[start:]


class SplitWriter:
    """Writes a split's `.bin` and `.idx` with megatron-core's builder, and counts them.

    Args:
        prefix: The files' common path, without `.bin` and `.idx`.
        tokenizer: The tokenizer, which determines the token type and the ends of documents.
    """

    def __init__(self, prefix: Path, tokenizer: Tokenizer) -> None:
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._before, self._end = tokenizer.before, tokenizer.end_of_text_id
        self._prefix = prefix
        self._builder = _builder(prefix.with_suffix(".bin"), self._dtype)
        self._length = 0  # of the document that is being written
        self._documents = self._words = self._bytes = 0
        self.tokens = 0
        """Tokens written so far."""

    def add(self, ids: Sequence[int], text: str, *, is_last: bool = True) -> None:
        """Appends a document, or the next piece of one.

        Args:
            ids: The tokens of its text.
            text: Its text.
            is_last: Whether the document ends here.
        """
        before = [] if self._length else self._before
        tokens = np.array([*before, *ids, *([self._end] if is_last else [])], dtype=self._dtype)
        self._length += len(tokens)
        self.tokens += len(tokens)
        self._words += len(text.split())
        self._bytes += len(text.encode("utf-8"))
        if is_last:
            self._builder.add_document(tokens, [self._length])
            self._documents, self._length = self._documents + 1, 0
        else:
            self._builder.data_file.write(tokens.tobytes())

    def copy(self, prefix: Path, split: SplitInfo) -> None:
        """Appends all documents of another split.

        Args:
            prefix: The path of its files.
            split: Its counts.
        """
        if split.documents:
            self._builder.add_index(str(prefix))
        self._documents += split.documents
        self.tokens += split.tokens
        self._words += split.words
        self._bytes += split.bytes

    def finish(self) -> SplitInfo:
        """Writes the index; returns the counts of the split."""
        self._builder.finalize(str(self._prefix.with_suffix(".idx")))
        return SplitInfo(
            documents=self._documents, tokens=self.tokens, words=self._words, bytes=self._bytes
        )

    def close(self) -> None:
        """Closes the file, finished or not."""
        self._builder.data_file.close()


def _builder(path: Path, dtype: type[np.uint16] | type[np.int32]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of kernels that are not used here
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    return IndexedDatasetBuilder(str(path), dtype)


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
        self._in_pieces = tokenizer.encodes_in_pieces()
        self._pending: list[_Piece] = []
        self._pending_characters = 0
        self._running: tuple[list[_Piece], Future[list[list[int]]]] | None = None
        self._splits = {name: SplitWriter(folder / name, tokenizer) for name in SPLITS}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="encode")

    @property
    def tokens(self) -> int:
        """Tokens written so far, in all splits."""
        return sum(writer.tokens for writer in self._splits.values())

    def add(self, split: SplitName, text: str, name: str) -> None:
        """Appends a document.

        Args:
            split: The split that it belongs to.
            text: Its text.
            name: Its name, for error messages.
        """
        pieces = cut_between_words(text) if self._in_pieces else iter([text])
        held = next(pieces)
        for piece in pieces:
            self._add_piece(_Piece(split, held, False, name))
            held = piece
        self._add_piece(_Piece(split, held, True, name))

    def finish(self) -> dict[SplitName, SplitInfo]:
        """Encodes what is pending and finishes all files.

        Returns:
            The counts of each split.
        """
        self._encode_pending()
        self._encode_pending()
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
        self._running = (pieces, self._thread.submit(self._encode, pieces))
        if before is not None:
            self._write(*before)

    def _encode(self, pieces: "list[_Piece]") -> list[list[int]]:
        texts = [piece.text for piece in pieces]
        try:
            batch = self._tokenizer.encode_batch(texts)
        except DataError:
            for piece in pieces:
                try:
                    self._tokenizer.encode_batch([piece.text])
                except DataError as error:
                    raise DataError(f"{piece.name}: {error}") from None
            raise
        self.special += self._tokenizer.special_in(texts, batch)
        return batch

    def _write(self, pieces: "list[_Piece]", future: "Future[list[list[int]]]") -> None:
        for piece, ids in zip(pieces, future.result(), strict=True):
            self._splits[piece.split].add(ids, piece.text, is_last=piece.is_last)


class _Piece(NamedTuple):
    split: SplitName
    text: str
    is_last: bool
    name: str


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[list[int]]:
    """Encodes whole documents as `DatasetWriter` does, long ones in pieces.

    Args:
        tokenizer: The tokenizer.
        texts: Any texts.

    Yields:
        The ids of each text.
    """
    cuts = tokenizer.encodes_in_pieces()
    pieces = [list(cut_between_words(text)) if cuts else [text] for text in texts]
    encoded = iter(tokenizer.encode_batch(list(chain.from_iterable(pieces))))
    for parts in pieces:
        yield list(chain.from_iterable(islice(encoded, len(parts))))
