"""A lock for file systems without locks, such as Lustre without `flock`: a file that is renewed.

The holder renews the file continually; a lease that was not renewed for `LEASE_SECONDS` may be
taken over. Times come from the file system, so the hosts' clocks may differ. A holder whose lease
was taken (because it was frozen) exits at once: two starts of a run must not write to one folder.
"""

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LEASE_SECONDS = 120.0
"""A lease expires if it was not renewed for this long."""


class LeaseTaken(Exception):
    """Another process has the lease; the text says which."""


class Lease:
    """A file that names the folder's holder; use as a context, or call `release`.

    Args:
        path: the file's path.
        lost: called from a thread if another process has taken the lease.
        seconds: see `LEASE_SECONDS`.

    Raises:
        LeaseTaken: another process has it.
        OSError: the file cannot be created.
    """

    def __init__(
        self, path: Path, lost: Callable[[], None] | None = None, seconds: float = LEASE_SECONDS
    ) -> None:
        self._path, self._seconds, self._lost = path, seconds, lost or _end_this_process
        self._token = secrets.token_hex(8)
        self._ended = threading.Event()
        while not self._made():
            self._take_over()
        self._thread = threading.Thread(target=self._renew, name="polyad-lease", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Releases the lease."""
        self._ended.set()
        self._thread.join(timeout=10)  # may be waiting for a dead disk
        with contextlib.suppress(OSError):
            if self._holder().get("token") == self._token:
                self._path.unlink()

    def _made(self) -> bool:
        holder = {"token": self._token, "host": socket.gethostname(), "process": os.getpid()}
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        with open(descriptor, "w") as file:
            json.dump(holder, file)
        return True

    def _take_over(self) -> None:
        """Removes the file of a holder that is gone."""
        try:
            age = self._now() - self._path.stat().st_mtime
            holder = self._holder()
        except FileNotFoundError:
            return
        here = holder.get("host") == socket.gethostname()
        gone = here and "process" in holder and not _lives(holder["process"])
        if age < self._seconds and not gone:
            place = f"process {holder.get('process', '?')} on {holder.get('host', 'a host')}"
            raise LeaseTaken(
                f"{place}, which renewed {self._path.name} {max(age, 0):.0f} s ago; after "
                f"{self._seconds:g} s without that the folder is free"
            )
        # If several processes find the same old file, only one succeeds in moving it.
        old = self._path.with_name(f"{self._path.name}.{self._token}")
        with contextlib.suppress(FileNotFoundError):
            self._path.rename(old)
            if _read(old).get("token") != holder.get("token"):  # another was faster: it is new
                with contextlib.suppress(FileExistsError):
                    os.link(old, self._path)
            old.unlink()

    def _now(self) -> float:
        """The time by the file system's clock."""
        probe = self._path.with_name(f"{self._path.name}.{self._token}.now")
        probe.write_text("")
        try:
            return probe.stat().st_mtime
        finally:
            probe.unlink()

    def _holder(self) -> dict[str, Any]:
        return _read(self._path)

    def _renew(self) -> None:
        missed = time.monotonic()
        while not self._ended.wait(self._seconds / 6):
            try:
                if self._holder().get("token") != self._token:
                    break
                os.utime(self._path)
                missed = time.monotonic()
            except FileNotFoundError:
                break
            except OSError:  # the file system does not respond for a while
                if time.monotonic() - missed > self._seconds:
                    break
        if not self._ended.is_set():
            self._lost()


def _read(path: Path) -> dict[str, Any]:
    try:
        holder = json.loads(path.read_text())
    except ValueError:  # just created, not written yet
        return {}
    return holder if isinstance(holder, dict) else {}


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _end_this_process() -> None:
    line = "this start of the run lost its folder: it did not renew its lease in time"
    print(f"polyad: error: {line}", file=sys.stderr, flush=True)
    os._exit(1)
