"""Sources of text: a name or a path becomes a stream of documents."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Literal, TypedDict

from typing_extensions import Unpack

from polyad.data.errors import DataError, nearest, one_line, user_path
from polyad.data.prepared import LeftOut, SplitName, in_words
from polyad.data.text.folders import (
    PACKAGE,
    ending_of,
    module_files,
    package,
    standard_library,
    text_files,
)
from polyad.data.text.readers import FORMATS, LINES, MODULE, TEXT, Format
from polyad.data.text.source import EMPTY, UNREADABLE, WHOLE, Document, Part, Source

PYTHON_STDLIB = "python-stdlib"
"""A source that exists on every machine: see `data/text/folders.py`."""
DocumentKind = Literal["files", "lines"]
"""What counts as a document of a text file: the whole file, or a line."""
FileFormat = Literal["text"]
"""A file format that is used whatever the file extension."""
TABLES = (".tsv",)
"""Extensions of tables, which are not sources of text."""
TEXT_KEY = "text"
"""The default key or column of the text."""


@dataclass(frozen=True)
class SourceFile:
    """A file of a source: its place, its name relative to the source, and its size in bytes."""

    path: Path
    name: str
    size: int
    modified_ns: int
    format: Format


@dataclass(frozen=True)
class FileSource:
    """An ordered set of files that can be read any number of times, always the same way.

    Attributes:
        spec: The source as the user wrote it.
        files: The files, in reading order.
        text_key: Key or column of the text in `.jsonl` and `.parquet` files.
        skip_unreadable: Whether to skip a file that is not text, rather than raise an error.
        part: Which of its documents are read.
        left_out: Counts of what else is in the folder.
    """

    spec: str
    files: tuple[SourceFile, ...]
    text_key: str = TEXT_KEY
    skip_unreadable: bool = False
    part: Part = WHOLE
    left_out: LeftOut = field(default_factory=LeftOut, compare=False)

    def taken(self) -> Counter[str]:
        """Counts the files that are read, by extension."""
        return Counter(ending_of(file.path.name) for file in self.files)

    @property
    def has_text_files(self) -> bool:
        """Whether some file is plain text, whose documents the user defines."""
        return any(file.format.is_text for file in self.files)

    @property
    def has_keys(self) -> bool:
        """Whether some file has keys or columns, of which the user chooses one."""
        return any(file.format.has_keys for file in self.files)

    def is_text_of_fewer_documents(self, count: int) -> bool:
        """Returns whether the source is plain text with too few documents to assign one by one.

        Returns:
            Whether all files are text, with fewer documents than `count`. Files are not read for
            this, lines only as far as needed.
        """
        if not all(file.format.is_text for file in self.files):
            return False
        if all(file.format is TEXT for file in self.files):
            return sum(file.size > 0 for file in self.files) < count
        return sum(1 for _ in islice(self.documents(), count)) < count

    @property
    def total_bytes(self) -> int:
        """Size of all files on the disk, in bytes."""
        return sum(file.size for file in self.files)

    def listing_digest(self) -> str:
        """Returns a SHA-256 over the names, sizes and modification times of the files.

        The digest shows whether the source has changed, without reading it.
        """
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.name}\0{file.size}\0{file.modified_ns}\0".encode(**_NAME_BYTES))
        return digest.hexdigest()

    def share(self, part: Part) -> "FileSource":
        """Returns a part: of the files if there are as many, else of the documents."""
        if len(self.files) >= part.parts:
            return replace(self, files=self.files[part.number :: part.parts])
        return replace(self, part=part)

    def documents(self, left_out: LeftOut | None = None) -> Iterator[Document]:
        """Reads the source from its beginning.

        Args:
            left_out: Counts empty documents and unreadable files.

        Yields:
            The documents that are not empty, in order; memory holds one at a time.

        Raises:
            DataError: A file cannot be read, or has invalid content for its kind.
        """
        counted = left_out if self.part.number == 0 else None
        return self.part.of(self._documents(LeftOut() if counted is None else counted))

    def _documents(self, left_out: LeftOut) -> Iterator[Document]:
        for file in self.files:
            try:
                for number, text in enumerate(file.format.read(file.path, self.text_key)):
                    if text:
                        yield Document(f"{file.name}#{number}", text)
                    else:
                        left_out.add(EMPTY)
            except (OSError, UnicodeDecodeError) as error:
                if not self.skip_unreadable:
                    reason = getattr(error, "strerror", None) or one_line(error)
                    raise DataError(f"{file.path}: cannot be read: {reason}") from None
                left_out.add(UNREADABLE)


_NAME_BYTES = {"encoding": "utf-8", "errors": "surrogateescape"}  # file names may be any bytes


class ReadOptions(TypedDict, total=False):
    """How text is read."""

    text_key: str
    """Key or column of the text in `.jsonl`, `.csv` and `.parquet` files and data sets."""
    streaming: bool
    """Whether data sets of the Hugging Face hub are read without a copy on the disk."""
    documents: DocumentKind
    """What a document of a text file is."""
    file_format: FileFormat | None
    """The format of all files, whatever their extension; None: by extension."""


def open_splits(spec: str, **options: Unpack[ReadOptions]) -> dict[SplitName, Source]:
    """Opens a source with all of its splits.

    Args:
        spec: As for `open_source`.
        options: How it is read.

    Returns:
        A source for each split: for a Hugging Face data set those of train, validation and test
        that it has; for anything else only train.

    Raises:
        DataError: There is no such source, or it has no train split.
    """
    from polyad.data.text.hub import find_dataset, open_dataset

    if not spec:  # else it would mean the current folder
        raise DataError("the source is empty; a name or a path is needed")
    text_key = options.get("text_key", TEXT_KEY)
    try:
        dataset = find_dataset(spec)
        if dataset is None:
            kind, file_format = options.get("documents", "files"), options.get("file_format")
            return {"train": _open_files(spec, text_key, kind, file_format)}
    except OSError as error:
        raise DataError(f"{error.filename or spec}: cannot be read: {error.strerror}") from None
    return open_dataset(dataset, text_key=text_key, streaming=options.get("streaming", False))


def open_source(spec: str, *, split: SplitName = "train", **options: Unpack[ReadOptions]) -> Source:
    """Opens a source given by name or path, without reading its text.

    Args:
        spec: `python-stdlib`, or `python:` and a package; a `.txt`, `.jsonl`, `.jsonl.gz`,
            `.jsonl.zst`, `.csv` or `.parquet` file; a folder, searched for such files (hidden ones
            left out) and read in the order of their paths; or a Hugging Face data set, see
            `data.text.hub.find_dataset`.
        split: The split of a data set that has several; train if it does not have this one.
        options: How it is read.

    Returns:
        The source.

    Raises:
        DataError: There is no such source, or it is a file or folder without text files.
    """
    splits = open_splits(spec, **options)
    return splits.get(split) or splits["train"]


def _open_files(
    spec: str, text_key: str, documents: DocumentKind, file_format: FileFormat | None
) -> FileSource:
    if spec == PYTHON_STDLIB or spec.startswith(PACKAGE):
        root = standard_library() if spec == PYTHON_STDLIB else _package(spec)
        files = module_files(root)
        if not files:
            raise DataError(f"{spec}: this Python has no source files in {root}")
        found = tuple(_source_file(path, root, MODULE) for path in files)
        return FileSource(spec, found, text_key, skip_unreadable=True)
    path, left_out = user_path(spec), LeftOut()
    if not path.exists():
        raise DataError(_missing(spec, path))
    if path.is_dir():
        files = text_files(path, lambda f: _format(f, "files", file_format) is not None, left_out)
        if not files:
            there = in_words(left_out)
            raise DataError(
                f"{spec}: no {'' if file_format else _endings() + ' '}file in this folder"
                f"{f', but {there}' * bool(there)}"
            )
    else:
        files, path = [path], path.parent
    found = tuple(_source_file(file, path, _format(file, documents, file_format)) for file in files)
    source = FileSource(spec, found, text_key, left_out=left_out)
    if source.total_bytes == 0:
        raise DataError(f"{spec}: contains no text (0 bytes); at least one document is needed")
    return source


def _package(spec: str) -> Path:
    name = spec.removeprefix(PACKAGE)
    if (root := package(name)) is None:
        raise DataError(
            f"{spec}: {name!r} is not a package that this Python has; use the name that is "
            f"imported, as in {PACKAGE}torch"
        )
    return root


def _source_file(path: Path, root: Path, kind: Format | None) -> SourceFile:
    if kind is None and path.suffix.lower() in TABLES:
        raise DataError(
            f"{path}: is a table, which need not be prepared: a run with data.kind: sequences "
            "reads labelled rows directly from data.path; use --format text to read any file as "
            "text"
        )
    if kind is None:
        raise DataError(
            f"{path}: the name of a text file has to end in {_endings()}; use --format text to "
            "read any file as text"
        )
    status = path.stat()
    name = path.relative_to(root).as_posix()
    return SourceFile(path, name, status.st_size, status.st_mtime_ns, kind)


def _format(path: Path, documents: DocumentKind, file_format: FileFormat | None) -> Format | None:
    name = path.name.lower()
    kind = next((each for ending, each in FORMATS.items() if name.endswith(ending)), None)
    if file_format or kind is TEXT:
        return LINES if documents == "lines" else TEXT
    return kind


def _endings() -> str:
    return ", ".join(FORMATS)


def _missing(spec: str, path: Path) -> str:
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    from polyad.data.text.hub import SHORT_NAMES

    known = (PYTHON_STDLIB, f"{PACKAGE}PACKAGE", *SHORT_NAMES)
    return (
        f"{spec}: no such source; it is {', '.join(known)}, hub:OWNER/NAME[:CONFIG], a "
        f"{_endings()} file or a folder of those{nearest(path.name, [*siblings, *known])}"
    )
