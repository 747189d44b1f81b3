"""A command of `polyad` in a process of its own, which gives its memory back when it ends."""

import os
import signal
import subprocess
import sys

from launch.machine import END_WITH_PARENT

PATIENCE = 1.0
"""Seconds that an interrupted child has before it is interrupted by us: a terminal tells both."""


def polyad(*arguments: str, results: bool = True) -> int:
    """Runs a command and waits for it. Its output goes where this process's goes.

    Args:
        arguments: the command line without the program's name.
        results: whether what it writes to standard output is wanted.

    Returns:
        Its exit status; that of a shell, 128 and more, if a signal ended it.

    Raises:
        KeyboardInterrupt: this process was interrupted; the child has ended.
    """
    environment = os.environ | {END_WITH_PARENT: str(os.getpid())}
    child = subprocess.Popen(
        [sys.executable, "-m", "launch", *arguments],
        env=environment,
        stdout=None if results else subprocess.DEVNULL,
    )
    try:
        status = child.wait()
    except KeyboardInterrupt:
        try:
            child.wait(PATIENCE)
        except subprocess.TimeoutExpired:  # only this process was told
            child.send_signal(signal.SIGINT)
            child.wait()
        raise
    return status if status >= 0 else 128 - status
