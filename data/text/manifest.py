"""The description of a prepared folder: `manifest.json`, written last."""

import hashlib
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from polyad.data.config import Config
from polyad.data.errors import DataError
from polyad.data.json_reader import read_json
from polyad.data.prepared import MANIFEST_FILE, SPLITS, Count, Sha256
from polyad.data.prepared import SplitName as SplitName

FORMAT_VERSION = 4
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
"""All files that a prepared folder may hold."""


class SplitInfo(Config):
    """What a split holds."""

    documents: Count
    """Documents; each is one sequence of the files."""
    tokens: Count
    """Tokens, with the one that ends each document."""
    words: Count
    """White-space-separated words of the text: the base of perplexity per word."""
    bytes: Count
    """Bytes of the text in UTF-8: the base of bits per byte."""


class TokenizerInfo(Config):
    """The tokenizer beside the data."""

    fingerprint: Sha256
    """SHA-256 of the file (tokenizer.json in canonical form) and the end-of-text token."""
    file: TokenizerFile = TOKENIZER_FILE
    """Its file in the folder: of Hugging Face `tokenizers`, or of SentencePiece."""
    vocab_size: int = Field(ge=1, le=2**31)
    """All ids are below this."""
    end_of_text: str = Field(min_length=1)
    """The token that ends each document."""
    end_of_text_id: Count
    """Its id."""
    begin_of_text: str | None = Field(default=None, min_length=1)
    """The token that begins each document; null: none does."""
    begin_of_text_id: Count | None = None
    """Its id."""

    def in_words(self) -> str:
        """Describes the tokens around the text of each document, for the user."""
        end = f"{self.end_of_text} ({self.end_of_text_id})"
        if self.begin_of_text is None:
            return f"each document ends with {end}, and no token begins it"
        begin = f"{self.begin_of_text} ({self.begin_of_text_id})"
        return f"each document begins with {begin} and ends with {end}"


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
    validation_fraction: float = Field(ge=0, lt=1)
    """Share of the text of `source` held out for validation."""
    test_fraction: float = Field(ge=0, lt=1)
    """Share of the text of `source` held out for the test."""
    text_key: str
    """Key or column of the text."""
    listings: dict[SplitName, str]
    """SHA-256 over names, sizes and times of the files of each source, by its first split."""
    documents: Literal["files", "lines"] | None = None
    """What a document of a text file is; null where there is no such file."""
    file_format: Literal["text"] | None = None
    """What files are, whatever their names end in; null goes by the names."""
    part: str | None = None
    """`K/N` of a part of the documents, `all N` of parts that were joined; null of a whole."""


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
    sha256: dict[str, Sha256]
    """SHA-256 of each other file of the folder, by name."""
    files: dict[str, Count]
    """How many files were read, by how their names end; empty for data sets."""
    left_out: dict[str, Count]
    """How many documents, files and splits were left out, by reason."""
    split_by: Literal["documents", "position"]
    """How shares are held out: documents dealt out, or the last parts of all text end to end."""

    @property
    def fingerprint(self) -> str:
        """Names this data set: a SHA-256 over the digests of the splits and of the tokenizer."""
        files = (f"{name}.{end}" for name in SPLITS for end in ("bin", "idx"))
        parts = [self.tokenizer.fingerprint, *(f"{name}:{self.sha256[name]}" for name in files)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Reads the manifest of a prepared folder; the only function that does.

        Args:
            folder: The folder.

        Raises:
            DataError: It cannot be read, or another version of Polyad wrote it.
        """
        path = folder / MANIFEST_FILE
        tree = read_json(path)
        version = tree.get("format_version") if isinstance(tree, dict) else None
        if version != FORMAT_VERSION:
            raise DataError(
                f"{path}: format version {version!r:.60}, but this Polyad reads version "
                f"{FORMAT_VERSION}: prepare the data again"
            )
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise DataError(f"{path}: key {key!r:.200}: {first['msg']}") from None

    def write(self, folder: Path) -> None:
        """Writes the manifest.

        Args:
            folder: The folder it describes.
        """
        path = folder / MANIFEST_FILE
        path.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
