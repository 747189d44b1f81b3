"""Reads the data of a run in the background of its first minutes: are its files what was written?

A start looks at both ends of each file alone. A bit that was flipped in between, by a disk or a
copy, changes a token, which no later check would notice.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable

from data.config import DataConfig
from data.text.mixture import TrainingData
from data.text.verification import bytes_to_verify, verify_files
from parallel import comm

BYTES_PER_SECOND = 64e6
"""Much less than a disk gives: training reads a few megabytes a second beside it."""
LAST_SECONDS = 2.0
"""How long the end of a run waits for the rest, which is then read as fast as it can be: data that
is small is always read in full."""


class _Ended(Exception):
    """The run has come to its end before the data was read."""


class DataCheck:
    """A thread of the first process of each node, which may have the data on a disk of its own.

    Use as a context. Reading is slow, and the thread has no lower priority than the others: it
    needs Python's lock, which one that is never run would keep from training.

    Args:
        data: of the run.
        config: of it; without `verify` nothing is read.
        world: this process.
        fail: is told, in one line, what is damaged; see `StopSignals.fail`.
        bytes_per_second: read at most.
    """

    def __init__(
        self,
        data: TrainingData,
        config: DataConfig,
        world: comm.World,
        fail: Callable[[str], None],
        bytes_per_second: float = BYTES_PER_SECOND,
    ) -> None:
        self._folders = {part.data.path: None for part in data.parts}
        self._main, self._fail = world.is_main, fail
        self._rate, self._begun, self._read = bytes_per_second, 0.0, 0
        self._ended = threading.Event()
        wanted = config.verify and world.local_rank == 0
        self._thread = threading.Thread(
            target=self._run, name="polyad-data-check", daemon=True
        ) if wanted else None  # fmt: skip

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
        """Reads what is left, if that is little; a line says so if it is not."""
        if self._thread is None:
            return
        self._rate = float("inf")
        self._thread.join(timeout=LAST_SECONDS)
        if self._thread.is_alive() and self._main:
            total = sum(map(bytes_to_verify, self._folders))
            self._say(
                f"data.verify: the run ended when {self._read / 1e6:,.0f} of {total / 1e6:,.0f} MB "
                f"of its data were verified; `polyad data verify` reads all of it"
            )

    def _run(self) -> None:
        with contextlib.suppress(_Ended):
            self._verify()

    def _verify(self) -> None:
        for folder in self._folders:
            for report in verify_files(folder, self._pace):
                if report.reason is None:
                    continue
                if (folder / report.name).exists():
                    self._fail(f"data.verify: {report.reason}")
                else:  # gone since the run began, which has its files open
                    self._say(f"data.verify: {report.reason}; the data was not verified")
                return

    def _pace(self, count: int) -> None:
        self._read += count
        ahead = self._begun + self._read / self._rate - time.monotonic()
        if self._ended.wait(max(0.0, ahead)):
            raise _Ended

    def _say(self, line: str) -> None:
        print(f"polyad: warning: {line}", file=sys.stderr, flush=True)
