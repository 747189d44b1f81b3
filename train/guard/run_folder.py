"""A run's folder: whether it can be used, and the lock of a start of the run."""

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated

from filelock import FileLock, SoftFileLock, Timeout
from pydantic import AfterValidator

from polyad.data.errors import check_path
from polyad.model.config import Config
from polyad.parallel import comm
from polyad.parallel.checkpoint.manage import complete_checkpoints, put_back, replaced_checkpoints
from polyad.train.errors import ConfigError, RunError

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of file systems without locks."""
LOCK_FILE = ".lock"
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
        if not nearest.is_dir() or not os.access(nearest, os.R_OK | os.W_OK | os.X_OK):
            raise ConfigError(f"{key}: {folder}: {nearest} is not a folder to write to")
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


@contextmanager
def run_lock(folder: Path, world: comm.World) -> Iterator[None]:
    """A context in which the main process holds the lock of a run; all processes enter it together.

    Args:
        folder: the run's folder, which is created if need be.
        world: this process.

    Raises:
        ConfigError: on every process, if another start of the run is still active, or a process
            cannot write to the folder, as on a host with a disk of its own.
    """
    with comm.on_main(partial(lock_of, folder)) or nullcontext():
        usable = seen_in_time(lambda: os.access(folder, os.W_OK | os.X_OK))
        host = "" if usable else f"{socket.gethostname()} (rank {world.rank})"
        if hosts := [each for each in comm.from_all(host) if each]:
            raise ConfigError(
                f"run.folder: {folder} is missing or cannot be written to on {hosts[0]}; all hosts "
                "need one file system, with this folder at the same path"
            )
        yield


def lock_of(folder: Path) -> AbstractContextManager[object]:
    """Takes the lock of a run's folder, which is created if need be, until the context ends.

    On a shared file system the lock works between hosts if the file system supports locks (NFS
    does, and Lustre with the mount option `flock`), and the kernel releases it when the process
    ends. Otherwise it is a file, which a user removes after a crash.

    Raises:
        ConfigError: another process holds it, or it cannot be taken.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            return FileLock(folder / LOCK_FILE, timeout=0, fallback_to_soft=False).acquire()
        except OSError as error:
            if error.errno not in NO_LOCKS:  # None if another process holds it
                raise
            return SoftFileLock(folder / f"{LOCK_FILE}.soft", timeout=0).acquire()
    except Timeout as taken:
        raise ConfigError(
            f"run.folder: {folder} is in use by another start of this run, which holds "
            f"{taken.lock_file}"
        ) from None
    except OSError as error:
        raise ConfigError(f"run.folder: {folder} cannot be locked: {error.strerror}") from None


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


def put_back_replaced(folder: Path) -> None:
    """Recovers from a crash while a checkpoint was being replaced by another of the same step.

    Args:
        folder: the run's.

    Raises:
        ConfigError: another start of the run is still active.
    """
    checkpoints = folder / "checkpoints"
    if replaced_checkpoints(checkpoints):
        with lock_of(folder):
            put_back(checkpoints)
