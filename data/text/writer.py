"""Writes documents to the files of their splits: encodes them in batches, with bounded memory."""

import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import tee
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from polyad.data.errors import DataError, prefixed
from polyad.data.tables import SPLITS, SplitName
from polyad.data.text.dataset import token_dtype
from polyad.data.text.manifest import SplitInfo
from polyad.data.text.sources import Document
from polyad.data.text.tokenizers.tokenizer import Tokenizer

PIECE_CHARACTERS = 128 * 1024
"""A document longer than this is encoded in pieces of about this many characters, on all cores."""
BATCH_CHARACTERS = 512 * 1024
"""Characters encoded per batch; document lengths differ too much to count documents."""
_PROBE = (
    "one\ntwo f(x);\nreturn x 12\n34 é ß\n漢字 12; zwölf it's s 漢 字 "
    "\U0001e900\n\U0001e901 \U0001e900 \U0001e901"  # rare letters: unknown ones may be fused
)
"""A text with every kind of place where `cut_between_words` cuts."""

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


def may_cut(tokenizer: Tokenizer) -> bool:
    """Returns whether `cut_between_words` leaves the ids of a text unchanged.

    It does with pre-tokenizers like GPT-2's, and not with one that marks the beginning of a text.
    """
    pieces = list(cut_between_words(_PROBE, size=2))
    try:
        whole, *parts = tokenizer.encode_batch([_PROBE, *pieces])
    except DataError:  # a word vocabulary without an unknown token
        return False
    return whole == [token for ids in parts for token in ids]


class SplitWriter:
    """Writes a split's `.bin` and `.idx` with megatron-core's builder, and counts them.

    Args:
        prefix: The files' common path, without `.bin` and `.idx`.
        tokenizer: The tokenizer, which determines the token type and the ends of documents.
    """

    def __init__(self, prefix: Path, tokenizer: Tokenizer) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of kernels that are not used here
            from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        self._prefix = prefix
        self._before = np.array(tokenizer.before, np.int32)
        self._end = np.array([tokenizer.end_of_text_id], np.int32)
        dtype = token_dtype(tokenizer.vocab_size)
        self._builder: Any = IndexedDatasetBuilder(str(prefix.with_suffix(".bin")), dtype)
        self._counts = Counter(dict.fromkeys(SplitInfo.model_fields, 0))

    def add(self, ids: npt.NDArray[np.int32], text: str) -> None:
        """Appends a document.

        Args:
            ids: The tokens of its text.
            text: Its text.
        """
        before, end = (
            side[:0] if np.array_equal(side, own) else side  # a chat template may have written it
            for side, own in ((self._before, ids[:1]), (self._end, ids[-1:]))
        )
        tokens = np.concatenate([before, ids, end])
        self._builder.add_document(tokens, [len(tokens)])
        self._counts.update(
            documents=1, tokens=len(tokens), words=len(text.split()), bytes=len(text.encode())
        )

    def copy(self, prefix: Path, split: SplitInfo) -> None:
        """Appends all documents of another split.

        Args:
            prefix: The path of its files.
            split: Its counts.
        """
        if split.documents:
            self._builder.add_index(str(prefix))
        self._counts.update(split.model_dump())

    def finish(self) -> SplitInfo:
        """Writes the index; returns the counts of the split."""
        self._builder.finalize(str(self._prefix.with_suffix(".idx")))
        return SplitInfo(**self._counts)


def write_documents(
    folder: Path,
    tokenizer: Tokenizer,
    documents: Iterable[tuple[SplitName, Document]],
    special: Counter[str],
) -> dict[SplitName, SplitInfo]:
    """Encodes documents of all splits together and writes each to the files of its split.

    Args:
        folder: The folder to write to.
        tokenizer: Encodes the text.
        documents: The documents, each with its split.
        special: Counts the special tokens that are written in the text.

    Returns:
        The counts of each split.

    Raises:
        DataError: A document cannot be encoded.
    """
    splits = {name: SplitWriter(folder / name, tokenizer) for name in SPLITS}
    written, encoded = tee(documents)
    ids = encode_documents(tokenizer, (document for _, document in encoded))
    for (split, document), ids_T in zip(written, ids, strict=True):
        splits[split].add(ids_T, document.text)
        special.update(tokenizer.special_words.findall(document.text))
    return {name: writer.finish() for name, writer in splits.items()}


class _Piece(NamedTuple):
    document: Document
    text: str
    is_last: bool


def encode_documents(
    tokenizer: Tokenizer, documents: Iterable[Document]
) -> Iterator[npt.NDArray[np.int32]]:
    """Encodes whole documents, long ones in pieces.

    A batch is encoded in a separate thread, which needs Python's lock only at its end, while the
    documents of the next batch are read and the tokens of the previous one are used.

    Args:
        tokenizer: The tokenizer.
        documents: The documents.

    Yields:
        The ids of each text.

    Raises:
        DataError: A document cannot be encoded.
    """
    parts = [np.zeros(0, np.int32)]
    for pieces, batch in _encoded_batches(tokenizer, _batches(_pieces(tokenizer, documents))):
        for piece, ids in zip(pieces, batch, strict=True):
            parts.append(np.array(ids, np.int32))
            if piece.is_last:
                yield np.concatenate(parts)
                del parts[1:]


def _encoded_batches(
    tokenizer: Tokenizer, batches: Iterable[list[_Piece]]
) -> Iterator[tuple[list[_Piece], list[list[int]]]]:
    """Encodes one batch ahead of those that are used."""

    def encode(pieces: list[_Piece]) -> list[list[int]]:
        try:
            return tokenizer.encode_batch([piece.text for piece in pieces])
        except DataError:
            for piece in pieces:  # the first that cannot be encoded alone
                with prefixed(piece.document.name):
                    tokenizer.encode(piece.text)
            raise

    with ThreadPoolExecutor(1, thread_name_prefix="encode") as thread:
        waiting = None
        for pieces in batches:
            ahead = pieces, thread.submit(encode, pieces)
            if waiting:
                yield waiting[0], waiting[1].result()
            waiting = ahead
        if waiting:
            yield waiting[0], waiting[1].result()


def _pieces(tokenizer: Tokenizer, documents: Iterable[Document]) -> Iterator[_Piece]:
    cuts = may_cut(tokenizer) and not tokenizer.parses  # special tokens may take white space
    for document in documents:
        *heads, tail = cut_between_words(document.text) if cuts else [document.text]
        yield from (_Piece(document, head, False) for head in heads)
        yield _Piece(document, tail, True)


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
