"""The end of a command: its exit status, and its error as one line."""

import contextlib
import errno
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from polyad.launch.machine import is_main, rank_of_process
from polyad.launch.processes import ignore_further_signals
from polyad.parallel.addresses import is_one_host
from polyad.train.errors import (
    OUTPUT_ERRORS,
    SAID_ABOVE,
    STOP_SIGNALS,
    Stopped,
    one_line,
    tell_launcher,
)

OTHERS_SPEAK_FIRST = 5.0
"""Seconds for which a process delays its error for that of rank 0, or of its host's first process:
torchrun ends it if these have failed as well."""

_PEER_ENDED = re.compile(r"gloo/\S+\] (.*?Connection (?:closed|reset) by peer)|ncclRemoteError")


def guard(work: Callable[[], int]) -> int:
    """Runs a command's work; converts its end to an exit status, and errors to one line.

    Args:
        work: returns the status if there is no error.

    Returns:
        The exit status.
    """
    try:
        return work()
    except SystemExit as stop:  # argparse, after --help
        return int(stop.code or 0)
    except KeyboardInterrupt as stop:
        return _stop(signal.SIGINT, "; ".join(["interrupted", *map(str, stop.args)]))
    except Stopped as stop:
        return _stop(stop.exit_status - 128, str(stop))
    except BrokenPipeError:  # the output's reader has exited, as in `polyad validate | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except Exception as error:
        return _report(error)


def _stop(number: int, line: str) -> int:
    """Ends a command that was stopped by a signal; returns its status."""
    ignore_further_signals()
    if is_main() and SAID_ABOVE not in os.environ:
        _say(line, 128 + number)
    else:
        _tell_others(line, 128 + number, printed=True)
    return 0 if tell_launcher(number) else 128 + number


def _report(error: Exception) -> int:
    status = getattr(error, "exit_status", None)
    if isinstance(status, int):
        _say(str(error), status)
        # Another process was asked to stop, and notified this one: torchrun restarts neither. A
        # process on another host may have been ended because one beside it failed.
        asked = status - 128 in STOP_SIGNALS and is_one_host()
        return 0 if asked and tell_launcher(status - 128) else status
    if isinstance(error, OSError) and error.errno in OUTPUT_ERRORS:
        where = f"{error.filename}: " if error.filename else ""
        status = 2 if error.errno == errno.ENAMETOOLONG else 1
        _say(f"{where}{error.strerror}", status)
        return status
    if line := _peer_ended(error):
        _say(line, 1)
        return 1
    if rank_of_process() and _meeting("has_met"):
        time.sleep(OTHERS_SPEAK_FIRST)  # often a consequence of rank 0's failure
    traceback.print_exc()
    _tell_others(f"{type(error).__name__}: {error}", 1, printed=True)
    return 1


def _peer_ended(error: BaseException | None) -> str | None:
    """One line if an error is gloo's or NCCL's about a lost peer; else None."""
    while error is not None:
        if isinstance(error, RuntimeError) and (found := _PEER_ENDED.search(str(error))):
            return (
                f"another process of this run ended while this one waited for it "
                f"({found[1] or found[0]}): its own output, or that of what started it, says why"
            )
        error = error.__cause__ or error.__context__
    return None


def _say(message: str, status: int) -> None:
    """Prints one line on standard error, from rank 0, or from another rank if rank 0 prints none.

    A stop by a signal, such as Ctrl-C, is not called an error. Before the first step every process
    learns why another one ends, and one on each host prints it: rank 0, unless it was slow and
    another one stopped waiting for it.

    Args:
        message: what ended the command.
        status: this process's exit status.
    """
    rank = rank_of_process()
    if rank:
        _tell_others(message, status)
    if _meeting("may_print", OTHERS_SPEAK_FIRST) is not False:
        name = f"rank {rank}: " if rank else ""
        kind = "" if status - 128 in STOP_SIGNALS else "error: "
        print(f"polyad: {kind}{name}{one_line(message)}", file=sys.stderr, flush=True)
    if not rank:
        _tell_others(message, status, printed=True)


def _tell_others(message: str, status: int, *, printed: bool = False) -> None:
    """Notifies processes that still wait to connect to this one.

    Args:
        message: the error.
        status: this process's exit status.
        printed: whether the line has been printed on this host.
    """
    _meeting("report_failure", one_line(message), status, printed=printed)


def _meeting(function: str, *arguments: Any, **named: Any) -> Any:
    """Calls a function of `parallel/meeting.py` in a process that torchrun started.

    Returns:
        Its result; None if it failed, which must not hide the error that ends the command: a signal
        may have interrupted an import.
    """
    with contextlib.suppress(Exception):
        if "RANK" in os.environ:
            from polyad.parallel import meeting

            return getattr(meeting, function)(*arguments, **named)
    return None
