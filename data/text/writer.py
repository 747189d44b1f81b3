"""Writes documents to the files of their splits: encodes them in batches, with bounded memory."""

import contextlib
import re
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from polyad.data.errors import DataError
from polyad.data.prepared import SPLITS, SplitName
from polyad.data.text.dataset import token_dtype
from polyad.data.text.manifest import SplitInfo
from polyad.data.text.sources import Document
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


class _Piece(NamedTuple):
    split: SplitName
    text: str
    is_last: bool
    name: str


def write_documents(
    folder: Path, tokenizer: Tokenizer, documents: Iterable[tuple[SplitName, Document]]
) -> tuple[dict[SplitName, SplitInfo], Counter[str]]:
    """Encodes documents of all splits together and writes each to the files of its split.

    A batch is encoded in a separate thread, which needs Python's lock only at its end, while the
    documents of the next batch are read and the tokens of the previous one are written.

    Args:
        folder: The folder to write to.
        tokenizer: Encodes the text.
        documents: The documents, each with its split.

    Returns:
        The counts of each split, and how many special tokens of which kind in the text were encoded
        as ordinary characters.

    Raises:
        DataError: A document cannot be encoded.
    """
    special: Counter[str] = Counter()

    def encode(pieces: list[_Piece]) -> list[list[int]]:
        texts = [piece.text for piece in pieces]
        try:
            batch = tokenizer.encode_batch(texts)
        except DataError:
            for piece in pieces:
                try:
                    tokenizer.encode_batch([piece.text])
                except DataError as error:
                    raise DataError(f"{piece.name}: {error}") from None
            raise
        special.update(tokenizer.special_in(texts, batch))
        return batch

    with contextlib.ExitStack() as stack:
        splits = {
            name: stack.enter_context(contextlib.closing(SplitWriter(folder / name, tokenizer)))
            for name in SPLITS
        }
        thread = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="encode"))
        waiting: deque[tuple[list[_Piece], Future[list[list[int]]]]] = deque()

        def write_first() -> None:
            pieces, future = waiting.popleft()
            for piece, ids in zip(pieces, future.result(), strict=True):
                splits[piece.split].add(ids, piece.text, is_last=piece.is_last)

        for batch in _batches(_pieces(tokenizer, documents)):
            waiting.append((batch, thread.submit(encode, batch)))
            if len(waiting) > 1:
                write_first()
        if waiting:
            write_first()
        return {name: writer.finish() for name, writer in splits.items()}, special


def _pieces(
    tokenizer: Tokenizer, documents: Iterable[tuple[SplitName, Document]]
) -> Iterator[_Piece]:
    cuts = tokenizer.encodes_in_pieces()
    for split, document in documents:
        pieces = cut_between_words(document.text) if cuts else iter([document.text])
        held = next(pieces)
        for piece in pieces:
            yield _Piece(split, held, False, document.name)
            held = piece
        yield _Piece(split, held, True, document.name)


def _batches(pieces: Iterator[_Piece]) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[list[int]]:
    """Encodes whole documents as `write_documents` does, long ones in pieces.

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
