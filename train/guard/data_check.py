"""Verifies the files of a run's data in the background of its first minutes.

The start of a run reads only the first and last bytes of each file. A bit flipped in between, by a
disk or a copy, would change a token without any later error.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Sequence

from polyad.parallel import comm
from polyad.train.tasks.task import StoredData

BYTES_PER_SECOND = 64e6
"""Much less than a disk reads, so that training, which reads a few MB a second, is not slowed."""
LAST_SECONDS = 2.0
"""How long the end of a run waits for the rest, which is then read at full speed: small data is
always verified in full."""


class _Ended(Exception):
    """The run ended before all data was read."""


class DataCheck:
    """A thread of the first process of each node, which may have the data on a disk of its own.

    Use as a context. The thread reads slowly and keeps its normal priority: at a low one it could
    be suspended while it holds Python's lock, which would stop training.

    Args:
        data: the folders of the run; may be empty.
        world: this process.
        fail: called with one line that names what is damaged; see `StopSignals.fail`.
        bytes_per_second: how fast it reads at most.
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
            self._thread.join(timeout=10)  # it may wait for a disk that does not answer

    def finish(self) -> None:
        """Verifies the rest, within `LAST_SECONDS`; a warning says if that was too short."""
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
                else:  # the folder was deleted meanwhile; the run still has its files open
                    self._say(f"data.verify: {reason}; the data was not verified")
                return

    def _pace(self, count: int) -> None:
        self._read += count
        ahead = self._begun + self._read / self._rate - time.monotonic()
        if self._ended.wait(max(0.0, ahead)):
            raise _Ended

    def _say(self, line: str) -> None:
        print(f"polyad: warning: {line}", file=sys.stderr, flush=True)
