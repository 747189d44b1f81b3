"""The duration of a step, with all the work between it and the step before."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


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
