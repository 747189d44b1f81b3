"""Files and folders that are there whole or not at all, whatever moment a process is killed at;
locks; and temporary folders of one process, and of one user on a node."""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

from polyad.data.errors import DataError

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
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
def writing(path: Path, what_to_do: str = "") -> Iterator[None]:
    """Makes one line of what a disk refuses while a file or folder is written.

    Args:
        path: the file or folder.
        what_to_do: how to go on when there is room, if that is not plain.

    Raises:
        DataError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        advice = f"; {what_to_do}" if what_to_do else ""
        raise DataError(f"{path}: cannot be written: {error.strerror or error}{advice}") from error


def flush_to_disk(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk.

    Args:
        path: The file or folder.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_of(path: Path) -> str:
    """The SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class DigestedFile:
    """A file that is written from its beginning, and the digest of what it holds.

    Args:
        path: The file; what is there is replaced.

    Attributes:
        size: Bytes so far.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._digest = hashlib.sha256()
        self.size = 0

    def write(self, content: bytes | memoryview) -> None:
        """Appends bytes, of a buffer of any type."""
        self._file.write(content)
        self._digest.update(content)
        self.size += memoryview(content).nbytes

    def finish(self) -> str:
        """Ends the file, which need not be on the disk yet; returns its SHA-256, hexadecimal."""
        self._file.close()
        return self._digest.hexdigest()

    def close(self) -> None:
        """Closes the file, finished or not."""
        with contextlib.suppress(OSError):
            self._file.close()


@contextlib.contextmanager
def locked(
    path: Path,
    *,
    wait: bool,
    without_locks: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
) -> Iterator[bool]:
    """Within the block no other process has the lock; False: another one has it, without `wait`.

    A file system without locks gives it to all that enter what `without_locks` gives.

    Args:
        path: The file that is locked; it is made, with its folder, and may be removed by who has
            the lock.
        wait: Whether to wait for a process that has it.
        without_locks: What is entered in its place where there are no locks.
    """
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                with without_locks():
                    yield True
                return
            if _is_at(file, path):
                yield True
                return
        # Whoever had it removed the file while this process waited: it is the lock of nobody.


def _is_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def temporary_folder(name: str, parent: Path | None = None, ending: str = "") -> Iterator[Path]:
    """Makes a folder that is gone, or has another name, when the block ends.

    What processes of this host that were killed left of such folders is removed first. A living one
    holds a lock on its folder, which the kernel releases when it ends.

    Args:
        name: what its name begins with.
        parent: the folder to make it in, which is made too; None: that for temporary files.
        ending: of its name.

    Raises:
        OSError: it cannot be made.
    """
    parent = parent or Path(tempfile.gettempdir())
    parent.mkdir(parents=True, exist_ok=True)
    host = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
    _remove_what_is_left(
        parent, re.compile(rf"{re.escape(f'{name}{host}')}[0-9a-f]{{8}}{re.escape(ending)}")
    )
    folder = parent / f"{name}{host}{secrets.token_hex(4)}{ending}"
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: nobody removes it then
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    finally:
        os.close(descriptor)
        shutil.rmtree(folder, ignore_errors=True)


def _remove_what_is_left(parent: Path, pattern: re.Pattern[str]) -> None:
    for path in [path for path in parent.iterdir() if pattern.fullmatch(path.name)]:
        with contextlib.suppress(OSError):  # in use, of another user, or gone by now
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)


def node_folder(name: str) -> Path:
    """Makes a folder in the node's temporary one, `TMPDIR` or `/tmp`, for this user alone.

    Args:
        name: Its name.

    Returns:
        The folder.

    Raises:
        OSError: It cannot be made, or is somebody else's.
    """
    root = Path(tempfile.gettempdir()) / f"polyad-{os.getuid()}"
    for folder in (root, root / name):
        folder.mkdir(exist_ok=True, mode=0o700)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user")
        folder.chmod(0o700)
    return root / name
