"""Signal handling, and commands run in child processes.

SIGTERM, SIGUSR1 and SIGINT end a process at once while there is nothing to save: before the first
step, in a command that runs others (such as a study) while it runs none, and in a launcher before
it has workers. Later they are only noted, and read between steps: `train/guard/stopping.py`.
Commands in child processes free their memory when they end; signals are forwarded to them, and they
save.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from polyad.launch.machine import END_WITH_PARENT
from polyad.launch.output import pass_on
from polyad.train.errors import SAID_ABOVE, STOP_SIGNALS, end_at_once

STOPPED = frozenset(128 + number for number in STOP_SIGNALS)
"""Exit statuses of a command that was stopped by a signal."""
LOOK_AGAIN = 0.02
"""Seconds between checks whether a child has ended."""
LAST_WORDS = 5.0
"""Seconds to wait for a child's last output, since its own child process may outlive it."""


CONTINUE = "run the same command again to continue"


def end_at_signals() -> None:
    """Installs handlers that end the process at once, with a line and the signal's status.

    Otherwise SIGTERM and SIGUSR1 would end it without a line, and SIGINT with a traceback.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    end_at_once(number, CONTINUE)


def ignore_further_signals() -> None:
    """Ignores further signals while the first one is handled."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is _end:
            signal.signal(number, lambda number, frame: None)


def block_signals() -> None:
    """Holds signals back until the program that replaces this one can handle them; see
    `unblock_signals`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def unblock_signals() -> None:
    """Delivers signals sent since this process was started by `Children.start`, or since
    `block_signals`."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def polyad(*arguments: str) -> int:
    """Runs a command and waits for it; it shares this process's output.

    A termination signal to this process is forwarded to the command, which saves and ends.

    Args:
        arguments: the command line without the program's name.

    Returns:
        Its exit status, as in a shell; one of `STOPPED` if a signal came meanwhile, to this process
        or only to the command.
    """
    with Children() as children:
        children.start(arguments, results=True)
        _, status = children.wait()
    return 128 + children.signal if children.signal else status


@dataclass(frozen=True, eq=False)
class Child:
    """A command in a child process."""

    process: subprocess.Popen[str]
    listener: threading.Thread | None
    """Forwards its output, if lines get a prefix."""


class Children:
    """Several concurrent commands, within a `with` block, at whose end none is left.

    The first termination signal to this process is forwarded to all of them, and they end by
    themselves. A child may have received it already: Ctrl-C goes to all processes of a terminal,
    and so does Slurm's signal at the end of a job. Children are started in the block's thread,
    since they would end with another thread (`polyad.launch.machine.end_with_launcher`).

    Args:
        variables: added to their environment.
    """

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        self.signal = 0
        """The termination signal that this process received, or 0."""
        ours = {END_WITH_PARENT: str(os.getpid()), SAID_ABOVE: "1"}
        self._environment = os.environ | (variables or {}) | ours
        self._running: list[Child] = []
        self._not_asked: list[subprocess.Popen[str]] = []
        """Children to which no signal was forwarded."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Children":
        if threading.current_thread() is threading.main_thread():
            self._before = {each: signal.signal(each, self._handle) for each in STOP_SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end_all()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def start(
        self,
        arguments: Sequence[str],
        *,
        prefix: str = "",
        results: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> Child:
        """Starts a command. Its signals are blocked until it can handle them: `unblock_signals`.

        Args:
            arguments: its command line.
            prefix: prefix of each line of its standard error; empty: it inherits this process's.
            results: whether to keep its standard output.
            variables: added to its environment, after those of all children.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # inherited by the child
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "polyad.launch", *arguments],
                env={**self._environment, **(variables or {})},
                stdout=None if results else subprocess.DEVNULL,
                stderr=subprocess.PIPE if prefix else None,
                text=True,
                errors="replace",
            )
            self._not_asked.append(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if self.signal:  # it came before the child was started
            self._ask_all(self.signal)
        listener = None
        if process.stderr is not None:
            words = (process.stderr, sys.stderr, prefix)
            listener = threading.Thread(target=pass_on, args=words, daemon=True)
            listener.start()
        child = Child(process, listener)
        self._running.append(child)
        return child

    def wait(self) -> tuple[Child, int]:
        """Waits for the first child to end; there must be one.

        Returns:
            The child, and its exit status, as in a shell.
        """
        assert self._running
        while True:
            for child in self._running:
                if (status := child.process.poll()) is not None:
                    self._forget(child)
                    return child, status if status >= 0 else 128 - status
            time.sleep(LOOK_AGAIN)

    def _forget(self, child: Child) -> None:
        self._running.remove(child)
        if child.process in self._not_asked:
            self._not_asked.remove(child.process)
        if child.listener is not None:
            child.listener.join(timeout=LAST_WORDS)

    def end_all(self) -> None:
        """Asks all running children to save and end, and waits for them."""
        self._ask_all(signal.SIGTERM)
        while self._running:
            self.wait()

    def _ask_all(self, number: int) -> None:
        while self._not_asked:
            self._not_asked.pop().send_signal(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
        self._ask_all(self.signal)
