"""How a command ends: its exit status, and its error as one line."""

import errno
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

from launch.machine import is_main, rank_of_process
from launch.signals import hear_no_more
from launch.torchrun import tell_launcher
from train.errors import Stopped, one_line

OUTPUT_ERRORS = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO),
        *(errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR),
        *(errno.ENAMETOOLONG, errno.EEXIST, errno.ENOTEMPTY),
    }
)
"""What a file system refuses: the user's to mend, so one line and no traceback."""

RANK_ZERO_SPEAKS_FIRST = 2.0
"""Seconds another rank waits with its error: torchrun ends it if rank 0 has failed as well."""


def guard(work: Callable[[], int]) -> int:
    """Turns however something ends into an exit status, and an error into its one line.

    Args:
        work: gives the status itself if it comes to its end.

    Returns:
        The exit status.
    """
    try:
        return work()
    except SystemExit as stop:  # argparse, after --help
        return int(stop.code or 0)
    except KeyboardInterrupt as stop:
        hear_no_more()
        if is_main():
            _say("; ".join(["interrupted", *map(str, stop.args)]))
        return 0 if tell_launcher(signal.SIGINT) else 130
    except Stopped as stop:
        hear_no_more()
        if is_main():
            _say(str(stop))
        return 0 if tell_launcher(stop.exit_status - 128) else stop.exit_status
    except BrokenPipeError:  # the reader of our output has gone, as in `polyad validate | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except Exception as error:
        return _report(error)


def _report(error: Exception) -> int:
    status = getattr(error, "exit_status", None)
    if isinstance(status, int):
        _say(str(error))
        return status
    if isinstance(error, OSError) and error.errno in OUTPUT_ERRORS:
        where = f"{error.filename}: " if error.filename else ""
        _say(f"{where}{error.strerror}")
        return 2 if error.errno == errno.ENAMETOOLONG else 1
    if rank_of_process():  # often only the echo of rank 0's end, which torchrun then answers
        time.sleep(RANK_ZERO_SPEAKS_FIRST)
    traceback.print_exc()
    return 1


def _say(message: str) -> None:
    """One line on standard error, from rank 0; from another one only if rank 0 has none."""
    rank = rank_of_process()
    if rank:
        time.sleep(RANK_ZERO_SPEAKS_FIRST)
        message = f"rank {rank}: {message}"
    print(f"polyad: error: {one_line(message)}", file=sys.stderr, flush=True)
