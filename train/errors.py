"""Errors that end a command, and the exit statuses of `polyad`.

0        done
1        the run failed, or the program has a bug (then with a traceback)
2        bad input: one line names the key or file, the value, and what is allowed
75       a process of the run stalled, and the others have waited for it. The same command continues
         from the last checkpoint; leave that host out if it happens there again
128 + n  stopped by signal n: 130 Ctrl-C (SIGINT), 138 SIGUSR1, 143 SIGTERM. A training run has
         saved its current step, if there was time, and the same command continues from there

A scheduler should restart a run after 75, 138 and 143, and after 137 (a process was killed); 1 and
2 need attention. Under `polyad launch` torchrun restarts the processes itself, at most
--max-restarts times: after 75 and 137, and after 1, the status of processes that have lost a peer.
It never does after 2, nor after 128 + n for these three signals.
"""

import contextlib
import errno
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Signals that ask a command to end; all training commands treat them in the same way."""

STALLED = 75
"""EX_TEMPFAIL of sysexits.h: a failure that a retry may not meet again."""

OUTPUT_ERRORS = frozenset(
    {
        errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM,
        errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EEXIST,
        errno.ENOTEMPTY,
    }
)  # fmt: skip
"""File system errors that the user can solve: one line without a traceback."""

MAX_SHOWN = 200
"""Maximum number of characters of a value in an error."""
MAX_LINE = 1800
"""Maximum number of characters of an error."""


def shown(value: object) -> str:
    """Formats a value for an error: at most 200 characters, on one line."""
    return shortened(repr(value))


def shortened(text: str, most: int = MAX_SHOWN) -> str:
    """Shortens a long text to its beginning and end with an ellipsis between them.

    Args:
        text: of any length.
        most: maximum number of characters to keep.
    """
    end = most // 4
    return text if len(text) <= most else f"{text[: most - end - 1]}…{text[-end:]}"


def some_of(parts: Sequence[str], most: int, between: str = ", ") -> str:
    """Joins the first parts of an error or a note, and counts the others.

    Args:
        parts: any number.
        most: how many to name.
        between: what separates them.
    """
    more = f" and {len(parts) - most} more" if len(parts) > most else ""
    return between.join(parts[:most]) + more


def one_line(message: object) -> str:
    """Formats an error for printing: one line without terminal control characters.

    Args:
        message: may contain any text from files and command lines.
    """
    text = " ".join(str(message).split())
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return shortened(text, MAX_LINE)


class ConfigError(ValueError):
    """Bad configuration: one line that names the key, the value and what is allowed."""

    exit_status = 2


class RunError(RuntimeError):
    """A run that cannot continue although its input was valid: one line that says why."""

    exit_status = 1


def stop_line(number: int, line: str) -> str:
    """Returns what is said of a stop by a signal.

    Args:
        number: the signal.
        line: says what was saved, or what to do.
    """
    name = "interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"
    return f"{name}; {line}"


class Stopped(BaseException):
    """A run that was ended by a signal: one line that says where it continues.

    Like KeyboardInterrupt, it is not an Exception, so that no library swallows it.

    Args:
        number: the signal.
        line: says what was saved.
    """

    def __init__(self, number: int, line: str) -> None:
        super().__init__(stop_line(number, line))
        self.exit_status = 128 + number


def stopped(number: int, line: str) -> BaseException:
    """Returns the exception for a signal: KeyboardInterrupt for Ctrl-C, `Stopped` for others.

    Args:
        number: the signal.
        line: says what was saved.
    """
    return KeyboardInterrupt(line) if number == signal.SIGINT else Stopped(number, line)


def end_at_once(number: int, line: str) -> NoReturn:
    """Ends the process from a signal's handler, while there is nothing to save.

    An exception would be raised wherever the main thread is: in an import, which it breaks, or in a
    library that swallows it. Rank 0 says why, or the command of Polyad that started this process.

    Args:
        number: the signal.
        line: says how to start the run again.
    """
    if os.environ.get("RANK", "0") == "0" and not (is_under_agent() or SAID_ABOVE in os.environ):
        with contextlib.suppress(OSError):
            os.write(2, f"polyad: {one_line(stop_line(number, line))}\n".encode())
    os._exit(128 + number)


SAID_ABOVE = "POLYAD_STOP_IS_SAID_ABOVE"
"""Environment variable of commands that another command runs. That one says which signal stopped
them; one line is enough."""


def stop_signal(status: int) -> int | None:
    """Returns the signal that stopped a process, by its exit status; None if none of ours did.

    Args:
        status: 128 + n from a process that handled signal n, or -n from one that did not yet.
    """
    number = -status if status < 0 else status - 128
    return number if number in STOP_SIGNALS else None


STOP_FILE = "POLYAD_STOP_FILE"
"""Environment variable with a file for the workers of a host's `polyad launch`. A worker that has
said that it was stopped by a signal writes its number there and exits with 0, because torchrun
would take another status for a failure and restart it."""


def forget_stop() -> None:
    """Removes the stop file of an earlier start with a failed worker."""
    if file := os.environ.get(STOP_FILE):
        Path(file).unlink(missing_ok=True)


def is_under_agent() -> bool:
    """Returns whether `polyad launch` started this process as a worker, and reads `STOP_FILE`."""
    return bool(os.environ.get(STOP_FILE)) and "TORCHELASTIC_RUN_ID" in os.environ


def tell_launcher(number: int) -> bool:
    """Notifies this host's `polyad launch` that this worker has said by what it was stopped.

    Args:
        number: the signal.

    Returns:
        Whether the launcher will read it; if so the worker must exit with 0.
    """
    if not is_under_agent():
        return False
    with contextlib.suppress(OSError):
        Path(os.environ[STOP_FILE]).write_text(str(number), encoding="utf-8")
        return True
    return False
