"""A process that makes no progress says where it is, before its collective times out."""

import contextlib
import faulthandler
import sys
from collections.abc import Iterator

from polyad.train.errors import STALLED, RunError

SHARE = 0.9
"""When stacks are written, as a share of the time that a collective waits."""


class StalledError(RunError):
    """A collective waited for a process that did not come."""

    exit_status = STALLED


def expect_progress(seconds: float) -> None:
    """Writes the stacks of all threads to standard error, unless it is called again in time.

    Args:
        seconds: the longest that a collective waits.
    """
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback_later(SHARE * seconds, file=sys.__stderr__)


@contextlib.contextmanager
def explain_stall(timeout_minutes: float) -> Iterator[None]:
    """A context that turns the error of a collective that waited in vain into one line.

    Args:
        timeout_minutes: `parallel.timeout_minutes`.

    Raises:
        StalledError: the line; the stacks are above it.
    """
    try:
        yield
    except RuntimeError as error:
        if "timed out" not in str(error).lower():
            raise
        raise StalledError(
            f"no progress: this process waited for another one for parallel.timeout_minutes: "
            f"{timeout_minutes:g}; the stacks of all processes are above"
        ) from error
    finally:
        faulthandler.cancel_dump_traceback_later()
