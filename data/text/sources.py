"""Sources of text: a name or a path becomes a stream of documents."""

import importlib.util
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from polyad.data.errors import DataError, listed, one_line, user_path
from polyad.data.files import is_hidden
from polyad.data.tables import HUB, SPLITS, SplitName, is_saved, open_tables
from polyad.data.text.manifest import ReadOptions
from polyad.data.text.readers import FORMATS, Column, Read, read_lines, read_rows, read_text

PYTHON_STDLIB, PACKAGE = "python-stdlib", "python:"
"""A source that exists on every machine, and what the name of a package's modules begins with."""
SHORT_NAMES = {
    "openwebtext": "hub:Skylion007/openwebtext",
    "wikitext-103": "hub:Salesforce/wikitext:wikitext-103-raw-v1",
    "wikitext-103-v1": "hub:Salesforce/wikitext:wikitext-103-v1",
}
"""Short names of data sets. `wikitext-103-v1` has rare words as <unk>."""
# Test suites repeat the library's own lines and hold deliberately broken files; the package
# folders hold installed packages, which differ between machines.
LEFT_OUT = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)
EMPTY, UNREADABLE = "documents without text", "unreadable files"
"""Reasons for which a pass over a source leaves something out."""
OTHER_SPLITS = f"splits other than {', '.join(SPLITS)}"
"""Another reason for which something is left out."""

# WikiText is stored line by line. A level-1 heading between blank lines opens an article:
# " = Title = "; " = = Section = = " is of level 2.
WIKITEXT = "wikitext-"
_HEADING = re.compile(r" = (?!= ).*(?<! =) = \n?")
_BLANK_LINE = " \n"
"""A blank line in WikiText's own files; the hub has an empty string instead."""


class Document(NamedTuple):
    """One document of a source.

    Attributes:
        name: Its file or data set, and `#N` for document N after the first.
        text: The text, not empty.
    """

    name: str
    text: str

    @property
    def size(self) -> int:
        """Bytes of the text in UTF-8."""
        return len(self.text.encode())


class SourceFile(NamedTuple):
    """A file of a source, or the rows of a data set.

    Attributes:
        name: Its path, or the name of the rows.
        size: Its size in bytes; 0 if it is unknown.
        read: Yields the text of each of its documents.
    """

    name: str
    size: int
    read: Callable[[], Iterator[str]]


@dataclass(frozen=True)
class Source:
    """Documents that can be read any number of times, always the same way.

    Attributes:
        spec: The source as the user wrote it.
        files: Where the documents are, in reading order.
        joins_articles: Whether documents are lines of WikiText, which are joined to articles.
        is_code: Whether its files are modules, of which unreadable ones are skipped.
        part: Which of its documents are read, from 0, and of how many shares.
        left_out: Counts of what else the source has.
    """

    spec: str
    files: tuple[SourceFile, ...]
    joins_articles: bool = False
    is_code: bool = False
    part: tuple[int, int] = (0, 1)
    left_out: Counter[str] = field(default_factory=Counter, compare=False)

    @property
    def total_bytes(self) -> int:
        """Bytes of the source, about those of its documents; 0 if unknown."""
        return sum(file.size for file in self.files)

    def share(self, number: int, parts: int) -> "Source":
        """Returns every N-th file of the source, or document if there are fewer files.

        Args:
            number: Which part, from 0. Every document of the source is in exactly one.
            parts: How many there are, N.
        """
        if len(self.files) >= parts:
            return replace(self, files=self.files[number::parts])
        return replace(self, part=(number, parts))

    def documents(self, left_out: Counter[str] | None = None) -> Iterator[Document]:
        """Reads the source from its beginning; memory holds one document at a time.

        Args:
            left_out: Counts empty documents and unreadable files.

        Yields:
            The documents that are not empty, in order.

        Raises:
            DataError: A file cannot be read, or has invalid content for its kind.
        """
        number, parts = self.part
        # Each part reads the whole source: the first one counts.
        counts = Counter[str]() if left_out is None or number else left_out
        return islice(self._documents(counts), number, None, parts)

    def _documents(self, left_out: Counter[str]) -> Iterator[Document]:
        documents = self._texts(left_out)
        if self.joins_articles:
            texts = join_articles(document.text for document in documents)
            documents = (Document(f"{self.spec}#{n}", text) for n, text in enumerate(texts))
        for document in documents:
            if document.text:
                yield document
            else:
                left_out[EMPTY] += 1

    def _texts(self, left_out: Counter[str]) -> Iterator[Document]:
        for file in self.files:
            try:
                for number, text in enumerate(file.read()):
                    yield Document(f"{file.name}#{number}" if number else file.name, text)
            except (OSError, UnicodeDecodeError) as error:
                if not self.is_code:
                    reason = getattr(error, "strerror", None) or one_line(error)
                    raise DataError(f"{file.name}: cannot be read: {reason}") from None
                left_out[UNREADABLE] += 1


def join_articles(lines: Iterator[str]) -> Iterator[str]:
    """Joins lines of WikiText, as stored on the hub, into the original articles.

    Args:
        lines: Lines in order, with or without the line feed; a blank line is an empty string.

    Yields:
        Each article from its heading to the line before the next; all of them together are the
        text of WikiText's own file.
    """
    article: list[str] = []
    begun, after_blank = False, True
    for line in lines:
        if after_blank and _HEADING.fullmatch(line):
            if begun:
                yield "".join(article)
                article.clear()
            begun = True
        after_blank = not line.strip()
        article.append(_BLANK_LINE if after_blank else line if line.endswith("\n") else line + "\n")
    if article:
        yield "".join(article)


def open_splits(
    spec: str, options: ReadOptions, render: Callable[[Any], str] | None = None
) -> dict[SplitName, Source]:
    """Opens a source with all of its splits, without reading its text.

    Args:
        spec: `python-stdlib`, or `python:` and a package; a `.txt`, `.jsonl`, `.jsonl.gz`,
            `.jsonl.zst`, `.csv` or `.parquet` file; a folder, searched for such files (hidden ones
            left out) and read in the order of their paths; or a Hugging Face data set: one of
            `SHORT_NAMES`, a folder that `save_to_disk` made, or what `open_tables` reads.
        options: How it is read.
        render: Makes the text of a conversation; None: conversations are refused.

    Returns:
        A source for each split: for a Hugging Face data set those of train, validation and test
        that it has; for anything else only train.

    Raises:
        DataError: There is no such source, it has no train split, or it has no text.
    """
    path, column = SHORT_NAMES.get(spec, spec), Column(options.text_key, render)
    try:
        if spec == PYTHON_STDLIB or spec.startswith(PACKAGE):
            return {"train": _modules(spec)}
        if not path.startswith(HUB) and not is_saved(user_path(path)):
            return {"train": _files(spec, options, column)}
        splits = _rows(spec, path, options, column)
    except OSError as error:
        raise DataError(f"{error.filename or spec}: cannot be read: {error.strerror}") from None
    if "train" not in splits:
        raise DataError(f"{spec}: no train split; it has {listed(splits)}")
    return splits


def _rows(spec: str, path: str, options: ReadOptions, column: Column) -> dict[SplitName, Source]:
    """Opens a data set of the hub, or one that was saved."""
    tables = open_tables(path, (), streaming=options.streaming)
    assert tables is not None
    others = Counter({OTHER_SPLITS: len(tables.unread)} if tables.unread else {})
    by_split: dict[SplitName, Source] = {}
    for split in SPLITS:
        if (rows := tables.splits.get(split)) is None:
            continue
        size = (rows.info.splits or {}).get(split)
        if column.key in (rows.column_names or ()):  # a stream may not know them yet
            rows = rows.select_columns([column.key])
        name = f"{spec} {split}"
        read = partial(read_rows, rows, name, column)
        file = SourceFile(name, (size.num_bytes or 0) if size else 0, read)
        joins = (rows.info.config_name or "").startswith(WIKITEXT)
        by_split[split] = Source(spec, (file,), joins, left_out=others)
    return by_split


def _modules(spec: str) -> Source:
    """Lists the modules of the standard library, or of a package, which is not imported."""
    root = Path(sysconfig.get_path("stdlib"))
    if spec != PYTHON_STDLIB:
        name = spec.removeprefix(PACKAGE)
        module = importlib.util.find_spec(name) if name.isidentifier() else None
        if module is None or not module.submodule_search_locations:
            raise DataError(f"{spec}: {name!r} is not a package that this Python has")
        root = Path(module.submodule_search_locations[0])
    paths: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in LEFT_OUT]
        paths.extend(Path(folder, name) for name in names if name.endswith(".py"))
    paths.sort(key=lambda path: path.relative_to(root).parts)
    return Source(
        spec, tuple(_source_file(path, read_text, Column("")) for path in paths), is_code=True
    )


def _files(spec: str, options: ReadOptions, column: Column) -> Source:
    """Lists a file, or the text files below a folder; links to folders are followed."""
    path, left_out = user_path(spec), Counter[str]()
    if not path.exists():
        names = (PYTHON_STDLIB, f"{PACKAGE}PACKAGE", *SHORT_NAMES)
        raise DataError(
            f"{spec}: no such source; it is {', '.join(names)}, hub:OWNER/NAME[:CONFIG], a "
            f"{', '.join(FORMATS)} file or a folder of those"
        )
    files, paths = [], [path]
    if path.is_dir():
        paths = sorted(_walked(path, left_out), key=lambda file: file.relative_to(path).parts)
    for file in paths:
        reader = _reader(file, options)
        # Reading a pipe would never end.
        if reader is None or (file.exists() and not file.is_file()):
            left_out["files of other kinds"] += 1
        else:
            files.append(_source_file(file, reader, column))
    if not files:
        raise DataError(
            f"{spec}: the name of a text file has to end in {', '.join(FORMATS)}; use --format "
            "text to read any file as text"
        )
    return Source(spec, tuple(files), left_out=left_out)


def _walked(root: Path, left_out: Counter[str]) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root, followlinks=True, onerror=_raise):
        for name in [*filter(is_hidden, subfolders), *names]:
            if is_hidden(name):
                left_out["hidden files and folders"] += 1
            else:
                yield Path(folder, name)
        subfolders[:] = [name for name in subfolders if not is_hidden(name)]


def _raise(error: OSError) -> None:
    raise error


def _source_file(path: Path, reader: Read, column: Column) -> SourceFile:
    return SourceFile(str(path), path.stat().st_size, partial(reader, path, column))


def _reader(path: Path, options: ReadOptions) -> Read | None:
    name = path.name.lower()
    reader = next((each for ending, each in FORMATS.items() if name.endswith(ending)), None)
    if options.file_format or reader is read_text:
        return read_lines if options.documents == "lines" else read_text
    return reader
