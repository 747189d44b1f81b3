"""Ways for a rank to stall, for runs of `tests.helpers.forking`."""

import ctypes
import time
from unittest import mock

from polyad.data.text.samples import TrainingSamples

STALLS_AT = 40
"""The sample at which a rank stalls: in step 6 of runs with 8 samples a step."""


def sleep_in_python(rank: int) -> None:
    """Rank 1 hangs while reading its data."""
    _stall(rank, 1, lambda: time.sleep(1e6))


def sleep_with_the_lock(rank: int) -> None:
    """Rank 0 hangs in C code that holds the GIL, so that none of its threads runs."""
    _stall(rank, 0, lambda: ctypes.PyDLL(None).sleep(1_000_000))


def _stall(rank: int, at: int, sleep: object) -> None:
    if rank != at:
        return
    read = TrainingSamples.__getitem__

    def slow_storage(samples: TrainingSamples, number: int) -> object:
        if number >= STALLS_AT:
            sleep()  # type: ignore[operator]
        return read(samples, number)

    mock.patch.object(TrainingSamples, "__getitem__", slow_storage).start()
