"""Commands in processes of their own, which give their memory back when they end."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from polyad.launch.machine import END_WITH_PARENT
from polyad.launch.output import pass_on
from polyad.launch.signals import Relay
from polyad.train.errors import STOP_SIGNALS

STOPPED = frozenset(128 + number for number in STOP_SIGNALS)
"""Statuses of a command that a signal asked to stop."""
LOOK_AGAIN = 0.02
"""Seconds between two looks whether a child has ended."""
LAST_WORDS = 5.0
"""Seconds in which what a child said last is waited for: a process of its own may outlive it."""


def polyad(*arguments: str, results: bool = True) -> int:
    """Runs a command and waits for it. Its output goes where this process's goes.

    A signal that asks this process to stop is handed to the command, which saves and ends.

    Args:
        arguments: the command line without the program's name.
        results: whether what it writes to standard output is wanted.

    Returns:
        Its exit status, that of a shell; one of `STOPPED` if a signal came meanwhile, to this
        process or to the command alone.
    """
    with Children() as children:
        children.start(arguments, results=results)
        _, status = children.wait()
    return 128 + children.signal if children.signal else status


@dataclass(frozen=True, eq=False)
class Child:
    """A command that runs in a process of its own."""

    process: subprocess.Popen[str]
    listener: threading.Thread | None
    """Passes on what it says, where that gets a name in front."""


class Children:
    """Several commands at a time, within a `with` block, at whose end none is left.

    A signal that asks this process to stop is handed to all of them. They are started in the
    thread of the block, with which they would end (`polyad.launch.machine.end_with_launcher`).

    Args:
        variables: added to their environment.
    """

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        self._environment = os.environ | (variables or {}) | {END_WITH_PARENT: str(os.getpid())}
        self._relay = Relay()
        self._running: list[Child] = []

    def __enter__(self) -> "Children":
        self._relay.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end_all()
        self._relay.__exit__(kind, error, trace)

    @property
    def signal(self) -> int:
        """The signal that asked this process to stop, or 0."""
        return self._relay.number

    def start(
        self,
        arguments: Sequence[str],
        *,
        module: str = "polyad.launch",
        prefix: str = "",
        results: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> Child:
        """Starts a command.

        Args:
            arguments: its command line.
            module: what Python runs; `polyad.launch` is `polyad`.
            prefix: in front of each line that it writes to standard error; empty: it has this
                process's standard error itself.
            results: whether what it writes to standard output is wanted.
            variables: added to its environment, after those of all.
        """
        process = self._relay.start(
            [sys.executable, "-m", module, *arguments],
            env={**self._environment, **(variables or {})},
            stdout=None if results else subprocess.DEVNULL,
            stderr=subprocess.PIPE if prefix else None,
            text=True,
            errors="replace",
        )
        listener = None
        if process.stderr is not None:
            words = (process.stderr, sys.stderr, prefix)
            listener = threading.Thread(target=pass_on, args=words, daemon=True)
            listener.start()
        child = Child(process, listener)
        self._running.append(child)
        return child

    def wait(self) -> tuple[Child, int]:
        """Waits for the first that ends, of at least one.

        Returns:
            It, and its exit status, that of a shell.
        """
        assert self._running
        while True:
            for child in self._running:
                if (status := child.process.poll()) is not None:
                    return child, self._ended(child, status)
            time.sleep(LOOK_AGAIN)

    def end_all(self) -> None:
        """Asks all that run to save and end, and waits until they have."""
        self._relay.ask_all()
        while self._running:
            self.wait()

    def _ended(self, child: Child, status: int) -> int:
        self._running.remove(child)
        self._relay.forget(child.process)
        if child.listener is not None:
            child.listener.join(timeout=LAST_WORDS)
        return status if status >= 0 else 128 - status
