"""Files that are there whole or not at all, whatever moment a process is killed at."""

import contextlib
import errno
import fcntl
from collections.abc import Iterator
from pathlib import Path

from polyad.data.errors import DataError

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of a file system that has no locks."""


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Gives errors of the disk in the block the name of a file, where they have none.

    The kernel knows it when a file is opened, but not when it is written and the disk is full.

    Args:
        path: what is written.
    """
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_whole(path: Path, text: str) -> None:
    """Writes a file beside its place, and moves it there; one that was there stays until then.

    Args:
        path: the file.
        text: all that it holds.
    """
    partial = partial_of(path)
    try:
        with named(path):
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def partial_of(path: Path) -> Path:
    """Where `write_whole` writes; what a killed process leaves there may be overwritten."""
    return path.with_name(f".{path.name}.partial")


@contextlib.contextmanager
def writing(path: Path, goes_on: str) -> Iterator[None]:
    """Makes one line of what a disk refuses while a file is written.

    Args:
        path: the file.
        goes_on: what to do when there is room.

    Raises:
        DataError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written: {error.strerror or error}; {goes_on}"
        ) from error


@contextlib.contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[bool]:
    """Within the block no other process has the lock; False: another one has it, without `wait`.

    A file system without locks gives it to all.
    """
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield True
