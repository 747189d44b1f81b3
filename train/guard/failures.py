"""Failures that a run can explain: out of memory, and a process that makes no progress."""

import faulthandler
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from polyad.parallel import comm
from polyad.train.errors import STALLED, RunError, one_line, shortened

MESSAGES = ("out of memory", "can't allocate memory", "ALLOC_FAILED", "Cannot allocate memory")
"""Parts of a RuntimeError's message that mean out of memory: torch on a CPU, CUDA, cuBLAS."""


SMALLER = (
    "lower train.micro_batch_size or evaluation.batch_size, set model.recompute=block, or start "
    "more processes: `polyad plan` shows the memory of every layout"
)
"""What to change."""
LONGEST = 300
"""Maximum number of characters of the allocator's message."""


@contextmanager
def explain_out_of_memory(doing: Callable[[], str], world: comm.World) -> Iterator[None]:
    """Turns an out-of-memory error into one line; other errors pass unchanged.

    The process then exits, and its launcher terminates those that wait for it.

    Args:
        doing: returns when it happened, such as "in step 3".
        world: this process.

    Raises:
        RunError: the line.
    """
    try:
        yield
    except RunError:
        raise  # already explained by an inner context
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = shortened(one_line(error), LONGEST)
        raise RunError(
            f"out of memory {doing()}, on rank {world.rank} of {world.size}: {reason}; {SMALLER}"
        ) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means out of memory, also in a message of a compiler."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and any(
        part in str(error) for part in MESSAGES
    )


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


@contextmanager
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
            f"this process waited in vain for parallel.timeout_minutes: {timeout_minutes:g}; the "
            "stacks of all processes are above"
        ) from error
    finally:
        faulthandler.cancel_dump_traceback_later()
