"""The contents of a source, and its files in folders.

Links are followed, as with `cp -rL`; hidden files are left out.
"""

import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from polyad.data.errors import DataError
from polyad.data.images.shards import Entry, Packed, Shard
from polyad.data.names import SPLIT_NAMES
from polyad.data.prepared import LeftOut, is_hidden

IMAGE_SUFFIXES = frozenset(
    {
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".dib", ".gif"),
        *(".ppm", ".pgm", ".pbm", ".pnm", ".tif", ".tiff"),
    }
)
"""File extensions of the formats that are decoded, in lower case."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A source, before its images are listed."""

    shards: list[Shard]
    """The shards; each entry refers to one by its index here."""
    splits: dict[str, Callable[[], Iterator[Entry]]]
    """By split, a function that lists its images."""
    class_names: list[str] | None
    """The class names of all shards; None: classes are numbered up to the highest label, unless
    shards have names of their own."""
    names_of_shards: list[list[str] | None] = field(default_factory=list)
    """The class names of each shard, None if it has none; empty: `class_names` applies."""
    has_attributes: bool = False
    """Whether an image has any number of the classes, which are then attributes."""
    domain_names: list[str] = field(default_factory=list)
    """The domain names; empty: images have no domains."""
    left_out: LeftOut = field(default_factory=LeftOut)
    """Complete once all splits are listed."""
    packed: Packed | None = None
    """Receives images of tables; None if there are none."""
    total_bytes: int = 0
    """Size of all images if known, for the progress display."""


def split_of(file: Path, root: Path) -> str | None:
    """Returns the split named by a file or its folders, the nearest first."""
    inside = file.relative_to(root).parts if root.is_dir() else (file.name,)
    return next(filter(None, map(split_in, reversed(inside))), None)


def split_in(name: str) -> str | None:
    """Returns the split that a word in a name means, as in val2017, training_set or
    test-00000.parquet."""
    words = re.split(r"[\W\d_]+", name.lower())
    return next((SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES), None)


def files_by_split(files: list[Path], root: Path) -> dict[str, list[int]]:
    """Groups the numbers of files by split; a file that names none belongs to train.

    Args:
        files: All files.
        root: What the user named: a file, or the folder of the files.
    """
    found: dict[str, list[int]] = {}
    for number, file in enumerate(files):
        found.setdefault(split_of(file, root) or "train", []).append(number)
    return found


def is_image(name: str) -> bool:
    """Returns whether a file name is that of an image."""
    return PurePosixPath(name).suffix.lower() in IMAGE_SUFFIXES


Parts = tuple[str, ...]
"""The components of a path."""


class File(NamedTuple):
    """A file of a tree."""

    parts: Parts
    """Its path in the tree."""
    size: int


@dataclass
class Tree:
    """Files and folders, without hidden ones."""

    root: Path
    files: list[File] = field(default_factory=list)
    folders: set[Parts] = field(default_factory=set)


def folder_tree(root: Path, left_out: LeftOut, output: Path | None = None) -> Tree:
    """Walks a folder, and the folders that links in it point to.

    Args:
        root: The folder.
        left_out: Counts files that are not taken.
        output: The prepared folder, which is skipped.

    Raises:
        DataError: The link of an image is broken, or a folder cannot be read.
    """
    tree = Tree(root.resolve())
    waiting: list[tuple[Parts, tuple[str, ...]]] = [((), (str(tree.root),))]
    while waiting:
        parts, around = waiting.pop()
        place = tree.root.joinpath(*parts)
        try:
            with os.scandir(place) as found:
                entries = sorted(found, key=lambda entry: entry.name)
            for entry in entries:
                inside = (*parts, entry.name)
                if is_hidden(entry.name):
                    left_out.add("hidden files and folders")
                elif output is not None and entry.path == str(output):
                    continue
                elif entry.is_dir():
                    real = os.path.realpath(entry.path) if entry.is_symlink() else entry.path
                    if real in around:
                        left_out.add("links to a folder that contains them")
                        continue
                    tree.folders.add(inside)
                    waiting.append((inside, (*around, real)))
                else:
                    _add_file(tree, entry, inside, left_out)
        except OSError as error:
            raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from None
    return tree


def _add_file(tree: Tree, entry: "os.DirEntry[str]", parts: Parts, left_out: LeftOut) -> None:
    try:
        about = entry.stat()
    except FileNotFoundError:
        if is_image(entry.name):
            raise
        left_out.add("broken links")
        return
    if stat.S_ISREG(about.st_mode):
        tree.files.append(File(parts, about.st_size))
    else:
        left_out.add("pipes, sockets and devices")
