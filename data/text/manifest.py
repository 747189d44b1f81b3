"""The description of a prepared folder: `manifest.json`, written last."""

import hashlib
import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from polyad.data.config import Config
from polyad.data.errors import DataError
from polyad.data.files import read_json
from polyad.data.tables import SPLITS
from polyad.data.tables import SplitName as SplitName

MANIFEST_FILE = "manifest.json"
"""The description of a prepared folder, written last."""
FORMAT_VERSION = 6
Count = Annotated[int, Field(ge=0, lt=2**63)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
TokenizerFile = Literal["tokenizer.json", "tokenizer.model"]
TOKENIZER_FILE: TokenizerFile = "tokenizer.json"
SENTENCEPIECE_FILE: TokenizerFile = "tokenizer.model"
TOKENIZER_FILES = (TOKENIZER_FILE, SENTENCEPIECE_FILE)
SPLIT_FILES = tuple(f"{name}.{end}" for name in SPLITS for end in ("bin", "idx"))
FILES = frozenset({MANIFEST_FILE, *TOKENIZER_FILES, *SPLIT_FILES})
"""All files that a prepared folder may hold."""


class ReadOptions(Config):
    """How text is read."""

    text_key: str = Field(default="text", min_length=1)
    """Key or column of the text in `.jsonl`, `.csv` and `.parquet` files and data sets."""
    streaming: bool = False
    """Whether Hugging Face data sets are read without a copy on disk; the result is the same."""
    documents: Literal["files", "lines"] = "files"
    """What counts as a document of a text file: `files`, the whole file, or `lines`."""
    file_format: Literal["text"] | None = None
    """`text` reads files as text whatever their extension; None: by extension."""


HELD_OUT = 0.05
"""The share of a text that each other split gets by default."""


class PrepareConfig(ReadOptions):
    """What to prepare, and how."""

    source: str = Field(min_length=1)
    """`python-stdlib`, a file, a folder, or a Hugging Face data set, whose own splits are used if
    it has them; see `polyad.data.text.sources.open_splits`."""
    tokenizer: str = Field(min_length=1)
    """`train:VOCAB_SIZE`, `words`, `words:VOCAB_SIZE`, a path, or a name on the hub."""
    validation_fraction: float = Field(default=HELD_OUT, ge=0, le=0.5)
    """Share of the text held out for validation, if that split has no source of its own. If there
    are too few documents, it is taken from the end of the text."""
    test_fraction: float = Field(default=HELD_OUT, ge=0, le=0.5)
    """Share held out for the test, in the same way."""
    validation_source: str | None = Field(default=None, min_length=1)
    """Text to use as the validation split instead."""
    test_source: str | None = Field(default=None, min_length=1)
    """Text to use as the test split instead."""
    end_of_text: str | None = Field(default=None, min_length=1)
    """The token that ends each document; None for a well-known one."""
    special_tokens: Literal["text", "parse"] = "text"
    """Whether special tokens that are written in the text are ordinary characters, or tokens as
    chats need; `parse` also renders conversations by the tokenizer's chat template."""
    part: str | None = Field(default=None, pattern=r"^([1-9]\d{0,5})/([1-9]\d{0,5})$")
    """`K/N`: only the K-th of N shares of the documents, from 1; None for all documents."""


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


class Manifest(Config):
    """A prepared data set."""

    format_version: int
    """Version of the folder's format."""
    request: PrepareConfig
    """What was asked for; no part, if parts were joined."""
    tokenizer: TokenizerInfo
    """The tokenizer that made the tokens."""
    splits: dict[SplitName, SplitInfo]
    """The three splits; one may be empty."""
    dtype: Literal["uint16", "int32"]
    """Type of a token in the .bin files."""
    sha256: dict[str, Sha256]
    """SHA-256 of each other file of the folder, by name."""
    left_out: dict[str, Count]
    """How many documents, files and splits were left out, by reason."""
    special_tokens: dict[str, Count] = Field(default_factory=dict)
    """How often each special token is written in the text."""
    split_by: Literal["documents", "position"]
    """How shares are held out: documents dealt out, or the last parts of all text end to end."""

    @property
    def fingerprint(self) -> str:
        """Names this data set: a SHA-256 over the digests of the splits and of the tokenizer."""
        files = [f"{name}:{self.sha256[name]}" for name in SPLIT_FILES]
        parts = [self.tokenizer.fingerprint, *files]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Reads the manifest of a prepared folder; the only function that does.

        Args:
            folder: The folder.

        Raises:
            DataError: There is none, it cannot be read, or another version of Polyad wrote it.
        """
        path = folder / MANIFEST_FILE
        if not os.path.lexists(path):
            raise DataError(f"{folder}: not prepared data; make it with `polyad prepare`")
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


def digests_of(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of each file of a folder that is being prepared, hexadecimal."""
    digests = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests
