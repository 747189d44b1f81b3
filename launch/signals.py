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

from polyad.train.errors import STOP_SIGNALS, stopped

Handler = Callable[[int, FrameType | None], Any]


def stop_at_signals() -> None:
    """Installs handlers: a signal raises `Stopped`, or KeyboardInterrupt, in the main thread.

    Otherwise SIGTERM and SIGUSR1 would end the process without a message.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, _stop)


def ignore_further_signals() -> None:
    """Ignores further signals while the first one is carried out."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is _stop:
            signal.signal(number, _nothing)


def answer_first_signal_only() -> None:
    """Makes every handler that is set later run for the first signal only.

    For torchrun, which ends its workers in order at the first signal, but abandons them at the
    next.
    """
    received: list[int] = []
    set_handler = signal.signal

    def set_for_one(number: int, handler: Any) -> Any:
        if number not in STOP_SIGNALS or not callable(handler):
            return set_handler(number, handler)

        def first(number: int, frame: FrameType | None) -> Any:
            if not received:
                received.append(number)
                handler(number, frame)

        return set_handler(number, first)

    signal.signal = set_for_one  # type: ignore[assignment]


def unblock_signals() -> None:
    """Delivers the signals that were sent since `Relay.start` began to start this process."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


class Relay:
    """Passes a signal on to children and lets them end by themselves, within a `with` block.

    Only the first is handed on. A child may have been sent it already: Ctrl-C in a terminal goes
    to all processes there, and so does what ends a job of Slurm.
    """

    def __init__(self) -> None:
        self.number = 0
        """The signal that came, or 0."""
        self._waiting: list[subprocess.Popen[Any]] = []
        """Children that were handed none."""
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

    def start(self, command: list[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts a child. Signals wait for it until it can answer them: `unblock_signals`.

        Args:
            command: its words.
            options: of `subprocess.Popen`.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # inherited by the child
        try:
            child = subprocess.Popen(command, **options)
            self._waiting.append(child)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if self.number:  # it came before the child existed
            self.ask_all(self.number)
        return child

    def forget(self, child: subprocess.Popen[Any]) -> None:
        """Leaves out a child that has ended."""
        if child in self._waiting:
            self._waiting.remove(child)

    def ask_all(self, number: int = signal.SIGTERM) -> None:
        """Hands a signal to every child that was handed none.

        Args:
            number: the signal.
        """
        while self._waiting:
            self._waiting.pop().send_signal(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        self.ask_all(self.number)


def _stop(number: int, frame: FrameType | None) -> None:
    raise stopped(number, "the same command goes on where it stood")


def _nothing(number: int, frame: FrameType | None) -> None:
    pass
