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
from types import FrameType

from polyad.launch.machine import END_WITH_PARENT
from polyad.train.errors import SAID_ABOVE, STOP_SIGNALS, end_at_once

STOPPED = frozenset(128 + number for number in STOP_SIGNALS)
"""Exit statuses of a command that was stopped by a signal."""
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
    """Delivers signals sent since this process was started by `polyad`, or since
    `block_signals`."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def polyad(*arguments: str) -> int:
    """Runs a command and waits for it; it shares this process's output.

    The first termination signal to this process is forwarded to the command, which saves and ends.
    It may have received it already: Ctrl-C goes to all processes of a terminal, and so does Slurm's
    signal at the end of a job. Its signals are blocked until it can handle them
    (`unblock_signals`). Only the main thread can call this.

    Args:
        arguments: the command line without the program's name.

    Returns:
        Its exit status, as in a shell; one of `STOPPED` if a signal came meanwhile, to this process
        or only to the command.
    """
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if not received:
            received.append(number)
            process.send_signal(number)

    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # the child inherits it
    before = {each: signal.signal(each, forward) for each in STOP_SIGNALS}
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "polyad.launch", *arguments],
            env=os.environ | {END_WITH_PARENT: str(os.getpid()), SAID_ABOVE: "1"},
        )
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    if received:
        return 128 + received[0]
    return status if status >= 0 else 128 - status
