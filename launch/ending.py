"""How a command ends: its exit status, and its error as one line."""

import contextlib
import errno
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable

from polyad.data.errors import loader_ended
from polyad.launch.machine import is_main, rank_of_process
from polyad.launch.processes import ignore_further_signals
from polyad.launch.torchrun import tell_launcher
from polyad.parallel.addresses import is_one_host
from polyad.train.errors import OUTPUT_ERRORS, STOP_SIGNALS, Stopped, one_line

OTHERS_SPEAK_FIRST = 5.0
"""Seconds a process waits with its error for rank 0, or for the first one of its host: torchrun
ends it if they have failed as well."""

_PEER_ENDED = re.compile(r"gloo/\S+\] (.*?Connection (?:closed|reset) by peer)|ncclRemoteError")


def guard(work: Callable[[], int]) -> int:
    """Runs a command's work; turns its end into an exit status, and an error into one line.

    Args:
        work: returns the status if it ends without an error.

    Returns:
        The exit status.
    """
    try:
        return work()
    except SystemExit as stop:  # argparse, after --help
        return int(stop.code or 0)
    except KeyboardInterrupt as stop:
        ignore_further_signals()
        line = "; ".join(["interrupted", *map(str, stop.args)])
        if is_main():
            _say(line, 130)
        else:
            _tell_others(line, 130, said=True)
        return 0 if tell_launcher(signal.SIGINT) else 130
    except Stopped as stop:
        ignore_further_signals()
        if is_main():
            _say(str(stop), stop.exit_status)
        else:
            _tell_others(str(stop), stop.exit_status, said=True)
        return 0 if tell_launcher(stop.exit_status - 128) else stop.exit_status
    except BrokenPipeError:  # the reader of our output has gone, as in `polyad validate | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except Exception as error:
        return _report(error)


def _report(error: Exception) -> int:
    status = getattr(error, "exit_status", None)
    if isinstance(status, int):
        _say(str(error), status)
        # Another process was asked to stop, and told this one: torchrun starts neither again. That
        # of another host may have been ended because one beside it had failed.
        asked = status - 128 in STOP_SIGNALS and is_one_host()
        return 0 if asked and tell_launcher(status - 128) else status
    if isinstance(error, OSError) and error.errno in OUTPUT_ERRORS:
        where = f"{error.filename}: " if error.filename else ""
        status = 2 if error.errno == errno.ENAMETOOLONG else 1
        _say(f"{where}{error.strerror}", status)
        return status
    if line := loader_ended(error) or _peer_ended(error):
        _say(line, 1)
        return 1
    if rank_of_process() and _has_met_others():
        time.sleep(OTHERS_SPEAK_FIRST)  # often a consequence of rank 0's failure
    traceback.print_exc()
    _tell_others(f"{type(error).__name__}: {error}", 1, said=True)
    return 1


def _peer_ended(error: BaseException | None) -> str | None:
    """One line, if an error is of gloo or NCCL, whose other end has gone; else None."""
    while error is not None:
        if isinstance(error, RuntimeError) and (found := _PEER_ENDED.search(str(error))):
            return (
                f"another process of this run ended while this one waited for it "
                f"({found[1] or found[0]}): its own output, or that of what started it, says why"
            )
        error = error.__cause__ or error.__context__
    return None


def _say(message: str, status: int) -> None:
    """Prints one line on standard error, from rank 0; from another one only if rank 0 has none.

    A stop that a signal asked for, as Ctrl-C does, is not called an error.

    Before the first step, where each process hears why another ends, one on each host says it:
    rank 0, unless it was slow and another one no longer waited for it.

    Args:
        message: what ended the command.
        status: that this process will end with.
    """
    rank = rank_of_process()
    if rank:
        _tell_others(message, status)
        if _another_says_it():
            return
    name = f"rank {rank}: " if rank else ""
    if rank or not _is_said():
        kind = "" if status - 128 in STOP_SIGNALS else "error: "
        print(f"polyad: {kind}{name}{one_line(message)}", file=sys.stderr, flush=True)
    if not rank:
        _tell_others(message, status, said=True)


def _tell_others(message: str, status: int, *, said: bool = False) -> None:
    """Ends the waiting of processes that this one has not met yet.

    Args:
        message: the error.
        status: that this process will end with.
        said: whether no other of this host has to print it.
    """
    # Whatever fails here must not hide the error: a signal may have cut an import in two.
    with contextlib.suppress(Exception):
        if "RANK" in os.environ:
            from polyad.parallel.meeting import leave_word

            leave_word(one_line(message), status, said=said)


def _another_says_it() -> bool:
    with contextlib.suppress(Exception):
        from polyad.parallel.meeting import another_says_it

        return another_says_it(OTHERS_SPEAK_FIRST)
    return False


def _is_said() -> bool:
    with contextlib.suppress(Exception):
        if "RANK" in os.environ:
            from polyad.parallel.meeting import is_said

            return is_said()
    return False


def _has_met_others() -> bool:
    with contextlib.suppress(Exception):
        from polyad.parallel.meeting import has_met

        return has_met()
    return False
