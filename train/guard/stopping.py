"""Termination signals: all processes agree on a step, save it, and exit.

Until there is a step to save, a signal ends the process at once, from its handler. Later the
handler only notes it: after each step and each batch of validation the loop asks whether any
process has a signal. If the main thread is stuck in C (a collective whose peer is gone), a second
thread still receives the signal through a pipe that Python's C handler writes to, and ends the
process after the grace period.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from polyad.parallel import comm
from polyad.train.errors import (
    STOP_SIGNALS,
    Stopped,
    end_at_once,
    stopped,
    tell_launcher,
)


class StopAsked(Exception):
    """Raised when some process got a signal during work that may be aborted, such as validation."""


class StopSignals:
    """Handles signals within a `with` block of the main thread; does nothing in other threads.

    Args:
        world_size: number of processes. Before `wait_for_steps` a single process stops at once;
            several do so until they have connected, and then have to agree first.
        launched: whether a command of Polyad, or torchrun, started this process. A launcher
            forwards signals that the process may have got already as a member of its process group,
            so a second Ctrl-C does not end it at once.
    """

    def __init__(self, world_size: int, *, launched: bool = False) -> None:
        self._at_once = True
        self._alone = world_size == 1
        self._by_hand = world_size == 1 and not launched
        self._saving = False
        self._signal = 0
        self._grace = 25.0
        self.kept: Callable[[], str] = lambda: "run the same command to start it again"
        """Returns in words where the run continues."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is not threading.main_thread():
            return self
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._before_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        threading.Thread(target=self._watch, name="polyad-signals", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._before:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._before_fd)
        self._writer.close()  # the thread reads the end of the stream, and ends
        # torchrun signals every process when one has failed. An error here that is only a
        # consequence of a peer's exit, as in a collective, is not reported.
        peer_ended = isinstance(error, RuntimeError) and not hasattr(error, "exit_status")
        if peer_ended and self._signal and comm.environment_world_size() > 1:
            raise Stopped(self._signal, f"other processes had ended; {self.kept()}") from None

    def limit(self, grace_seconds: float, kept: Callable[[], str]) -> None:
        """Sets how long stopping may take, and how to describe where the run continues.

        Args:
            grace_seconds: maximum time from the signal to the exit of the process.
            kept: returns a few words on where the run continues.
        """
        self._grace, self.kept = grace_seconds, kept

    def wait_for_steps(self) -> None:
        """From now on signals are handled after the current step, so that it can be saved."""
        self._at_once = False

    @property
    def number(self) -> int:
        """The signal that this process got, or 0."""
        return self._signal

    def heard(self) -> None:
        """Called by all processes when they know that one got a signal: from now on the run only
        saves, which further signals do not interrupt."""
        self._saving = True

    def agreed(self) -> int:
        """The signal that some process got, or 0. All processes call this, and all get the same
        number.

        After a signal the run only saves, which further signals do not interrupt.
        """
        number = self.number if comm.size() == 1 else comm.highest(self.number)
        if number:
            self.heard()
        return number

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """A context for writing a checkpoint, which no signal interrupts."""
        before, self._saving = self._saving, True
        try:
            yield
        finally:
            self._saving = before

    def check(self) -> None:
        """Called by all processes during work that may be aborted.

        Raises:
            StopAsked: on all of them, if some process has a signal.
        """
        if self.agreed():
            raise StopAsked

    def stop(self, number: int) -> None:
        """Ends the run as the signal requires; all processes call this.

        Raises:
            Stopped: or KeyboardInterrupt, for Ctrl-C.
        """
        raise stopped(number, self.kept())

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again, self._signal = self._signal, self._signal or number
        twice = bool(again) and number == signal.SIGINT and self._by_hand  # a second Ctrl-C
        at_once = self._at_once and (self._alone or not comm.is_joined())
        if self._saving or not (twice or (at_once and not again)):
            return
        end_at_once(number, self.kept())

    def _watch(self) -> None:
        """Thread body: waits for a signal, and then for the end of the grace period."""
        ends = float("inf")
        number = 0
        while True:
            wait = max(0.0, ends - time.monotonic()) if number else None
            ready, _, _ = select.select([self._reader], [], [], wait)
            if not ready:
                break
            numbers = self._reader.recv(64)
            if not numbers:
                self._reader.close()
                return
            signals = [each for each in numbers if each in STOP_SIGNALS]
            if signals and not number:
                number, ends = signals[0], time.monotonic() + self._grace
        if not comm.environment_rank():
            line = stopped(number, f"the step did not end within {self._grace:g} s; {self.kept()}")
            with contextlib.suppress(OSError):
                print(f"polyad: error: {line}", file=sys.stderr, flush=True)
            tell_launcher(number)
        os._exit(128 + number)
