"""File operations of checkpoints, each of which is durable on disk when it returns.

All writes, renames and removals below a run's `checkpoints` folder go through this module, so that
a test can record every operation and make any of them fail. Imports no library: the process that
writes snapshots loads it at its start.
"""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def reason_of(error: OSError) -> str:
    """Returns the reason of a failed file operation in a few words."""
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def write_file(path: Path, parts: Iterable[Any], *, replace: bool = False) -> int:
    """Writes a file and waits until its content, but not yet its name, is on disk.

    Args:
        path: the file, which must not exist.
        parts: its content, piece by piece, as bytes or buffers.
        replace: whether it may exist; it is then truncated first.

    Returns:
        Bytes written.

    Raises:
        OSError: with the name of the file.
    """
    existing = os.O_TRUNC if replace else os.O_EXCL
    total = 0
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | existing, 0o644)
        try:
            for part in parts:
                rest = memoryview(part)
                total += len(rest)
                while len(rest):
                    rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:  # write and fsync report a descriptor, not a name
        error.filename = error.filename or str(path)
        raise
    return total


def sync_folder(path: Path) -> None:
    """Waits until the entries of a folder are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)


def make_folder(path: Path, above: int = 1) -> None:
    """Creates a folder, durable on disk on return.

    Args:
        path: the folder.
        above: how many of its parent folders may be missing, and are created: a run's folder that
            was removed is not recreated in part.
    """
    if path.is_dir():
        return
    if above:
        make_folder(path.parent, above - 1)
    try:
        os.mkdir(path)
    except FileExistsError:  # another process was faster
        if not path.is_dir():
            raise
    sync_folder(path.parent)


def rename(path: Path, target: Path) -> None:
    """Renames a file or folder within its folder, durable on disk on return."""
    os.rename(path, target)
    sync_folder(target.parent)


def replace_file(path: Path, content: bytes) -> None:
    """Writes or replaces a file: readers see either the old or the new content."""
    partial = path.with_name(f".{path.name}.partial")
    write_file(partial, [content], replace=True)
    rename(partial, path)


def remove_file(path: Path) -> None:
    """Removes a file if it exists."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def remove_tree(path: Path) -> None:
    """Removes a folder with its content. Links are removed, not followed."""
    with os.scandir(path) as entries:
        listed = list(entries)
    for entry in listed:
        if entry.is_dir(follow_symlinks=False):
            remove_tree(Path(entry.path))
        else:
            os.unlink(entry.path)
    os.rmdir(path)


def set_aside(path: Path, ending: str = "deleted") -> Path:
    """Renames a folder before its removal, so that a half-removed one is never taken for a
    checkpoint.

    Args:
        path: the folder.
        ending: suffix of its new name.
    """
    aside = path.with_name(f".{path.name}.{ending}")
    if aside.exists():
        remove_tree(aside)
    rename(path, aside)
    return aside


def discard(path: Path) -> None:
    """Removes a folder: first renames it durably, then removes its content."""
    remove_tree(set_aside(path))
