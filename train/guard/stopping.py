"""What ends a run early: termination signals, out of memory, and a process that makes no progress.

At a signal all processes agree on a step, save it, and exit.

Until there is a step to save, a signal ends the process at once, from its handler. Later the
handler only notes it: after each step and each batch of validation the loop asks whether any
process has a signal. A process that waits in a collective for one that is gone does not hear it:
its launcher or scheduler kills it when its patience is over.
"""

import contextlib
import faulthandler
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from polyad.parallel import comm
from polyad.train.errors import (
    STALLED,
    STOP_SIGNALS,
    RunError,
    Stopped,
    end_at_once,
    one_line,
    shortened,
)


class StopAsked(Exception):
    """Raised when some process got a signal during work that may be aborted, such as validation."""


class StopSignals:
    """Handles signals within a `with` block of the main thread; does nothing in other threads.

    Args:
        world_size: number of processes. While `at_once`, a single process stops at once;
            several do so until they have connected, and then have to agree first.
        launched: whether a command of Polyad, or torchrun, started this process. A launcher
            forwards signals that the process may have got already as a member of its process group,
            so a second Ctrl-C does not end it at once.
    """

    def __init__(self, world_size: int, *, launched: bool = False) -> None:
        self.number = 0
        """The signal that this process got, or 0."""
        self.kept: Callable[[], str] = lambda: "run the same command to start it again"
        """Returns in words where the run continues."""
        self.at_once = True
        """Whether there is no step yet that could be saved: later ones are handled after the
        current step."""
        self.only_saves = False
        """Whether the run only saves, which further signals do not interrupt: all processes know
        that one got a signal."""
        self._alone = world_size == 1
        self._by_hand = world_size == 1 and not launched
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._before = {each: signal.signal(each, self._handle) for each in STOP_SIGNALS}
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        # torchrun signals every process when one has failed. An error here that is only a
        # consequence of a peer's exit, as in a collective, is not reported.
        peer_ended = isinstance(error, RuntimeError) and not hasattr(error, "exit_status")
        if peer_ended and self.number and comm.environment_world_size() > 1:
            raise Stopped(self.number, f"other processes had ended; {self.kept()}") from None

    def agreed(self) -> int:
        """The signal that some process got, or 0. All processes call this, and all get the same
        number.

        After a signal the run only saves, which further signals do not interrupt.
        """
        number = self.number if comm.size() == 1 else comm.highest(self.number)
        if number:
            self.only_saves = True
        return number

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """A context for writing a checkpoint, which no signal interrupts."""
        before, self.only_saves = self.only_saves, True
        try:
            yield
        finally:
            self.only_saves = before

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again, self.number = self.number, self.number or number
        twice = bool(again) and number == signal.SIGINT and self._by_hand  # a second Ctrl-C
        at_once = self.at_once and (self._alone or not comm.is_joined())
        if not self.only_saves and (twice or (at_once and not again)):
            end_at_once(number, self.kept())


MESSAGES = ("out of memory", "can't allocate memory", "ALLOC_FAILED", "Cannot allocate memory")
"""Parts of a RuntimeError's message that mean out of memory: torch on a CPU, CUDA, cuBLAS."""


SMALLER = (
    "lower train.micro_batch_size or evaluation.batch_size, set model.recompute=block, or start "
    "more processes: `polyad plan` shows the memory of every layout"
)
"""What to change."""
LONGEST = 300
"""Maximum number of characters of the allocator's message."""


@contextlib.contextmanager
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
            f"this process waited in vain for parallel.timeout_minutes: {timeout_minutes:g}; the "
            "stacks of all processes are above"
        ) from error
    finally:
        faulthandler.cancel_dump_traceback_later()
