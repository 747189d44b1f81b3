"""How long a step takes, with everything that it pays for."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StepTimer:
    """Seconds from the end of one step to the end of the next.

    So a step pays for its record, for the checkpoint that the one before it stopped for, for a
    batch that came late. Only what is set aside, scores of the model, is no part of training.
    """

    def __init__(self) -> None:
        self._since = time.monotonic()

    def step(self) -> float:
        """Ends a step; gives its seconds."""
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        return seconds

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What happens within counts for no step."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._since += time.monotonic() - started
