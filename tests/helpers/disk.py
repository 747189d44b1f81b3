"""Records the disk operations of saving, replays any part of them, and injects failures.

`RecordingOs` replaces `os` in `parallel/checkpoint/manage.py` and `data/files.py`; the real
operations are executed, too. `Disk` is a model of a file system that loses what was not flushed:
contents by `fsync` of the file, names by `fsync` of the folder.
"""

import errno
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from polyad.data import files
from polyad.parallel.checkpoint import manage

Operation = tuple[int, str, str, Any]
"""Nanoseconds, kind, path, and the content of a write or the target of a rename."""


class RecordingOs:
    """`os` that records every operation, and makes one of them fail on request."""

    def __init__(self, fail_at: int | None = None, error: int = errno.EIO) -> None:
        self.operations: list[Operation] = []
        self.failed: tuple[str, str] | None = None
        """Kind and path of the operation that failed."""
        self._fail_at, self._error = fail_at, error
        self._open: dict[int, str] = {}

    def __getattr__(self, name: str) -> Any:
        call = getattr(os, name)

        def noted(path: Any) -> None:
            self._note(name, path)
            call(path)

        return noted if name in ("unlink", "mkdir", "rmdir") else call

    def _note(self, kind: str, path: Any, what: Any = None) -> None:
        if len(self.operations) == self._fail_at:
            self._fail_at, self.failed = None, (kind, str(path))
            named = kind not in ("write", "sync")  # by number, so the kernel knows no name
            raise OSError(self._error, os.strerror(self._error), *([str(path)] if named else []))
        self.operations.append((time.monotonic_ns(), kind, str(path), what))

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            self._note("create", path)
        descriptor = os.open(path, flags, mode)
        self._open[descriptor] = str(path)
        return descriptor

    def write(self, descriptor: int, data: Any) -> int:
        self._note("write", self._open[descriptor], bytes(data))
        return os.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        path = self._open[descriptor]
        self._note("sync_folder" if os.path.isdir(path) else "sync", path)
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        del self._open[descriptor]
        os.close(descriptor)

    def rename(self, path: Any, target: Any) -> None:
        self._note("rename", path, str(target))
        os.rename(path, target)


@contextmanager
def recorded(fail_at: int | None = None, error: int = errno.EIO) -> Iterator[RecordingOs]:
    """A context that records this process's storage operations, and makes one fail."""
    recorder = RecordingOs(fail_at, error)
    with mock.patch.object(manage, "os", recorder), mock.patch.object(files, "os", recorder):
        yield recorder


_AUDITED: list[tuple[str, str]] = []
_WATCHED: list[str] = []
_EVENTS = {
    "os.rename": "rename", "os.remove": "unlink", "os.mkdir": "mkdir", "os.rmdir": "rmdir",
    "os.truncate": "truncate", "os.link": "link", "os.symlink": "symlink",
}  # fmt: skip


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _WATCHED:
        return
    if event == "open":
        path, _, flags = arguments
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and not isinstance(path, int):
            _AUDITED.append(("create", os.fsdecode(path)))
    elif event in _EVENTS and not isinstance(arguments[0], int):
        _AUDITED.append((_EVENTS[event], os.fsdecode(arguments[0])))


@contextmanager
def audited(folder: Path) -> Iterator[list[tuple[str, str]]]:
    """Yields all changes below a folder that the interpreter's audit hook reports."""
    if not getattr(sys, "_polyad_audit", False):
        sys.addaudithook(_audit)  # it can never be removed
        sys._polyad_audit = True  # type: ignore[attr-defined]
    _AUDITED.clear()
    _WATCHED.append(str(folder))
    found: list[tuple[str, str]] = []
    try:
        yield found
    finally:
        _WATCHED.clear()
        found += [(kind, path) for kind, path in _AUDITED if path.startswith(str(folder))]


@dataclass
class File:
    """Content as seen by processes, and as stored on disk."""

    content: bytes = b""
    durable: bytes | None = None


@dataclass
class Folder:
    """Names as seen by processes, and changes that are not on disk yet, in order."""

    names: dict[str, "File | Folder"] = field(default_factory=dict)
    durable: dict[str, "File | Folder"] = field(default_factory=dict)
    pending: list[tuple[str, str, Any]] = field(default_factory=list)


Tree = dict[str, bytes | None]
"""Contents by path; None is a folder."""


class Disk:
    """A file system on which operations are replayed.

    Args:
        root: the root folder.
    """

    def __init__(self, root: str) -> None:
        self._root, self._top = root, Folder()

    def apply(self, operation: Operation) -> None:
        """Applies one operation, which reaches the disk with the next flush."""
        _, kind, path, what = operation
        if kind == "sync_folder":
            folder = self._find(path)
            folder.durable, folder.pending = dict(folder.names), []
            return
        above, name = self._find(os.path.dirname(path)), os.path.basename(path)
        if kind in ("write", "sync"):
            file = above.names[name]
            if kind == "write":
                file.content += what
            else:
                file.durable = file.content
            return
        if kind == "mkdir" and isinstance(above.names.get(name), Folder):
            return  # another process was faster, and this one got an error
        change = {
            "create": ("set", name, File()), "mkdir": ("set", name, Folder()),
            "unlink": ("drop", name, None), "rmdir": ("drop", name, None),
            "rename": ("rename", name, os.path.basename(what or "")),
        }[kind]  # fmt: skip
        if kind == "rename":
            assert os.path.dirname(what) == os.path.dirname(path), "a rename into another folder"
        _change(above.names, change)
        above.pending.append(change)

    def alive(self) -> Tree:
        """The contents after all processes are killed: nothing is lost."""
        return _tree(self._top, lambda f: f.names, lambda f: f.content)

    def after_power_cuts(self) -> Iterator[Tree]:
        """Yields possible contents after a power failure.

        Unflushed files are empty, or zeros. Of unflushed names in each folder all are present, or
        those up to some moment, or all but one, or only one.
        """
        folders = [f for f in _folders(self._top) if f.pending]
        choices: list[dict[int, list[int]]] = [{}]
        for folder in folders:
            count = len(folder.pending)
            everything = list(range(count))
            kept = [everything[:n] for n in range(count + 1)]
            kept += [[i for i in everything if i != n] for n in everything]
            kept += [[n] for n in everything]
            choices += [{id(folder): each} for each in kept]
        none: dict[int, list[int]] = {id(folder): [] for folder in folders}
        for others in ({}, none):
            for choice in choices:
                kept_of = others | choice
                for lost in (lambda f: b"", lambda f: bytes(len(f.content))):
                    yield _tree(
                        self._top,
                        lambda f, kept_of=kept_of: _names(f, kept_of.get(id(f))),
                        lambda f, lost=lost: lost(f) if f.durable is None else f.durable,
                    )

    def _find(self, path: str) -> "File | Folder":
        place: File | Folder = self._top
        for name in Path(path).relative_to(self._root).parts:
            place = place.names[name]
        return place


def _change(names: dict[str, Any], change: tuple[str, str, Any]) -> None:
    kind, name, what = change
    if kind == "set":
        names[name] = what
    elif kind == "drop":
        names.pop(name, None)
    elif name in names:
        names[what] = names.pop(name)


def _names(folder: Folder, kept: list[int] | None) -> dict[str, Any]:
    if kept is None:
        return folder.names
    names = dict(folder.durable)
    for number in kept:
        _change(names, folder.pending[number])
    return names


def _folders(folder: Folder) -> Iterator[Folder]:
    yield folder
    for inner in folder.names.values():
        if isinstance(inner, Folder):
            yield from _folders(inner)


def _tree(folder: Folder, names: Any, content: Any, prefix: str = "") -> Tree:
    found: Tree = {}
    for name, inner in names(folder).items():
        if isinstance(inner, Folder):
            found[prefix + name] = None
            found |= _tree(inner, names, content, f"{prefix}{name}/")
        else:
            found[prefix + name] = content(inner)
    return found


def read_tree(root: Path) -> Tree:
    """Reads the contents of a folder."""
    return {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes()
        for path in sorted(root.rglob("*"))
    }


def write_tree(root: Path, tree: Tree) -> None:
    """Writes contents to a new folder."""
    root.mkdir()
    for name, content in sorted(tree.items()):
        if content is None:
            (root / name).mkdir(exist_ok=True)
        else:
            (root / name).write_bytes(content)
