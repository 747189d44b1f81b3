"""Verifies the data files of a run in the background during its first minutes.

At startup only the first and last bytes of each file are read. A bit flipped in between, by a disk
or a copy, would change a token without any later error.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Sequence

from polyad.parallel import comm
from polyad.train.tasks.task import StoredData

BYTES_PER_SECOND = 64e6
"""Far below the speed of a disk, so as not to slow training, which reads a few MB per second."""
LAST_SECONDS = 2.0
"""Maximum wait at the end of a run for the rest, which is then read at full speed: small data is
always verified in full."""


class _Ended(Exception):
    """The run ended before all data was read."""


class DataCheck:
    """A thread of the first process of each node, since each node may have its own copy of the
    data.

    Use as a context. The thread reads slowly but at normal priority: at a lower one it could be
    suspended while holding Python's GIL, which would stop training.

    Args:
        data: the run's data folders; may be empty.
        world: this process.
        fail: called with one line that names what is damaged; see `StopSignals.fail`.
        bytes_per_second: maximum read rate.
    """

    def __init__(
        self,
        data: Sequence[StoredData],
        world: comm.World,
        fail: Callable[[str], None],
        bytes_per_second: float = BYTES_PER_SECOND,
    ) -> None:
        self._folders = list({folder.path: folder for folder in data}.values())
        self._main, self._fail = world.is_main, fail
        self._rate, self._begun, self._read = bytes_per_second, 0.0, 0
        self._ended = threading.Event()
        has_thread = len(data) > 0 and world.local_rank == 0
        self._thread = threading.Thread(
            target=self._run, name="polyad-data-check", daemon=True
        ) if has_thread else None  # fmt: skip

    def __enter__(self) -> "DataCheck":
        self._begun = time.monotonic()
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=10)  # may be waiting for a dead disk

    def finish(self) -> None:
        """Verifies the rest within `LAST_SECONDS`; warns if that was too short."""
        if self._thread is None:
            return
        self._rate = float("inf")
        self._thread.join(timeout=LAST_SECONDS)
        if self._thread.is_alive() and self._main:
            total = sum(folder.bytes_to_verify() for folder in self._folders)
            self._say(
                f"data.verify: the run ended with {self._read / 1e6:,.0f} of {total / 1e6:,.0f} MB "
                f"of its data verified; `polyad data verify` checks all of it"
            )

    def _run(self) -> None:
        with contextlib.suppress(_Ended):
            self._verify()

    def _verify(self) -> None:
        for folder in self._folders:
            for name, reason in folder.faults(self._pace):
                if (folder.path / name).exists():
                    self._fail(f"data.verify: {reason}")
                else:  # the folder was deleted; the run still has its files open
                    self._say(f"data.verify: {reason}; the data was not verified")
                return

    def _pace(self, count: int) -> None:
        self._read += count
        ahead = self._begun + self._read / self._rate - time.monotonic()
        if self._ended.wait(max(0.0, ahead)):
            raise _Ended

    def _say(self, line: str) -> None:
        print(f"polyad: warning: {line}", file=sys.stderr, flush=True)
