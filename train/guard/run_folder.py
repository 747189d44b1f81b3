"""A run's folder: checks that it is usable and has room, and the lock of a start of the run."""

import contextlib
import math
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from polyad.data.errors import check_path
from polyad.data.files import locked
from polyad.model.config import Config
from polyad.parallel import comm
from polyad.parallel.checkpoint.manage import (
    complete_checkpoints,
    put_back,
    reason_of,
    replaced_checkpoints,
)
from polyad.parallel.config import CheckpointConfig
from polyad.train.console import counted, in_bytes
from polyad.train.errors import ConfigError, RunError
from polyad.train.guard.lease import Lease, LeaseTaken

LOCK_FILE = ".lock"
LEASE_FILE = ".lease"
LOOKS_FOR_ROOM = 1.0
"""Seconds between checks whether a full disk has room again."""
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


def check_room(
    folder: Path,
    checkpoint: CheckpointConfig,
    *,
    step: int,
    steps: int,
    size: int,
    patience: float = 0.0,
) -> None:
    """Checks that the next checkpoints fit on the disk: as many as `checkpoint.keep_last` keeps.

    Without that key only the next one has to fit; rank 0 warns if all later ones do not, or those
    that `checkpoint.keep_every` keeps.

    Args:
        folder: the run's.
        checkpoint: how often checkpoints are written, and how many are kept.
        step: the step that the run continues from.
        steps: number of steps of the whole run.
        size: size of a checkpoint in bytes.
        patience: seconds to wait for room on the disk.

    Raises:
        ConfigError: they do not fit.
    """
    every = checkpoint.every or steps
    coming = math.ceil(steps / every) - step // every
    if coming <= 0 or step >= steps:
        return
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    keep, present = checkpoint.keep_last, len(complete_checkpoints(folder / "checkpoints"))
    best = int(checkpoint.keep_best)  # may not be among the newest
    # One more than are kept: a new checkpoint is written before an old one is removed.
    needed = 1 if keep is None else min(coming + best, max(keep + best + 1 - present, 1))
    until, waits = time.monotonic() + patience, False
    while needed * size > free:
        some = "the next checkpoint" if needed == 1 else f"{needed} more checkpoints"
        advice = "" if keep in (None, 1) else "lower checkpoint.keep_last, "
        line = (
            f"run.folder: {folder}: {some} of {in_bytes(size)} must fit, {place} has "
            f"{in_bytes(free)} free; {advice}make room or take another folder"
        )
        if time.monotonic() >= until:
            raise ConfigError(line)
        if not waits:
            print(f"polyad: waiting up to {patience:g} s: {line}", file=sys.stderr, flush=True)
        waits = True
        time.sleep(LOOKS_FOR_ROOM)
        free = shutil.disk_usage(place).free
    if keep is not None and checkpoint.keep_every:  # those kept forever
        often = math.lcm(every, checkpoint.keep_every)
        staying = steps // often - step // often
        advice = "a higher checkpoint.keep_every keeps fewer"
    else:
        staying = coming if keep is None else 0
        advice = "checkpoint.keep_last deletes old ones"
    if staying * size > free and os.environ.get("RANK", "0") == "0":
        print(
            f"polyad: warning: {counted(staying, 'checkpoint')} of {in_bytes(size)} will be kept, "
            f"but only {in_bytes(free)} are free; {advice}",
            file=sys.stderr,
            flush=True,
        )


def last_checkpoint(checkpoints: Path) -> str:
    """Names the last checkpoint in words.

    Args:
        checkpoints: a run's folder of checkpoints.
    """
    if found := complete_checkpoints(checkpoints):
        return f"the last checkpoint is of step {int(found[-1].name.removeprefix('step-'))}"
    return "there is no checkpoint yet"


class RunLock:
    """A lock that the main process holds; the kernel releases it when the process ends.

    Args:
        folder: the run's folder, which is created if need be.
        world: this process. All call this together.

    On a shared file system it works between hosts if the file system supports locks (NFS does, and
    Lustre with the mount option `flock`). Otherwise a lease is taken instead. The lock file
    contains a token of this start, which the other processes must find there: a host on which the
    folder is a different one could not save together with the others.

    Raises:
        ConfigError: on every process, if another start of the run is still active, the folder is
            not writable, or it is not the same one on all hosts.
    """

    def __init__(self, folder: Path, world: comm.World) -> None:
        self._held = contextlib.ExitStack()
        self._token = secrets.token_hex(16)
        told = (self._take(folder), self._token, socket.gethostname()) if world.is_main else None
        reason, token, host = comm.from_main(told)
        if reason:
            raise ConfigError(f"run.folder: {folder} {reason}")
        fault = "" if world.is_main else _fault_of(folder, token, f"that {host} (rank 0) writes to")
        found = [each for each in comm.from_all(fault) if each]
        if found:
            self.release()
            raise ConfigError(f"run.folder: {folder}: {found[0]}")

    def _take(self, folder: Path) -> str:
        """Takes the lock; returns the reason if that fails, else an empty string."""
        in_use = "is in use by another start of this run, which is still going"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file, lease = folder / LOCK_FILE, partial(Lease, folder / LEASE_FILE)
            if not self._held.enter_context(locked(file, wait=False, without_locks=lease)):
                self.release()
                return in_use
            with file.open("r+", encoding="utf-8") as written:
                written.write(self._token)
                written.truncate()
                written.flush()
                os.fsync(written.fileno())
        except LeaseTaken as holder:
            return f"{in_use}: {holder}"
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
        self._held.close()


def _fault_of(folder: Path, token: str, first: str) -> str:
    """Returns why this process cannot use the folder that rank 0 has locked; empty if it can.

    Args:
        folder: the run's.
        token: the token that rank 0 has written into the lock file.
        first: name of rank 0's folder in the message.
    """
    here = f"{socket.gethostname()} (rank {comm.rank()})"

    def is_there() -> bool:
        with contextlib.suppress(OSError):
            return (folder / LOCK_FILE).read_text(encoding="utf-8") == token
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
