"""A prepared folder, opened and checked in a time that does not grow with it."""

import functools
import hashlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data.errors import DataError, nearest, user_path
from data.fingerprint import file_fingerprint
from data.indexed import indexed_dataset
from data.manifest import (
    END_BYTES,
    INDEX_HEADER_BYTES,
    MANIFEST_FILE,
    SPLITS,
    Manifest,
    SplitInfo,
    SplitName,
    ends_digest,
    index_bytes,
)
from data.tokenizer import Tokenizer


class TokenStream:
    """The tokens of one split, document after document, memory-mapped.

    The files are opened at the first read, so that a stream can be handed to another process
    before or after it.

    Args:
        prefix: The files' common path, without `.bin` and `.idx`.
        num_tokens: Tokens in all, the ends of documents included.
        num_documents: Documents.
        vocab_size: Every token is below it, which each read checks; None checks nothing.

    Attributes:
        prefix: As given.
        num_tokens: As given.
        num_documents: As given.
        vocab_size: As given.
    """

    def __init__(
        self, prefix: Path, num_tokens: int, num_documents: int, vocab_size: int | None = None
    ) -> None:
        self.prefix = prefix
        self.vocab_size = vocab_size
        self.num_tokens = num_tokens
        self.num_documents = num_documents

    @functools.cached_property
    def _files(self) -> Any:
        return indexed_dataset().IndexedDataset(str(self.prefix))

    @functools.cached_property
    def document_lengths(self) -> npt.NDArray[np.int32]:
        """Tokens of each document, its end included; shape (num_documents,)."""
        if self.num_documents == 0:  # an empty file cannot be mapped
            return np.zeros(0, dtype=np.int32)
        return np.array(self._files.sequence_lengths, dtype=np.int32)

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Reads from the documents laid end to end in the order of the file.

        Args:
            start: First token.
            stop: One past the last token.

        Returns:
            The tokens, shape (stop - start,).

        Raises:
            IndexError: The range is not inside the stream.
            DataError: A token is not in the vocabulary.
        """
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens {start}:{stop} of a stream of {self.num_tokens}")
        if start == stop:
            return np.zeros(0, dtype=np.int64)
        index = self._files.index
        tokens = self._files.bin_reader.read(index.dtype, stop - start, start * index.dtype_size)
        if self.vocab_size is not None and int(tokens.max()) >= self.vocab_size:
            where = start + int(np.argmax(tokens >= self.vocab_size))
            raise DataError(
                f"{self.prefix}.bin: damaged: token {where:,} is {int(tokens.max()):,}, the "
                f"vocabulary has {self.vocab_size:,}"
            )
        return np.asarray(tokens, dtype=np.int64)

    def read_document(
        self, document: int, offset: int = 0, length: int | None = None
    ) -> npt.NDArray[np.int64]:
        """Reads a part of a document.

        Args:
            document: Its number, from 0.
            offset: First token.
            length: Tokens wanted; None reads to the end.

        Returns:
            The tokens, shape (length,).

        Raises:
            IndexError: The document or the range does not exist.
        """
        if not 0 <= document < self.num_documents:
            raise IndexError(f"document {document} of {self.num_documents}")
        index = self._files.index
        rest = int(index.sequence_lengths[document]) - offset
        length = rest if length is None else length
        if offset < 0 or not 0 <= length <= rest:
            raise IndexError(f"{length} tokens at {offset} of document {document}")
        start = int(index.sequence_pointers[document]) // index.dtype_size + offset
        return self.read(start, start + length)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "prefix": self.prefix,
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
            "vocab_size": self.vocab_size,
        }


class PreparedData:
    """A folder made by `polyad prepare`; use `open`.

    Attributes:
        path: The folder.
        manifest: What it says about itself.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._tokenizer: Tokenizer | None = None

    @classmethod
    def open(cls, path: str | Path) -> "PreparedData":
        """Opens a folder and checks that its files are whole and belong together.

        The checks read sizes, headers and both ends of each file, not the data: `verify` does that.

        Args:
            path: The folder.

        Returns:
            The data.

        Raises:
            DataError: It is not prepared data, or not whole.
        """
        folder = user_path(path)
        if not (folder / MANIFEST_FILE).is_file():
            raise DataError(_not_prepared(folder))
        manifest = Manifest.read(folder)
        for name in SPLITS:
            _check_split(folder, name, manifest)
        _check_tokenizer(folder, manifest)
        return cls(folder, manifest)

    def tokenizer(self) -> Tokenizer:
        """Loads the tokenizer, at the first call.

        Returns:
            The tokenizer that made the tokens.
        """
        if self._tokenizer is None:
            info = self.manifest.tokenizer
            self._tokenizer = Tokenizer.load(self.path / info.file, info.end_of_text)
        return self._tokenizer

    def split(self, name: SplitName) -> TokenStream:
        """Gives the tokens of a split.

        Args:
            name: `train`, `validation` or `test`.

        Returns:
            Its tokens; there may be none.
        """
        info = self.manifest.splits[name]
        vocab_size = self.manifest.tokenizer.vocab_size
        return TokenStream(self.path / name, info.tokens, info.documents, vocab_size)

    def verify(self) -> None:
        """Reads every token file and compares its digest.

        Raises:
            DataError: A file is not what was written.
        """
        for name in SPLITS:
            path = self.path / f"{name}.bin"
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != self.manifest.splits[name].sha256:
                raise DataError(f"{path}: damaged: its SHA-256 is {digest[:12]}..., not as written")


def _not_prepared(folder: Path) -> str:
    again = "make it with `polyad prepare`"
    if not folder.exists():
        siblings = folder.parent.iterdir() if folder.parent.is_dir() else iter(())
        prepared = [entry.name for entry in siblings if (entry / MANIFEST_FILE).is_file()]
        return f"{folder}: no such folder of prepared data{nearest(folder.name, prepared)}; {again}"
    return f"{folder}: not prepared data: it has no {MANIFEST_FILE}; {again}"


def _check_split(folder: Path, name: SplitName, manifest: Manifest) -> None:
    info = manifest.splits[name]
    tokens, index = folder / f"{name}.bin", folder / f"{name}.idx"
    itemsize = np.dtype(manifest.dtype).itemsize
    expected = {tokens: info.tokens * itemsize, index: index_bytes(info.documents)}
    for path, size in expected.items():
        if not path.is_file():
            raise DataError(
                f"{path}: missing, but {MANIFEST_FILE} lists it; prepare the data again"
            )
        if path.stat().st_size != size:
            raise DataError(
                f"{path}: {path.stat().st_size:,} bytes where {MANIFEST_FILE} says {size:,}: cut "
                "short or of another data set; prepare the data again"
            )
    _check_index_header(index, info)
    if ends_digest(tokens, index) != info.ends_sha256:
        raise DataError(
            f"{tokens}: it or {index.name} is not the file that {MANIFEST_FILE} lists: of another "
            "data set or damaged; prepare the data again"
        )
    largest = _largest_id(tokens, manifest.dtype)
    if largest >= manifest.tokenizer.vocab_size:
        raise DataError(
            f"{tokens}: token id {largest}, but the tokenizer's vocabulary ends at "
            f"{manifest.tokenizer.vocab_size - 1}"
        )


def _check_index_header(path: Path, info: SplitInfo) -> None:
    with path.open("rb") as file:
        header = file.read(INDEX_HEADER_BYTES)
    _, sequences, bounds = struct.unpack("<QxQQ", header[9:])
    if not header.startswith(b"MMIDIDX\0\0") or (sequences, bounds) != (
        info.documents,
        info.documents + 1,
    ):
        raise DataError(
            f"{path}: lists {sequences:,} documents where {MANIFEST_FILE} says "
            f"{info.documents:,}: of another data set or damaged; prepare the data again"
        )


def _largest_id(path: Path, dtype: str) -> int:
    """Looks at both ends only: a scan of everything would read everything."""
    itemsize = np.dtype(dtype).itemsize
    size = path.stat().st_size
    with path.open("rb") as file:
        head = np.frombuffer(file.read(END_BYTES), dtype)
        file.seek(max(0, size - END_BYTES) // itemsize * itemsize)
        tail = np.frombuffer(file.read(END_BYTES), dtype)
    return int(max(head.max(initial=0), tail.max(initial=0)))


def _check_tokenizer(folder: Path, manifest: Manifest) -> None:
    path = folder / manifest.tokenizer.file
    try:
        found = file_fingerprint(path, manifest.tokenizer.end_of_text)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a readable tokenizer: {error}") from None
    if found != manifest.tokenizer.fingerprint:
        raise DataError(
            f"{path}: not the tokenizer that made these tokens (fingerprint {found[:12]}..., "
            f"{MANIFEST_FILE} says {manifest.tokenizer.fingerprint[:12]}...)"
        )
