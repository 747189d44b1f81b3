"""SIGTERM, SIGUSR1 and SIGINT in a process that has no step to save.

Such is a command before its first step, one that runs others, as a study does, and a launcher. The
loop of a training process has handlers of its own: `train/guard/stopping.py`.
"""

import signal
import subprocess
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from train.errors import STOP_SIGNALS, stopped

Handler = Callable[[int, FrameType | None], Any]


def stop_at_signals() -> None:
    """From now on a signal ends what the main thread does: it raises `Stopped`, or
    KeyboardInterrupt. Otherwise SIGTERM and SIGUSR1 would end the process without a word."""
    for number in STOP_SIGNALS:
        signal.signal(number, _stop)


def hear_no_more() -> None:
    """What was asked for is being done: the same signal again is not to disturb it."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is _stop:
            signal.signal(number, _nothing)


def hear_one() -> None:
    """Has every handler that is set from now on answer one signal, and none after it.

    For a library that ends its processes at the first one, and gives them up at the next.
    """
    heard: list[int] = []
    set_handler = signal.signal

    def set_for_one(number: int, handler: Any) -> Any:
        if number not in STOP_SIGNALS or not callable(handler):
            return set_handler(number, handler)

        def first(number: int, frame: FrameType | None) -> Any:
            if not heard:
                heard.append(number)
                handler(number, frame)

        return set_handler(number, first)

    signal.signal = set_for_one  # type: ignore[assignment]


def unblock_signals() -> None:
    """Takes what was sent since `Relay.start` asked for this process."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


class Relay:
    """Hands a signal to a child and lets it end by itself, within a `with` block.

    Only the first is handed on. The child may have been sent it already: Ctrl-C in a terminal goes
    to all processes there, and so does what ends a job of Slurm.
    """

    def __init__(self) -> None:
        self.number = 0
        """The signal that came, or 0."""
        self._handed_on = False
        self._child: subprocess.Popen[bytes] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Relay":
        if threading.current_thread() is threading.main_thread():
            self._before = {each: signal.signal(each, self._handle) for each in STOP_SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def start(self, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        """Starts the child. Signals wait for it until it can answer them: `unblock_signals`.

        Args:
            command: its words.
            options: of `subprocess.Popen`.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # which is inherited
        try:
            self._child = subprocess.Popen(command, **options)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._hand_on()  # one that came before there was a child
        return self._child

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        self._hand_on()

    def _hand_on(self) -> None:
        if self.number and self._child is not None and not self._handed_on:
            self._handed_on = True
            self._child.send_signal(self.number)


def _stop(number: int, frame: FrameType | None) -> None:
    raise stopped(number, "the same command goes on where it stood")


def _nothing(number: int, frame: FrameType | None) -> None:
    pass
