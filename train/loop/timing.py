"""The duration of a step, with all the work since the step before; the wait for data in it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

Batch = TypeVar("Batch")


class StepTimer:
    """Seconds from the end of one step to the end of the next.

    So a step's time includes writing the record and the checkpoint of the step before, and waiting
    for a late batch. Only what runs inside `aside`, scoring the model, is not counted.
    """

    def __init__(self) -> None:
        self._since = time.monotonic()

    def step(self) -> float:
        """Ends a step; returns its seconds."""
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        return seconds

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A context whose time counts for no step."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._since += time.monotonic() - started


class TimedBatches(Generic[Batch]):
    """Micro-batches, and how long they were waited for.

    Args:
        batches: in order.
    """

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches, self._seconds = batches, 0.0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next one."""
        started = time.monotonic()
        try:
            return next(self._batches)
        finally:
            self._seconds += time.monotonic() - started

    @property
    def waited(self) -> float:
        """What was waited since the last call of `seconds`."""
        return self._seconds

    def seconds(self) -> float:
        """What was waited since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
