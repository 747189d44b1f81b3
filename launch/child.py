"""A command of `polyad` in a process of its own, which gives its memory back when it ends."""

import os
import subprocess
import sys

from launch.machine import END_WITH_PARENT
from launch.signals import Relay
from train.errors import STOP_SIGNALS

STOPPED = frozenset(128 + number for number in STOP_SIGNALS)
"""Statuses of a command that a signal asked to stop."""


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
    environment = os.environ | {END_WITH_PARENT: str(os.getpid())}
    with Relay() as relay:
        child = relay.start(
            [sys.executable, "-m", "launch", *arguments],
            env=environment,
            stdout=None if results else subprocess.DEVNULL,
        )
        status = child.wait()
    if relay.number:
        return 128 + relay.number
    return status if status >= 0 else 128 - status
