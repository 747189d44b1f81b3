"""The two files of a split in megatron-core's format: its tokens, and the index of documents.

`.bin`: tokens, document after document. `.idx`: a header of `HEADER_BYTES` (magic, version, code
of the token type, sequences, bounds), then for D documents of one sequence each the lengths in
tokens (4 bytes each), the offsets in bytes (8 each), and the numbers 0 to D (8 each), which are the
bounds of documents in sequences.
"""

import shutil
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from polyad.data.text.manifest import SplitInfo
from polyad.data.text.tokenizers.tokenizer import Tokenizer

HEADER_BYTES = 34
_HEADER = struct.Struct("<9sQBQQ")
_MAGIC, _VERSION = b"MMIDIDX\0\0", 1
_TYPE_CODES = {"uint16": 8, "int32": 4}
_BLOCK = 1 << 20
"""Documents of an index written at a time."""
MOST_TOKENS = 2**31 - 1
"""Maximum number of tokens of a document: the index holds lengths in 32 bits."""


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """Chooses the integer type of a token, as megatron-core does.

    Args:
        vocab_size: Entries of the vocabulary.

    Returns:
        The type of a token.
    """
    return np.uint16 if vocab_size < 65_500 else np.int32


def index_bytes(documents: int) -> int:
    """Returns the size of an `.idx` file.

    Args:
        documents: Documents it lists, one sequence each.

    Returns:
        Bytes.
    """
    return HEADER_BYTES + 12 * documents + 8 * (documents + 1)


def read_lengths(path: Path, documents: int) -> npt.NDArray[np.int32]:
    """Reads the number of tokens of each document from an index."""
    return np.fromfile(path, np.int32, documents, offset=HEADER_BYTES)


def write_index(path: Path, lengths_D: npt.NDArray[np.int32], dtype: "np.dtype[Any]") -> None:
    """Writes an `.idx` file in blocks: memory use does not grow with the documents.

    Args:
        path: The file.
        lengths_D: Tokens of each document, each one sequence.
        dtype: Type of a token in the `.bin` file.
    """
    blocks = [(at, at + _BLOCK) for at in range(0, len(lengths_D), _BLOCK)]
    documents, position = len(lengths_D), 0
    with path.open("wb") as file:
        code = _TYPE_CODES[dtype.name]
        file.write(_HEADER.pack(_MAGIC, _VERSION, code, documents, documents + 1))
        for start, stop in blocks:
            file.write(lengths_D[start:stop].tobytes())
        for start, stop in blocks:
            ends = position + np.cumsum(lengths_D[start:stop], dtype=np.int64)
            file.write(((ends - lengths_D[start:stop]) * dtype.itemsize).tobytes())
            position = int(ends[-1])
        for start in range(0, documents + 1, _BLOCK):
            stop = min(start + _BLOCK, documents + 1)
            file.write(np.arange(start, stop, dtype=np.int64).tobytes())


class SplitWriter:
    """Writes a split's `.bin` and `.idx` from encoded documents, and counts them.

    Memory holds 4 bytes for each document until the index is written.

    Args:
        prefix: The files' common path, without `.bin` and `.idx`.
        tokenizer: The tokenizer, which determines the token type and the ends of documents.
    """

    def __init__(self, prefix: Path, tokenizer: Tokenizer) -> None:
        self._dtype = np.dtype(token_dtype(tokenizer.vocab_size))
        self._before, self._end = tokenizer.before, tokenizer.end_of_text_id
        self._bin, self._idx = prefix.with_suffix(".bin"), prefix.with_suffix(".idx")
        self._file = self._bin.open("wb")
        self._lengths = array("i")
        self._length = 0  # of the document that is being written
        self._words = self._bytes = 0
        self.tokens = 0
        """Tokens written so far."""

    def add(self, ids: Sequence[int], text: str, *, is_last: bool = True) -> None:
        """Appends a document, or the next piece of one.

        A document that the index cannot hold goes on in another one.

        Args:
            ids: The tokens of its text.
            text: Its text.
            is_last: Whether the document ends here.
        """
        if self._length and self._length + len(ids) >= MOST_TOKENS:
            self._end_document()
        self._append(ids if self._length else [*self._before, *ids])
        self._words += len(text.split())
        self._bytes += len(text.encode("utf-8"))
        if is_last:
            self._end_document()

    def copy(self, prefix: Path, split: SplitInfo) -> None:
        """Appends all documents of another split.

        Args:
            prefix: The path of its files.
            split: Its counts.
        """
        with prefix.with_suffix(".bin").open("rb") as file:
            shutil.copyfileobj(file, self._file, 1 << 20)
        lengths_D = read_lengths(prefix.with_suffix(".idx"), split.documents)
        self._lengths.frombytes(lengths_D.tobytes())
        self.tokens += split.tokens
        self._words += split.words
        self._bytes += split.bytes

    def finish(self) -> SplitInfo:
        """Writes the index; returns the counts of the split."""
        self._file.close()
        lengths_D = np.array(self._lengths, dtype=np.int32)
        write_index(self._idx, lengths_D, self._dtype)
        return SplitInfo(
            documents=len(lengths_D),
            tokens=self.tokens,
            words=self._words,
            bytes=self._bytes,
        )

    def close(self) -> None:
        """Closes the file, finished or not."""
        self._file.close()

    def _append(self, ids: Sequence[int]) -> None:
        self._file.write(np.array(ids, dtype=self._dtype).tobytes())
        self._length += len(ids)
        self.tokens += len(ids)

    def _end_document(self) -> None:
        self._append([self._end])
        self._lengths.append(self._length)
        self._length = 0
