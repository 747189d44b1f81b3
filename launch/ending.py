"""The end of a command: its exit status, and its error as one line."""

import errno
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable

from polyad.launch.machine import is_main, rank_of_process
from polyad.launch.processes import ignore_further_signals
from polyad.train.errors import OUTPUT_ERRORS, SAID_ABOVE, Stopped, one_line, tell_launcher

OTHERS_SPEAK_FIRST = 5.0
"""Seconds for which a process delays its error for that of the first process of its host."""

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
        print(f"polyad: {one_line(line)}", file=sys.stderr, flush=True)
    return 0 if tell_launcher(number) else 128 + number


def _report(error: Exception) -> int:
    status = getattr(error, "exit_status", None)
    if isinstance(status, int):
        _say(str(error))
        return status
    if isinstance(error, OSError) and error.errno in OUTPUT_ERRORS:
        where = f"{error.filename}: " if error.filename else ""
        _say(f"{where}{error.strerror}")
        return 2 if error.errno == errno.ENAMETOOLONG else 1
    if line := _peer_ended(error):
        _say(line)
        return 1
    if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker"):
        _say(f"{one_line(str(error))}; data.num_workers=0 reads in the training process")
        return 1
    _let_others_speak()
    traceback.print_exc()
    return 1


def _peer_ended(error: BaseException | None) -> str | None:
    """One line if an error is gloo's or NCCL's about a lost peer; else None."""
    while error is not None:
        if isinstance(error, RuntimeError) and (match := _PEER_ENDED.search(str(error))):
            return (
                f"another process of this run ended while this one waited for it "
                f"({match[1] or match[0]}): its own output, or that of what started it, says why"
            )
        error = error.__cause__ or error.__context__
    return None


def _say(message: str) -> None:
    """Prints an error in one line on standard error."""
    _let_others_speak()
    rank = rank_of_process()
    name = f"rank {rank}: " if rank else ""
    print(f"polyad: error: {name}{one_line(message)}", file=sys.stderr, flush=True)


def _let_others_speak() -> None:
    """Waits, except in the first process of a host: often all fail alike, or because of another.

    The launcher ends a process while it waits, if another one of its host has ended.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(OTHERS_SPEAK_FIRST)
