"""What a prepared folder says about itself: `manifest.json`, written last."""

import hashlib
import json
import os
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from data.config import Config
from data.errors import DataError

FORMAT_VERSION = 1
SplitName = Literal["train", "validation", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")
MANIFEST_FILE = "manifest.json"
TokenizerFile = Literal["tokenizer.json", "tokenizer.model"]
TOKENIZER_FILE: TokenizerFile = "tokenizer.json"
SENTENCEPIECE_FILE: TokenizerFile = "tokenizer.model"
TOKENIZER_FILES = (TOKENIZER_FILE, SENTENCEPIECE_FILE)
FILES = frozenset(
    {
        *(MANIFEST_FILE, *TOKENIZER_FILES),
        *(f"{name}.{end}" for name in SPLITS for end in ("bin", "idx")),
    }
)
"""Everything that a prepared folder may hold."""

LENGTHS_SUFFIX = ".lengths"
"""Of a file that lies beside the others while they are written."""

INDEX_HEADER_BYTES = 34
"""Of an .idx file: 9 magic, 8 version, 1 type code, 8 sequences, 8 document bounds."""
END_BYTES = 64 * 1024
"""How much of either end of a file `ends_digest` reads."""


class SplitInfo(Config):
    """One split: what it holds, and how to recognize its files."""

    documents: int
    """Documents; each is one sequence of the files."""
    tokens: int
    """Tokens, with the one that ends each document."""
    words: int
    """White-space-separated words of the text: the base of perplexity per word."""
    bytes: int
    """Bytes of the text in UTF-8: the base of bits per byte."""
    sha256: str
    """SHA-256 of the .bin file."""
    ends_sha256: str
    """SHA-256 of both ends of the .bin and the .idx file: cheap enough for every start."""


class TokenizerInfo(Config):
    """The tokenizer beside the data."""

    fingerprint: str
    """SHA-256 of the file (tokenizer.json in canonical form) and the end-of-text token."""
    file: TokenizerFile = TOKENIZER_FILE
    """Its file in the folder: of Hugging Face `tokenizers`, or of SentencePiece."""
    vocab_size: int
    """All ids are below this."""
    end_of_text: str
    """The token that ends each document."""
    end_of_text_id: int
    """Its id."""


class Request(Config):
    """What was asked for: the same request need not be prepared again."""

    source: str
    """Name or path of the text."""
    validation_source: str | None
    """Text that is the validation split instead of a share of `source`."""
    test_source: str | None
    """Text that is the test split instead of a share of `source`."""
    tokenizer: str
    """`train:VOCAB_SIZE` or `words`, or the fingerprint of the tokenizer that was given."""
    end_of_text: str | None
    """The end-of-text token that was asked for."""
    validation_fraction: float
    """Share of the documents of `source` held out for validation."""
    test_fraction: float
    """Share of the documents of `source` held out for the test."""
    text_key: str
    """Key or column of the text."""
    listings: dict[SplitName, str]
    """SHA-256 over names, sizes and times of the files of each source, by its first split."""
    documents: Literal["files", "lines"] | None = None
    """What a document of a text file is; null where there is no such file."""
    file_format: Literal["text"] | None = None
    """What files are, whatever their names end in; null goes by the names."""


class Manifest(Config):
    """A prepared data set."""

    format_version: int
    """Version of the folder's format."""
    request: Request
    """What was asked for."""
    tokenizer: TokenizerInfo
    """The tokenizer that made the tokens."""
    splits: dict[SplitName, SplitInfo]
    """The three splits; one may be empty."""
    dtype: Literal["uint16", "int32"]
    """Type of a token in the .bin files."""
    skipped_empty: int
    """Documents without a character, left out."""
    skipped_unreadable: int
    """Files that are not text, left out."""
    split_by: Literal["documents", "position"] = "documents"
    """How shares are held out: documents dealt out, or the last parts of all text end to end."""
    fingerprint: str
    """SHA-256 over the splits' and the tokenizer's digests: names this data set."""

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Reads the manifest of a prepared folder.

        Args:
            folder: The folder.

        Returns:
            The manifest.

        Raises:
            DataError: It cannot be read, or a newer version wrote it.
        """
        path = folder / MANIFEST_FILE
        try:
            content = path.read_text(encoding="utf-8")
            version = json.loads(content)["format_version"]
        except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
            raise DataError(f"{path}: not a readable manifest of prepared data: {error}") from None
        if version != FORMAT_VERSION:
            raise DataError(
                f"{path}: format version {version!r}; this Polyad reads version {FORMAT_VERSION}: "
                "prepare the data again, or use the version that wrote it"
            )
        try:
            manifest = cls.model_validate_json(content)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise DataError(f"{path}: key {key!r}: {first['msg']}") from None
        if missing := set(SPLITS) - set(manifest.splits):
            raise DataError(f"{path}: key 'splits': no {sorted(missing)[0]!r}")
        return manifest

    def write(self, folder: Path) -> None:
        """Writes the manifest and waits until it is on the disk.

        Args:
            folder: The folder it describes.
        """
        path = folder / MANIFEST_FILE
        path.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
        flush_to_disk(path)


def data_fingerprint(splits: dict[SplitName, SplitInfo], tokenizer: TokenizerInfo) -> str:
    """Names a data set by what training sees of it.

    Args:
        splits: The splits.
        tokenizer: The tokenizer.

    Returns:
        A SHA-256, hexadecimal, over the digests of both.
    """
    parts = [tokenizer.fingerprint, *(f"{name}:{splits[name].sha256}" for name in SPLITS)]
    # The .bin files alone do not say where documents end.
    parts.extend(f"{name}:{splits[name].ends_sha256}" for name in SPLITS)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def index_bytes(documents: int) -> int:
    """Size of an .idx file.

    Args:
        documents: Documents it lists, one sequence each.

    Returns:
        Bytes: a length (4) and a pointer (8) per sequence, a bound (8) per document and one more.
    """
    return INDEX_HEADER_BYTES + 12 * documents + 8 * (documents + 1)


def ends_digest(*paths: Path) -> str:
    """Digests the first and last `END_BYTES` of files and their sizes.

    Args:
        paths: The files.

    Returns:
        A SHA-256, hexadecimal: tells one file from another in a time that does not grow with them.
    """
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        with path.open("rb") as file:
            digest.update(f"{size}\n".encode())
            digest.update(file.read(END_BYTES))
            file.seek(max(0, size - END_BYTES))
            digest.update(file.read(END_BYTES))
    return digest.hexdigest()


def flush_to_disk(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk.

    Args:
        path: The file or folder.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
