"""File operations of checkpoints, each of which is on the disk when it returns.

All that is written, renamed or removed below a run's `checkpoints` folder goes through here, so
that a test can record every operation and fail any of them. Imports no library: the process that
writes snapshots starts with it.
"""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def reason_of(error: OSError) -> str:
    """The reason of a failed file operation, in a few words."""
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def write_file(path: Path, parts: Iterable[Any], *, replace: bool = False) -> int:
    """Writes a file and waits until its content, but not yet its name, is on the disk.

    Args:
        path: the file, which may not be there.
        parts: its content, piece by piece, as bytes or anything with a buffer.
        replace: whether it may be there; then it is emptied first.

    Returns:
        Bytes written.

    Raises:
        OSError: with the file's name.
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
    """Waits until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)


def make_folder(path: Path, above: int = 1) -> None:
    """Makes a folder, on the disk when this returns.

    Args:
        path: the folder.
        above: how many of the folders above it may be missing, and are made: of a run's folder that
            was removed no part comes back.
    """
    if path.is_dir():
        return
    if above:
        make_folder(path.parent, above - 1)
    try:
        os.mkdir(path)
    except FileExistsError:  # another process was quicker
        if not path.is_dir():
            raise
    sync_folder(path.parent)


def rename(path: Path, target: Path) -> None:
    """Gives a file or folder another name in the same folder; the disk knows when this returns."""
    os.rename(path, target)
    sync_folder(target.parent)


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file, or another content of it: readers see the old one or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    write_file(partial, [content], replace=True)
    rename(partial, path)


def remove_file(path: Path) -> None:
    """Removes a file if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def remove_tree(path: Path) -> None:
    """Removes a folder and all in it. Links are removed, not followed."""
    with os.scandir(path) as entries:
        listed = list(entries)
    for entry in listed:
        if entry.is_dir(follow_symlinks=False):
            remove_tree(Path(entry.path))
        else:
            os.unlink(entry.path)
    os.rmdir(path)


def set_aside(path: Path, ending: str = "deleted") -> Path:
    """Renames a folder, before it is removed, so that no half of it passes for a checkpoint.

    Args:
        path: the folder.
        ending: of its new name.
    """
    aside = path.with_name(f".{path.name}.{ending}")
    if aside.exists():
        remove_tree(aside)
    rename(path, aside)
    return aside


def discard(path: Path) -> None:
    """Removes a folder; first its name, on the disk, then what is in it."""
    remove_tree(set_aside(path))
