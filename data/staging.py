"""The folders that preparations write: complete or not at all, and by one process at a time."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from polyad.data.files import flush_to_disk, locked
from polyad.data.temporary import temporary_folder

LOCK_FILE = ".lock"
"""Is locked while a folder is prepared, and gone afterwards unless a process was killed."""
PARTIAL_FOLDER = ".partial"
"""Holds files of a folder that are not whole yet, where the folder is not made as one."""


@contextlib.contextmanager
def alone(folder: Path, *, wait: bool = False) -> Iterator[bool]:
    """Within the block no other process has the lock of a folder, which is made if need be.

    If nothing else is in the folder when the block ends, it is removed.

    Args:
        folder: The folder.
        wait: Whether to wait for a process that has the lock.

    Yields:
        Whether this one has it; False: another one has, without `wait`.

    Raises:
        OSError: The folder or the lock cannot be made.
    """
    with locked(folder / LOCK_FILE, wait=wait) as ours:
        try:
            yield ours
        finally:
            if ours:
                with contextlib.suppress(OSError):
                    (folder / LOCK_FILE).unlink(missing_ok=True)
                    folder.rmdir()


def partial_file(path: Path) -> Path:
    """Where a file of a prepared folder is written, before it is moved to its place in one step.

    Args:
        path: Its place.

    Returns:
        A path in a hidden folder inside the prepared one, which is made if need be, and is for
        whoever prepares it to remove.
    """
    folder = path.parent / PARTIAL_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    return folder / path.name


@contextlib.contextmanager
def staged_folder(output: Path) -> Iterator[Path]:
    """Gives a folder to write into, and puts it in place of `output` when the block ends well.

    It lies beside `output` under a hidden name and is gone after an error. What a killed process of
    this host left of one is removed by the next call: nothing that looks complete is half written.

    Args:
        output: Where the finished folder shall be, in place of what is there.

    Yields:
        An empty folder on the same file system.

    Raises:
        OSError: The folder cannot be written or put in place.
    """
    with temporary_folder(f".{output.name}.partial-", output.parent) as staging:
        yield staging
        for path in staging.iterdir():
            flush_to_disk(path)
        flush_to_disk(staging)
        _put_in_place(staging, output)


def _put_in_place(staging: Path, output: Path) -> None:
    # A rename replaces an empty folder but no other, so the old data steps aside first; between
    # the two renames there is no data, at no time is there a mixture.
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
