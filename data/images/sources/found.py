"""The contents of a source, and its files in folders.

A folder, a zip and a tar of the same tree give the same images. Links are followed, as with
`cp -rL`; hidden files are left out.
"""

import os
import re
import stat
from collections import defaultdict
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
    """Receives images that cannot be read in place, and becomes the last shards; None if there are
    no such images."""
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


def files_by_split(files: list[Path], root: Path, left_out: LeftOut) -> dict[str, list[int]]:
    """Groups the numbers of files by split; a file that names none belongs to train.

    Args:
        files: All files.
        root: What the user named: a file, or the folder of the files.
        left_out: Records a doubt if some files name train and others no split.
    """
    found: dict[str, list[int]] = {}
    unnamed = []
    for number, file in enumerate(files):
        split = split_of(file, root)
        if split is None:
            unnamed.append(file)
        found.setdefault(split or "train", []).append(number)
    if unnamed and len(unnamed) < len(files):
        left_out.doubts.append(
            f"{len(unnamed):,} files of which no name says the split would train "
            f"(as {unnamed[0].relative_to(root)})"
        )
    return found


def is_image(name: str) -> bool:
    """Returns whether a file name is that of an image."""
    return PurePosixPath(name).suffix.lower() in IMAGE_SUFFIXES


Parts = tuple[str, ...]
"""The components of a path."""
HIDDEN_FILES = "hidden files and folders"
CIRCLES = "links to a folder that contains them"
MOST_LINKS = 40
"""Maximum length of a chain of links."""
MOST_LINKED = 1_000_000
"""Number of files that links may add to an archive, on top of four times its own."""


class File(NamedTuple):
    """A file of a tree."""

    parts: Parts
    """Its path in the tree."""
    size: int
    shard: int = 0
    offset: int = 0
    name: str = ""
    """Its name in its shard; in a folder the path says that."""


@dataclass
class Tree:
    """Files and folders, without hidden ones."""

    root: Path
    """A folder, or the archive."""
    shards: list[Shard] = field(default_factory=list)
    """The shards of an archive; empty for a folder, whose files are read one by one."""
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
                    left_out.add(HIDDEN_FILES, "/".join(inside), mistake=False)
                elif output is not None and entry.path == str(output):
                    continue
                elif entry.is_dir():
                    real = os.path.realpath(entry.path) if entry.is_symlink() else entry.path
                    if real in around:
                        left_out.add(CIRCLES, "/".join(inside))
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
        left_out.add("broken links", "/".join(parts))
        return
    if stat.S_ISREG(about.st_mode):
        tree.files.append(File(parts, about.st_size))
    else:
        left_out.add("pipes, sockets and devices", "/".join(parts))


class ArchiveTree:
    """The tree of an archive, built member by member.

    Args:
        root: The archive.
        shards: The archive as shards; the members' shard numbers refer to these.
        left_out: Counts members that are not taken.
    """

    def __init__(self, root: Path, shards: list[Shard], left_out: LeftOut) -> None:
        self._root, self._shards, self._left_out = root, shards, left_out
        self._files: dict[Parts, File] = {}
        self._folders: set[Parts] = set()
        self._links: dict[Parts, Parts] = {}

    def parts_of(self, name: str) -> Parts | None:
        """Returns the path of a member; None if it is hidden, or leads out of the archive."""
        parts = tuple(part for part in name.split("/") if part not in ("", "."))
        if ".." in parts:
            self._left_out.add("members with a path outside the archive", name)
        elif any(map(is_hidden, parts)):
            self._left_out.add(HIDDEN_FILES, name, mistake=False)
        else:
            return parts
        return None

    def add_folder(self, parts: Parts) -> None:
        """Adds a folder, which may be empty."""
        self._folders |= {parts[:depth] for depth in range(1, len(parts) + 1)}

    def add_file(self, file: File) -> None:
        """Adds a file; of several with one name the last wins, as in unpacking."""
        if self._files.pop(file.parts, None) or self._links.pop(file.parts, None):
            again = "members replaced by a later one of the same name"
            self._left_out.add(again, file.name, mistake=False)
        self._files[file.parts] = file
        self.add_folder(file.parts[:-1])

    def add_link(self, parts: Parts, target: str, *, hard: bool) -> None:
        """Adds a link to another member.

        Args:
            parts: The link's path.
            target: The path that it holds.
            hard: Whether that is a path in the archive, or else relative to the link's folder.
        """
        path = list(() if hard else parts[:-1])
        for part in target.split("/"):
            if part == "..":
                path = path[:-1] if path else ["..", ".."]  # leads out of the archive
            elif part not in ("", "."):
                path.append(part)
        if target.startswith("/") and not hard:
            path = [".."]
        self._files.pop(parts, None)
        self._links[parts] = tuple(path)

    def tree(self) -> Tree:
        """Returns the whole tree, with links followed."""
        if self._links:
            self._follow()
        return Tree(self._root, self._shards, list(self._files.values()), self._folders)

    def _follow(self) -> None:
        """Adds the targets of links: files first, since a linked folder may contain them."""
        leading: dict[Parts, Parts] = {}
        for link, target in self._links.items():
            for _ in range(MOST_LINKS):
                target = self._links.get(target, target)
            if target in self._files:
                self._files[link] = self._files[target]._replace(parts=link)
                self.add_folder(link[:-1])
            else:
                leading[link] = target
        inside: defaultdict[Parts, list[File]] = defaultdict(list)
        for file in self._files.values():
            for depth in range(1, len(file.parts)):
                inside[file.parts[:depth]].append(file)
        most = 4 * len(self._files) + MOST_LINKED
        for link, target in leading.items():
            if link[: len(target)] == target:
                self._left_out.add(CIRCLES, "/".join(link))
                continue
            if target not in inside and target not in self._folders:
                self._left_out.add("links that point outside the archive", "/".join(link))
                continue
            if len(self._files) + len(inside[target]) > most:
                raise DataError(
                    f"{self._root}: {'/'.join(link)}: symbolic links make the same files appear "
                    "many times"
                )
            self.add_folder(link)
            for file in inside[target]:
                parts = (*link, *file.parts[len(target) :])
                self._files[parts] = file._replace(parts=parts)
                self.add_folder(parts[:-1])
