"""Files and folders that appear complete or not at all, even if the process is killed; temporary
folders of one process, or of one user on a node; and JSON files, read with one-line errors."""

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polyad.data.errors import DataError

SYSTEM_FILES = frozenset({"__MACOSX", "Thumbs.db", "desktop.ini"})
"""Files that operating systems add, besides all names that begin with a dot."""


def is_hidden(name: str) -> bool:
    """Returns whether a component of a path belongs to the operating system and holds no data."""
    return name.startswith(".") or name in SYSTEM_FILES


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Adds a file name to disk errors raised in the block that have none.

    The kernel reports the name if a file cannot be opened, but not if the disk is full on a write.

    Args:
        path: The file that is written.
    """
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_whole(path: Path, content: str | bytes) -> None:
    """Replaces a file, or creates it: readers see the old or the new content, never a part.

    Args:
        path: The file; see `whole_file`.
        content: Its whole content; text is encoded as UTF-8.
    """
    with whole_file(path) as partial, named(path):
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields an empty file that replaces `path` when the block ends without error.

    It is in a folder of its own, so that several processes may write the same `path`: the last one
    that ends wins. After an error it is deleted; what killed processes of this host left is deleted
    by the next call. A link stays: the file that it names is replaced. What is neither
    file nor link to one, such as `/dev/stdout` or a pipe, is yielded itself.

    Args:
        path: The file that is replaced or created.

    Raises:
        OSError: The file cannot be created or renamed.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    if path.is_symlink():
        path = path.resolve()
    with temporary_folder(f".{path.name[:50]}.", path.parent, ".partial") as folder:
        partial = folder / path.name
        with named(path):
            partial.touch()
        if path.exists():
            shutil.copymode(path, partial)
        yield partial
        partial.replace(path)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns disk errors while a file or folder is written into a one-line `DataError`.

    Args:
        path: The file or folder.

    Raises:
        DataError: The disk refuses the write.
    """
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror or error}") from error


def flush_to_disk(path: Path) -> None:
    """Waits until a file, or the entries of a folder, are on the disk.

    Args:
        path: The file or folder.
    """
    with named(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def temporary_folder(name: str, parent: Path | None = None, ending: str = "") -> Iterator[Path]:
    """Creates a folder that is removed when the block ends, unless it was renamed by then.

    Folders left by killed processes of this host are removed first. A living process holds a lock
    on its folder, which the kernel releases when the process ends.

    Args:
        name: Prefix of the folder's name.
        parent: The folder to create it in, itself created if needed; None for the system's
            temporary folder.
        ending: Suffix of the folder's name.

    Raises:
        OSError: The folder cannot be created.
    """
    parent = parent or Path(tempfile.gettempdir())
    parent.mkdir(parents=True, exist_ok=True)
    while True:
        folder = _unused(parent, name, ending)
        folder.mkdir()
        with contextlib.suppress(FileNotFoundError):  # another process took it for a dead one's
            descriptor = os.open(folder, os.O_RDONLY)
            with contextlib.suppress(OSError):  # without locks, no process will remove it
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if folder.exists():
                break
            os.close(descriptor)
    try:
        yield folder
    finally:
        os.close(descriptor)
        shutil.rmtree(folder, ignore_errors=True)


def _unused(parent: Path, name: str, ending: str) -> Path:
    """Returns an unused path, and removes what killed processes of this host left under others."""
    host = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
    pattern = f"{glob.escape(f'{name}{host}')}{'[0-9a-f]' * 8}{glob.escape(ending)}"
    for path in list(parent.glob(pattern)):
        with contextlib.suppress(OSError):  # in use, owned by another user, or already gone
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
    return parent / f"{name}{host}{secrets.token_hex(4)}{ending}"


@contextlib.contextmanager
def staged_folder(output: Path) -> Iterator[Path]:
    """Yields a folder to write into, and moves it to `output` when the block ends without error.

    The folder is beside `output` under a hidden name and is deleted after an error. Folders left by
    a killed process of this host are deleted by the next call, so `output` is never incomplete.

    Yields:
        An empty folder on the same file system.

    Raises:
        OSError: The folder cannot be written, flushed to the disk or moved.
    """
    with temporary_folder(f".{output.name}.partial-", output.parent) as staging:
        yield staging
        for path in [*staging.iterdir(), staging]:
            flush_to_disk(path)
        # A rename replaces an empty folder but no other, so the old data is renamed first: between
        # the two renames there is no data, but never a mixture.
        retired = staging.with_name(staging.name.replace(".partial-", ".old-"))
        if output.exists() and any(output.iterdir()):
            output.rename(retired)
        try:
            staging.rename(output)
        except OSError:
            if retired.exists():
                retired.rename(output)
            raise
        flush_to_disk(output.parent)
        shutil.rmtree(retired, ignore_errors=True)


def node_folder(name: str) -> Path:
    """Creates a folder for this user alone in the node's temporary folder, `TMPDIR` or `/tmp`.

    Args:
        name: Its name.

    Returns:
        The folder.

    Raises:
        OSError: It cannot be created, or belongs to another user.
    """
    root = Path(tempfile.gettempdir()) / f"polyad-{os.getuid()}"
    for folder in (root, root / name):
        folder.mkdir(exist_ok=True, mode=0o700)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user")
        folder.chmod(0o700)
    return root / name


def read_json(path: Path, *, error: type[ValueError] = DataError) -> Any:
    """Reads a JSON file.

    Args:
        path: The file.
        error: The exception type to raise.

    Raises:
        ValueError: As `error`: the file cannot be read, or is not JSON.
    """
    return parse_json(read_bytes(path, error), str(path), error=error)


def read_bytes(path: Path, error: type[ValueError] = DataError) -> bytes:
    """Reads a file.

    Args:
        path: The file.
        error: The exception type to raise.

    Raises:
        ValueError: As `error`: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as fault:
        raise error(f"{path}: cannot be read: {fault.strerror or fault}") from None


def parse_json(content: bytes | str, place: str, *, error: type[ValueError] = DataError) -> Any:
    """Parses JSON, with or without a byte order mark.

    Args:
        content: The JSON document.
        place: File, and line or member if any: the prefix of the error; empty for no prefix.
        error: The exception type to raise.

    Raises:
        ValueError: As `error`: it is not JSON.
    """
    before = f"{place}: " if place else ""
    try:
        return json.loads(content.removeprefix("\ufeff") if isinstance(content, str) else content)
    except (ValueError, RecursionError) as fault:
        raise error(f"{before}is not JSON: {fault}") from None
