"""The files of one split while they are written: tokens, the lengths of documents, their index."""

import contextlib
import hashlib
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from polyad.data.config import Config
from polyad.data.errors import DataError
from polyad.data.text.manifest import LENGTHS_SUFFIX, SplitInfo, ends_digest, flush_to_disk
from polyad.data.text.tokenizers.tokenizer import Tokenizer

MOST_TOKENS = 2**31 - 1
"""Tokens of a document: the index holds lengths in 32 bits."""
COUNTS_SUFFIX = ".counts"
COUNTS = np.dtype([("words", "<i8"), ("bytes", "<i8"), ("goes_on", "?")])
"""What a part of the text notes of each document beside its length: it does not know their splits.
`goes_on`: the next one is of the same document of the text."""
_INDEX_BLOCK = 1 << 20
"""Documents of an index that are written at once."""


class SplitState(Config):
    """How far a split is written, and digests to check that its files still hold that."""

    documents: int
    tokens: int
    words: int
    bytes: int
    sha256: str
    """The digest of the tokens."""
    lengths_sha256: str
    """The digest of the lengths of documents."""
    open_tokens: int = 0
    """How many of `tokens` belong to a document that has not ended."""
    open_words: int = 0
    open_bytes: int = 0
    counts_sha256: str | None = None
    """The digest of each document's counts, where these are kept."""


class SplitWriter:
    """Writes one split's `.bin` and `.idx`, and counts what goes in.

    Until the index is written the lengths of documents lie in a file of their own: all that is
    needed to go on later is in files, and memory does not grow with them.

    Args:
        prefix: The files' common path, without `.bin` and `.idx`.
        tokenizer: Says how wide a token is, and which one ends a document.
        state: Where to go on; None begins.
        counted: Whether words and bytes of each document go to a file.

    Raises:
        DataError: The files do not hold what `state` says.
    """

    def __init__(
        self,
        prefix: Path,
        tokenizer: Tokenizer,
        state: SplitState | None = None,
        *,
        counted: bool = False,
    ) -> None:
        self.dtype = np.dtype(token_dtype(tokenizer.vocab_size))
        self.documents = state.documents if state else 0
        self.tokens = state.tokens if state else 0
        self.words = state.words if state else 0
        self.bytes = state.bytes if state else 0
        self._bin, self._idx = prefix.with_suffix(".bin"), prefix.with_suffix(".idx")
        self._lengths = prefix.with_suffix(LENGTHS_SUFFIX)
        self._end = np.array([tokenizer.end_of_text_id], dtype=self.dtype)
        self.cut_documents = 0
        self._open_tokens = state.open_tokens if state else 0
        self._words_before = self.words - (state.open_words if state else 0)
        self._bytes_before = self.bytes - (state.open_bytes if state else 0)
        self._bin_file, self._digest = _open(
            self._bin, self.tokens * self.dtype.itemsize, state.sha256 if state else None
        )
        self._lengths_file, self._lengths_digest = _open(
            self._lengths, self.documents * 4, state.lengths_sha256 if state else None
        )
        self._counts_file, self._counts_digest = None, hashlib.sha256()
        if counted:
            self._counts_file, self._counts_digest = _open(
                prefix.with_suffix(COUNTS_SUFFIX),
                self.documents * COUNTS.itemsize,
                state.counts_sha256 if state else None,
            )

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
        if len(ids) >= MOST_TOKENS:
            raise DataError(
                f"{name}: {len(ids) + 1:,} tokens; a document has at most {MOST_TOKENS:,}"
            )
        if self._open_tokens + len(ids) >= MOST_TOKENS:
            self._write(self._end.data)
            self._end_document(goes_on=True)
            self.cut_documents += 1
        tokens = np.array(ids, dtype=self.dtype)
        self._write((np.concatenate([tokens, self._end]) if is_last else tokens).data)
        if is_last:
            self._end_document()

    def copy(
        self,
        tokens: Iterable[bytes | memoryview],
        lengths_D: npt.NDArray[np.int32],
        words: int,
        text_bytes: int,
    ) -> None:
        """Appends whole documents that are encoded.

        Args:
            tokens: Their tokens as they stand in a `.bin` file, in blocks of any size.
            lengths_D: Tokens of each, its end included.
            words: Words of all of them.
            text_bytes: Bytes of their text.
        """
        assert not self._open_tokens
        for block in tokens:
            self._write(block)
        self._open_tokens = 0
        self._lengths_file.write(lengths_D.data)
        self._lengths_digest.update(lengths_D.data)
        self.documents += len(lengths_D)
        self.words += words
        self.bytes += text_bytes

    def _write(self, tokens: bytes | memoryview) -> None:
        self._bin_file.write(tokens)
        self._digest.update(tokens)
        count = memoryview(tokens).nbytes // self.dtype.itemsize
        self.tokens += count
        self._open_tokens += count

    def _end_document(self, *, goes_on: bool = False) -> None:
        length = np.array([self._open_tokens], dtype=np.int32)
        self._lengths_file.write(length.data)
        self._lengths_digest.update(length.data)
        if self._counts_file is not None:
            counts = (self.words - self._words_before, self.bytes - self._bytes_before, goes_on)
            row = np.array([counts], dtype=COUNTS).tobytes()
            self._counts_file.write(row)
            self._counts_digest.update(row)
        self.documents += 1
        self._open_tokens, self._words_before, self._bytes_before = 0, self.words, self.bytes

    def state(self) -> SplitState:
        """Waits until what was added is on the disk.

        Returns:
            Where another writer can go on.
        """
        for file in (self._bin_file, self._lengths_file, self._counts_file):
            if file is not None:
                file.flush()
                os.fsync(file.fileno())
        return SplitState(
            documents=self.documents,
            tokens=self.tokens,
            words=self.words,
            bytes=self.bytes,
            sha256=self._digest.hexdigest(),
            lengths_sha256=self._lengths_digest.hexdigest(),
            open_tokens=self._open_tokens,
            open_words=self.words - self._words_before,
            open_bytes=self.bytes - self._bytes_before,
            counts_sha256=self._counts_digest.hexdigest() if self._counts_file else None,
        )

    def finish(self) -> SplitInfo:
        """Writes the index and waits until both files are on the disk.

        Returns:
            What the split holds.
        """
        assert not self._open_tokens
        state = self.state()
        self.close()
        write_index(self._idx, _mapped(self._lengths), self.dtype)
        return SplitInfo(
            documents=state.documents,
            tokens=state.tokens,
            words=state.words,
            bytes=state.bytes,
            sha256=state.sha256,
            ends_sha256=ends_digest(self._bin, self._idx),
            index_sha256=_digest_of(self._idx),
        )

    def close(self) -> None:
        """Closes the files of an unfinished split."""
        self._bin_file.close()
        self._lengths_file.close()
        if self._counts_file is not None:
            self._counts_file.close()


def _mapped(lengths: Path) -> npt.NDArray[np.int32]:
    """Maps a file of lengths; an empty one cannot be."""
    if lengths.stat().st_size == 0:
        return np.zeros(0, dtype=np.int32)
    return np.memmap(lengths, dtype=np.int32, mode="r")


def _open(path: Path, size: int, sha256: str | None) -> tuple[BinaryIO, "hashlib._Hash"]:
    """Opens a file behind its first `size` bytes, and digests these."""
    digest = hashlib.sha256()
    if sha256 is None:
        return path.open("wb"), digest
    left = size
    with contextlib.suppress(FileNotFoundError), path.open("rb") as before:
        while left and (part := before.read(min(left, 1 << 20))):
            digest.update(part)
            left -= len(part)
    if left or digest.hexdigest() != sha256 or not path.exists():
        raise DataError(
            f"{path}: damaged since it was written; the same command now begins from the start"
        )
    file = path.open("r+b")
    file.truncate(size)
    file.seek(size)
    return file, digest


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """Chooses how wide a token is, as megatron-core does.

    Args:
        vocab_size: Entries of the vocabulary.

    Returns:
        The type of a token.
    """
    return np.uint16 if vocab_size < 65_500 else np.int32


def write_index(path: Path, lengths_D: npt.NDArray[np.int32], dtype: "np.dtype[Any]") -> None:
    """Writes an `.idx` file as megatron-core does, and waits until it is on the disk.

    It is written in blocks: memory does not grow with the documents.

    Args:
        path: The file.
        lengths_D: Tokens of each document, each one sequence.
        dtype: Type of a token in the `.bin` file.
    """
    code = {2: 8, 4: 4}[dtype.itemsize]  # megatron-core's numbers for uint16 and int32
    blocks = [(at, at + _INDEX_BLOCK) for at in range(0, len(lengths_D), _INDEX_BLOCK)]
    position = 0
    with path.open("wb") as file:
        file.write(b"MMIDIDX\0\0" + struct.pack("<QB", 1, code))
        file.write(struct.pack("<QQ", len(lengths_D), len(lengths_D) + 1))
        for start, stop in blocks:
            file.write(lengths_D[start:stop].tobytes())
        for start, stop in blocks:
            ends = position + np.cumsum(lengths_D[start:stop], dtype=np.int64)
            file.write(((ends - lengths_D[start:stop]) * dtype.itemsize).tobytes())
            position = int(ends[-1])
        for start in range(0, len(lengths_D) + 1, _INDEX_BLOCK):
            stop = min(start + _INDEX_BLOCK, len(lengths_D) + 1)
            file.write(np.arange(start, stop, dtype=np.int64).tobytes())
    flush_to_disk(path)
