"""A run's folder: checks that it is usable and has room, and the lock of a start of the run."""

import contextlib
import errno
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout
from pydantic import AfterValidator

from polyad.data.errors import check_path
from polyad.data.files import write_whole
from polyad.model.config import Config
from polyad.parallel import comm
from polyad.parallel.checkpoint.manage import (
    complete_checkpoints,
    put_back,
    reason_of,
    replaced_checkpoints,
)
from polyad.train.errors import ConfigError, RunError

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of file systems without locks."""
LOCK_FILE = ".lock"
TOKEN_FILE = ".start"
SEEN_WITHIN = 10.0
"""Seconds within which a file from one host must be visible on the others."""


class RunFolderConfig(Config):
    """Where a run is written."""

    folder: Annotated[str, AfterValidator(check_path)]
    """Folder of the run, for config.yaml, metrics.jsonl, environment.json, tensorboard/ and
    checkpoints/."""


def gone(folder: Path) -> RunError:
    """Returns the error of a run whose folder was removed or replaced.

    Args:
        folder: the run's.
    """
    return RunError(
        f"run.folder: {folder} was removed, moved or replaced during the run, which can no longer "
        "write to it"
    )


def check_place(folder: Path, key: str) -> set[str]:
    """Checks that a folder exists and is writable, or can be created.

    Args:
        folder: a run's or a study's folder.
        key: the key that names it, for the error.

    Returns:
        The names of its entries.

    Raises:
        ConfigError: it is neither.
    """
    try:
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not nearest.is_dir():
            raise ConfigError(f"{key}: {folder}: {nearest} is a file, but a folder is needed")
        if not os.access(nearest, os.R_OK | os.W_OK | os.X_OK):
            raise ConfigError(f"{key}: {folder}: {nearest} cannot be written to")
        longest = os.pathconf(nearest, "PC_NAME_MAX")
        if any(len(os.fsencode(name)) > longest for name in folder.parts):
            raise ConfigError(
                f"{key}: {folder}: a name is longer than the {longest} bytes that the file system "
                f"of {nearest} allows"
            )
        return {path.name for path in folder.iterdir()} if folder.exists() else set()
    except OSError as error:  # no permission for a folder on the way, or a name that is too long
        raise ConfigError(f"{key}: {folder}: cannot be used: {error.strerror}") from None


def last_checkpoint(checkpoints: Path) -> str:
    """Names the last checkpoint in words.

    Args:
        checkpoints: a run's folder of checkpoints.
    """
    if folders := complete_checkpoints(checkpoints):
        return f"the last checkpoint is of step {int(folders[-1].name.removeprefix('step-'))}"
    return "there is no checkpoint yet"


class RunLock:
    """A lock that the main process holds.

    Args:
        folder: the run's folder, which is created if need be.
        world: this process. All call this together.

    On a shared file system it works between hosts if the file system supports locks (NFS does, and
    Lustre with the mount option `flock`), and the kernel releases it when the process ends.
    Otherwise it is a file, which a user removes after a crash. Beside it is a token of this start,
    which the other processes must find there: a host on which the folder is a different one could
    not save together with the others.

    Raises:
        ConfigError: on every process, if another start of the run is still active, the folder is
            not writable, or it is not the same one on all hosts.
    """

    def __init__(self, folder: Path, world: comm.World) -> None:
        self._lock: BaseFileLock | None = None
        self._token_file = folder / TOKEN_FILE
        self._token = secrets.token_hex(16)
        lock = (self._take(folder), self._token, socket.gethostname()) if world.is_main else None
        reason, token, host = comm.from_main(lock)
        if reason:
            raise ConfigError(f"run.folder: {folder} {reason}")
        fault = "" if world.is_main else _fault_of(folder, token, f"that {host} (rank 0) writes to")
        faults = [each for each in comm.from_all(fault) if each]
        if faults:
            self.release()
            raise ConfigError(f"run.folder: {folder}: {faults[0]}")

    def _take(self, folder: Path) -> str:
        """Takes the lock; returns the reason if that fails, else an empty string."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock_of(folder)
            write_whole(self._token_file, self._token)
        except Timeout as taken:
            return (
                f"is in use by another start of this run, which is still going: it holds "
                f"{taken.lock_file}"
            )
        except OSError as error:
            self.release()
            return f"cannot be locked: {error.strerror}"
        return ""

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Releases the lock."""
        if self._lock is not None:
            self._token_file.unlink(missing_ok=True)
            self._lock.release()


def lock_of(folder: Path) -> BaseFileLock:
    """Takes the lock of a run's folder; where the file system has no locks, it is a file.

    Raises:
        Timeout: another process holds it.
        OSError: it cannot be taken.
    """
    lock: BaseFileLock = FileLock(folder / LOCK_FILE, timeout=0, fallback_to_soft=False)
    try:
        lock.acquire()
    except OSError as error:
        if error.errno not in NO_LOCKS:  # None if another process holds it
            raise
        lock = SoftFileLock(folder / f"{LOCK_FILE}.soft", timeout=0)
        lock.acquire()
    return lock


def _fault_of(folder: Path, token: str, first: str) -> str:
    """Returns why this process cannot use the folder that rank 0 has locked; empty if it can.

    Args:
        folder: the run's.
        token: the token that rank 0 has written there.
        first: name of rank 0's folder in the message.
    """
    here = f"{socket.gethostname()} (rank {comm.rank()})"

    def is_there() -> bool:
        with contextlib.suppress(OSError):
            return (folder / TOKEN_FILE).read_text(encoding="utf-8") == token
        return False

    if not seen_in_time(is_there):
        return (
            f"on {here} it is another folder than the one {first}; all hosts need one file "
            f"system, with this folder at the same path"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{here} may not write to the folder {first}"
    return ""


def seen_in_time(condition: Callable[[], bool]) -> bool:
    """Waits until another host's write is visible on this one, at most `SEEN_WITHIN` seconds.

    Args:
        condition: returns whether it is visible.
    """
    until = time.monotonic() + SEEN_WITHIN
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def put_back_replaced(folder: Path, world: comm.World) -> None:
    """Recovers from a crash while a checkpoint was being replaced by another of the same step.

    Args:
        folder: the run's.
        world: this process. All call this together.

    Raises:
        ConfigError: on every process, if another start of the run is still active, or the disk
            fails.
    """
    checkpoints = folder / "checkpoints"
    if not comm.from_main(bool(replaced_checkpoints(checkpoints)) if world.is_main else None):
        return
    reason = ""
    with RunLock(folder, world):
        if world.is_main:
            try:
                put_back(checkpoints)
            except OSError as error:
                reason = reason_of(error)
        reason = comm.from_main(reason)
    if reason:
        raise ConfigError(f"run.folder: {folder}: a checkpoint cannot be restored: {reason}")
