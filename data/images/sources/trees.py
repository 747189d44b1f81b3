"""Files in folders, whether in a folder, a zip or a tar: the same tree has the same images.

Links are followed, as `cp -rL` would; what is hidden is left out.
"""

import os
import stat
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from polyad.data.errors import DataError
from polyad.data.images.shards import Shard
from polyad.data.images.sources.found import is_image
from polyad.data.left_out import LeftOut, is_hidden

Parts = tuple[str, ...]
"""The names of a path."""
HIDDEN_FILES = "hidden files and folders"
CIRCLES = "links to a folder that they are in"
MOST_LINKS = 40
"""Links that lead from one to the next, at most."""
MOST_LINKED = 1_000_000
"""Files that links may add to an archive, beside four times its own."""


class File(NamedTuple):
    """A file of a tree."""

    parts: Parts
    """Its path in the tree."""
    size: int
    shard: int = 0
    offset: int = 0
    name: str = ""
    """What its shard calls it; in a folder its path says that."""


@dataclass
class Tree:
    """Files and folders, without what is hidden."""

    root: Path
    """A folder, or the archive."""
    shards: list[Shard] = field(default_factory=list)
    """The shards of an archive; empty: a folder, whose files are read one by one."""
    files: list[File] = field(default_factory=list)
    folders: set[Parts] = field(default_factory=set)


def folder_tree(root: Path, left_out: LeftOut, output: Path | None = None) -> Tree:
    """Walks through a folder, and through the folders that links in it lead to.

    Args:
        root: The folder.
        left_out: Counts what is not taken.
        output: The prepared folder, which is no part of it.

    Raises:
        DataError: The link of an image leads to nothing, or a folder cannot be read.
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
        left_out.add("links to nothing", "/".join(parts))
        return
    if stat.S_ISREG(about.st_mode):
        tree.files.append(File(parts, about.st_size))
    else:
        left_out.add("pipes, sockets and devices", "/".join(parts))


class ArchiveTree:
    """The tree of an archive, member by member.

    Args:
        root: The archive.
        shards: It, as its members' numbers of shards mean it.
        left_out: Counts what is not taken.
    """

    def __init__(self, root: Path, shards: list[Shard], left_out: LeftOut) -> None:
        self._root, self._shards, self._left_out = root, shards, left_out
        self._files: dict[Parts, File] = {}
        self._folders: set[Parts] = set()
        self._links: dict[Parts, Parts] = {}

    def parts_of(self, name: str) -> Parts | None:
        """The path of a member; None: it is hidden, or leads out of the archive."""
        parts = tuple(part for part in name.split("/") if part not in ("", "."))
        if ".." in parts:
            self._left_out.add("members that lead out of the archive", name)
        elif any(map(is_hidden, parts)):
            self._left_out.add(HIDDEN_FILES, name, mistake=False)
        else:
            return parts
        return None

    def add_folder(self, parts: Parts) -> None:
        """Adds a folder, which may be empty."""
        self._folders |= {parts[:depth] for depth in range(1, len(parts) + 1)}

    def add_file(self, file: File) -> None:
        """Adds a file; of several with one name the last is it, as when they are unpacked."""
        if self._files.pop(file.parts, None) or self._links.pop(file.parts, None):
            again = "members with the name of a later one"
            self._left_out.add(again, file.name, mistake=False)
        self._files[file.parts] = file
        self.add_folder(file.parts[:-1])

    def add_link(self, parts: Parts, target: str, *, hard: bool) -> None:
        """Adds a link to another member.

        Args:
            parts: Its path.
            target: What stands in it.
            hard: Whether that is a path in the archive; else from the link's folder on.
        """
        path = list(() if hard else parts[:-1])
        for part in target.split("/"):
            if part == "..":
                path = path[:-1] if path else ["..", ".."]  # out of the archive
            elif part not in ("", "."):
                path.append(part)
        if target.startswith("/") and not hard:
            path = [".."]
        self._files.pop(parts, None)
        self._links[parts] = tuple(path)

    def tree(self) -> Tree:
        """All of it, with links followed."""
        if self._links:
            self._follow()
        return Tree(self._root, self._shards, list(self._files.values()), self._folders)

    def _follow(self) -> None:
        """Adds what links lead to: files first, as a folder that a link leads to may hold them."""
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
                self._left_out.add("links to what is not in the archive", "/".join(link))
                continue
            if len(self._files) + len(inside[target]) > most:
                raise DataError(f"{self._root}: {'/'.join(link)}: its links multiply its files")
            self.add_folder(link)
            for file in inside[target]:
                parts = (*link, *file.parts[len(target) :])
                self._files[parts] = file._replace(parts=parts)
                self.add_folder(parts[:-1])
