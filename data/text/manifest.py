"""The description of a prepared folder: `manifest.json`, written last."""

import hashlib
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, model_validator

from polyad.data.config import Config
from polyad.data.errors import DataError
from polyad.data.json_reader import parse_json, read_bounded
from polyad.data.prepared import MANIFEST_FILE, SPLITS, Count, Sha256, seal, write_sealed
from polyad.data.prepared import SplitName as SplitName

FORMAT_VERSION = 2
UNSEALED_VERSION = 1
"""The version whose manifest has no digests of itself and of the .idx files; still readable."""
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

END_BYTES = 64 * 1024
"""Number of bytes at either end of a file that `ends_digest` reads."""
MOST_BYTES = 16 * 2**20
"""Maximum size of a manifest: far larger than any real one, and small enough to read."""


class SplitInfo(Config):
    """One split: what it holds, and how to recognize its files."""

    documents: Count
    """Documents; each is one sequence of the files."""
    tokens: Count
    """Tokens, with the one that ends each document."""
    words: Count
    """White-space-separated words of the text: the base of perplexity per word."""
    bytes: Count
    """Bytes of the text in UTF-8: the base of bits per byte."""
    sha256: Sha256
    """SHA-256 of the .bin file."""
    ends_sha256: Sha256
    """SHA-256 of both ends of the .bin and the .idx file: cheap enough for every start."""
    index_sha256: Sha256 | None = None
    """SHA-256 of the .idx file; None in a folder of version 1."""

    @model_validator(mode="after")
    def _counts_go_together(self) -> "SplitInfo":
        if self.tokens < self.documents:
            raise ValueError(
                f"tokens: {self.tokens} is less than documents: {self.documents}, each of which "
                f"ends with a token"
            )
        if self.words > self.bytes:
            raise ValueError(f"words: {self.words} is more than bytes: {self.bytes}")
        if not self.documents and (self.tokens or self.bytes):
            raise ValueError(
                f"documents: 0 with tokens: {self.tokens} and bytes: {self.bytes}, which have to "
                f"be 0 too"
            )
        return self


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

    @model_validator(mode="after")
    def _marks_are_in_the_vocabulary(self) -> "TokenizerInfo":
        for name in ("end_of_text_id", "begin_of_text_id"):
            if (getattr(self, name) or 0) >= self.vocab_size:
                raise ValueError(
                    f"{name}: {getattr(self, name)} is not below vocab_size: {self.vocab_size}"
                )
        if (self.begin_of_text is None) != (self.begin_of_text_id is None):
            raise ValueError("begin_of_text and begin_of_text_id: one of them is null")
        return self

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
    skipped_empty: Count
    """Documents without a character, left out."""
    skipped_unreadable: Count
    """Files that are not text, left out."""
    files: dict[str, Count] = Field(default_factory=dict)
    """How many files were read, by how their names end; empty in older folders and of data sets."""
    left_out: dict[str, Count] = Field(default_factory=dict)
    """How many other files, or splits, there were, by what they are."""
    split_by: Literal["documents", "position"] = "documents"
    """How shares are held out: documents dealt out, or the last parts of all text end to end."""
    fingerprint: Sha256
    """SHA-256 over the splits' and the tokenizer's digests: names this data set."""
    sha256: Sha256 | None = None
    """SHA-256 of all other keys (`seal`), which `write` adds; None in a folder of version 1."""

    @model_validator(mode="after")
    def _parts_go_together(self) -> "Manifest":
        if missing := set(SPLITS) - set(self.splits):
            raise ValueError(f"splits: no {sorted(missing)[0]!r}")
        for name, split in self.splits.items():
            if split.bytes < split.documents:
                raise ValueError(
                    f"splits.{name}.bytes: {split.bytes} is less than its {split.documents} "
                    f"documents, none of which is empty"
                )
        if self.dtype == "uint16" and self.tokenizer.vocab_size > 2**16:
            raise ValueError(
                f"dtype: uint16 has no room for tokenizer.vocab_size: {self.tokenizer.vocab_size}"
            )
        digests = [split.index_sha256 for split in self.splits.values()]
        if any((digest is None) == (self.format_version > UNSEALED_VERSION) for digest in digests):
            raise ValueError(
                f"format_version: {self.format_version} goes with keys 'index_sha256' of all "
                f"splits from version {FORMAT_VERSION} on, and with none before"
            )
        if self.fingerprint != data_fingerprint(self.splits, self.tokenizer):
            raise ValueError(
                f"fingerprint: {self.fingerprint[:12]}... is not that of the digests beside it: "
                f"the manifest is damaged, or was changed"
            )
        return self

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Reads the manifest of a prepared folder; the only function that does.

        Args:
            folder: The folder.

        Returns:
            The manifest, with every value in range and its digest verified.

        Raises:
            DataError: It cannot be read, was written by a newer version, or has been changed.
        """
        path = plain_file(folder, MANIFEST_FILE)
        place = f"{path}: not a readable manifest of prepared data"
        tree = parse_json(read_bounded(path, MOST_BYTES), place)
        if not isinstance(tree, dict) or "format_version" not in tree:
            raise DataError(f"{place}: no key 'format_version'")
        version = tree["format_version"]
        if type(version) is not int or not UNSEALED_VERSION <= version <= FORMAT_VERSION:
            raise DataError(
                f"{path}: format version {version!r:.60}; this Polyad reads versions "
                f"{UNSEALED_VERSION} to {FORMAT_VERSION}: prepare the data again, or use the "
                f"version that wrote it"
            )
        try:
            manifest = cls.model_validate(tree)
        except ValidationError as error:
            raise DataError(f"{path}: {_first_problem(error)}") from None
        expected = seal(tree) if version > UNSEALED_VERSION else None
        if manifest.sha256 != expected:
            raise DataError(
                f"{path}: damaged, or changed by hand: its key 'sha256' is not that of the other "
                f"keys; prepare the data again"
            )
        return manifest

    def write(self, folder: Path) -> "Manifest":
        """Seals the manifest and writes it.

        Args:
            folder: The folder it describes.

        Returns:
            The manifest as `read` gives it.
        """
        return write_sealed(self, folder / MANIFEST_FILE)


def _first_problem(error: ValidationError) -> str:
    """Describes the key, the value if it is short, and what is allowed."""
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    key = f"{'.'.join(map(str, first['loc']))!r:.200}"
    if first["type"] == "value_error":  # it names its keys itself, within this one
        return f"key {key}: {message}" if first["loc"] else message
    value = "" if first["type"] == "missing" else f", not {first['input']!r:.60}"
    return f"key {key}: {message}{value}"


def plain_file(folder: Path, name: str) -> Path:
    """Returns a file of a prepared folder, after checking that it is not a link out of it.

    The folder itself may be a link, and may lie behind one.

    Args:
        folder: The folder.
        name: The name of one of `FILES`.

    Returns:
        Its path.

    Raises:
        DataError: It is a symbolic link that leaves the folder.
    """
    path = folder / name
    if path.is_symlink():
        try:
            inside = path.resolve().parent == folder.resolve()
        except (OSError, RuntimeError):  # a link to itself
            inside = False
        if not inside:
            raise DataError(
                f"{path}: is a symbolic link that leaves the folder; put the file itself there, or "
                f"make the whole folder a link"
            )
    return path


def data_fingerprint(splits: dict[SplitName, SplitInfo], tokenizer: TokenizerInfo) -> str:
    """Computes the fingerprint of a data set from what training reads.

    Args:
        splits: The splits.
        tokenizer: The tokenizer.

    Returns:
        A SHA-256, hexadecimal, over the digests of both.
    """
    parts = [tokenizer.fingerprint, *(f"{name}:{splits[name].sha256}" for name in SPLITS)]
    # The .bin files alone do not determine where documents end.
    parts.extend(f"{name}:{splits[name].ends_sha256}" for name in SPLITS)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def ends_digest(*paths: Path) -> str:
    """Digests the first and last `END_BYTES` of files and their sizes.

    Args:
        paths: The files.

    Returns:
        A SHA-256, hexadecimal, that tells files apart in a time independent of their size.
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
