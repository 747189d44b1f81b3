"""Opens and checks a prepared folder in a time that does not grow with its size.

The two files of a split are in megatron-core's format. `.bin`: tokens, document after document.
`.idx`: a header of `HEADER_BYTES` (magic, version, code of the token type, sequences, bounds), then
for D documents of one sequence each the lengths in tokens (4 bytes each), the offsets in bytes (8
each), and the numbers 0 to D (8 each), which are the bounds of documents in sequences.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from polyad.data.errors import DataError, user_path
from polyad.data.tables import SPLITS, SplitName
from polyad.data.text.manifest import FILES, MANIFEST_FILE, Manifest
from polyad.data.text.tokenizers.files import load_tokenizer
from polyad.data.text.tokenizers.tokenizer import Tokenizer

HEADER_BYTES = 34


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


@dataclass(eq=False)
class TokenStream:
    """The tokens of one split, document after document; those of files are memory-mapped.

    The files are opened at the first read, and again in a process that gets the stream; tokens in
    memory are sent to it.
    """

    prefix: Path
    """The files' common path, without `.bin` and `.idx`."""
    num_tokens: int
    """Total number of tokens, including the ends of documents."""
    num_documents: int
    vocab_size: int
    """Bound on token ids, checked on each read."""

    @classmethod
    def of(
        cls, prefix: Path, documents: Sequence[npt.NDArray[np.int64]], vocab_size: int
    ) -> "TokenStream":
        """Makes a stream of documents in memory.

        Args:
            prefix: Names the stream in errors.
            documents: The tokens of each document, its end included.
            vocab_size: Bound on token ids.
        """
        tokens = np.concatenate([np.zeros(0, dtype=np.int64), *documents])
        stream = cls(prefix, len(tokens), len(documents), vocab_size)
        stream._tokens = tokens
        stream.document_lengths = np.array([len(each) for each in documents], dtype=np.int32)
        return stream

    @functools.cached_property
    def _tokens(self) -> npt.NDArray[np.integer]:
        dtype = token_dtype(self.vocab_size)
        return np.memmap(self.prefix.with_suffix(".bin"), dtype, "r", shape=(self.num_tokens,))

    @functools.cached_property
    def document_lengths(self) -> npt.NDArray[np.int32]:
        """Tokens of each document, its end included; shape (num_documents,)."""
        path = self.prefix.with_suffix(".idx")
        lengths_D = np.fromfile(path, np.int32, self.num_documents, offset=HEADER_BYTES)
        whole = int(lengths_D.sum(dtype=np.int64)) == self.num_tokens
        if not whole or (lengths_D < 1).any():
            raise DataError(
                f"{self.prefix}.idx: damaged: the lengths of its documents do not add up to "
                f"{self.num_tokens:,} tokens; prepare the data again"
            )
        return lengths_D

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Reads tokens by position in the stream of documents laid end to end in file order.

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
        if start == stop:  # an empty file cannot be mapped
            return np.zeros(0, dtype=np.int64)
        tokens = np.asarray(self._tokens[start:stop], dtype=np.int64)
        if int(tokens.max()) >= self.vocab_size:
            raise DataError(
                f"{self.prefix}.bin: damaged: token {int(tokens.max()):,} is not in the vocabulary "
                f"of {self.vocab_size:,}; prepare the data again"
            )
        return tokens

    def locate(
        self, positions_N: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Finds the documents that contain tokens.

        Args:
            positions_N: Positions of tokens in the stream, all in range.

        Returns:
            The number of each token's document, from 0, and its offset there.
        """
        document_N = np.searchsorted(self._ends, positions_N, side="right")
        begin_N = self._ends[document_N] - self.document_lengths[document_N]
        return document_N, positions_N - begin_N

    @functools.cached_property
    def _ends(self) -> npt.NDArray[np.int64]:
        return np.cumsum(self.document_lengths, dtype=np.int64)

    def read_document(self, document: int) -> npt.NDArray[np.int64]:
        """Reads a document by its number, from 0; its end is included.

        Returns:
            The tokens, shape (document_lengths[document],).
        """
        stop = int(self._ends[document])
        return self.read(stop - int(self.document_lengths[document]), stop)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.items()
        return {name: value for name, value in state if not isinstance(value, np.memmap)}


@dataclass(frozen=True, eq=False)
class PreparedData:
    """A folder made by `polyad prepare`; use `open`."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: str | Path) -> "PreparedData":
        """Opens a folder and checks that its files are complete and belong together.

        The checks read sizes, not the data: `verify` does that.

        Args:
            path: The folder.

        Returns:
            The data.

        Raises:
            DataError: It is not prepared data, or is incomplete.
        """
        folder = user_path(path)
        manifest = Manifest.read(folder)
        itemsize = np.dtype(manifest.dtype).itemsize
        for name in SPLITS:
            info = manifest.splits[name]
            _check_size(folder / f"{name}.bin", info.tokens * itemsize)
            _check_size(folder / f"{name}.idx", index_bytes(info.documents))
        if not (folder / manifest.tokenizer.file).is_file():
            raise DataError(f"{folder / manifest.tokenizer.file}: missing; prepare the data again")
        return cls(folder, manifest)

    @functools.cache  # noqa: B019  # a run has few
    def tokenizer(self) -> Tokenizer:
        """Loads the tokenizer on the first call.

        Returns:
            The tokenizer that made the tokens.
        """
        info = self.manifest.tokenizer
        tokenizer = load_tokenizer(self.path / info.file, info.end_of_text)
        if tokenizer.fingerprint != info.fingerprint:
            raise DataError(f"{self.path / info.file}: is not the tokenizer that made these tokens")
        return tokenizer

    def split(self, name: SplitName) -> TokenStream:
        """Returns the tokens of a split.

        Args:
            name: `train`, `validation` or `test`.

        Returns:
            Its tokens; there may be none.
        """
        info = self.manifest.splits[name]
        vocab_size = self.manifest.tokenizer.vocab_size
        return TokenStream(self.path / name, info.tokens, info.documents, vocab_size)

    def damage(self, name: str, read: Callable[[int], object] = lambda count: None) -> str | None:
        """Reads a file and compares its digest with the manifest's.

        Args:
            name: The name of the file.
            read: Called with the number of bytes after each read.

        Returns:
            One line on why it is damaged; None if it is intact.
        """
        path, digest = self.path / name, hashlib.sha256()
        try:
            with path.open("rb") as file:
                while piece := file.read(2**20):  # fits into a core's cache
                    digest.update(piece)
                    read(len(piece))
        except OSError as error:
            return f"{path}: cannot be read: {error.strerror or error}"
        if digest.hexdigest() != self.manifest.sha256[name]:
            return f"{path}: damaged: its SHA-256 is not that of {MANIFEST_FILE}"
        return None

    def verify(self) -> None:
        """Reads every byte of every file and compares it with the manifest's digests.

        Raises:
            DataError: A file has changed since it was written.
        """
        for name in self.manifest.sha256:
            if reason := self.damage(name):
                raise DataError(reason)


def check_replaceable(output: Path, *, overwrite: bool) -> None:
    """Refuses to touch a folder that `polyad prepare` did not make or may not replace.

    Raises:
        DataError: It is a file, or holds something else, or prepared data that may not be replaced.
    """
    names = {entry.name for entry in output.iterdir()} if output.is_dir() else set()
    if (output.exists() and not output.is_dir()) or names - (FILES if overwrite else set()):
        raise DataError(
            f"{output}: exists, and nothing was changed; choose another folder, or replace one of "
            "prepared data with --overwrite"
        )


def _check_size(path: Path, expected: int) -> None:
    size = path.stat().st_size if path.is_file() else 0
    if size != expected:
        raise DataError(
            f"{path}: {size:,} bytes, and {MANIFEST_FILE} says {expected:,}; prepare the data again"
        )
