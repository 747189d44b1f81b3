"""Errors that end a command, and the exit statuses of `polyad`.

0        done
1        the run failed, or the program has a bug (then with a traceback)
2        bad input: one line names the key or file, the value, and what is allowed
75       a process of the run stalled; the line names it and its host. The same command continues
         from the last checkpoint; leave that host out if it happens there again
128 + n  stopped by signal n: 130 Ctrl-C (SIGINT), 138 SIGUSR1, 143 SIGTERM. A training run has
         saved its current step, if there was time, and the same command continues from there

A scheduler should restart a run after 75, 138 and 143, and after 137 (a process was killed); 1 and
2 need attention. Under `polyad launch` torchrun restarts the processes itself, at most
--max-restarts times: after 75 and 137, and after 1, the status of processes that have lost a peer.
It never does after 2, nor after 128 + n for these three signals.
"""

import errno
import re
import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Signals that ask a command to end; all training commands treat them alike."""

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
_LONG = re.compile(
    rf"(?<![\w'])'[^']{{{MAX_SHOWN + 1},}}'(?!\w)"  # a quoted Python string
    rf'|(?<![\w"])"[^"]{{{MAX_SHOWN + 1},}}"(?!\w)'
    rf"|\S{{{MAX_SHOWN + 1},}}"
)


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


def one_line(message: object) -> str:
    """Formats an error for printing: one line without long parts or terminal control characters.

    Args:
        message: may contain any text from files and command lines.
    """
    text = " ".join(str(message).split())
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return shortened(_LONG.sub(lambda found: shortened(found[0]), text), MAX_LINE)


class ConfigError(ValueError):
    """Bad configuration: one line that names the key, the value and what is allowed."""

    exit_status = 2


class RunError(RuntimeError):
    """A run that cannot continue although its input was valid: one line that says why."""

    exit_status = 1


class Stopped(BaseException):
    """A run that was ended by a signal: one line that says where it continues.

    Like KeyboardInterrupt, it is not an Exception, so that no library swallows it.

    Args:
        number: the signal.
        line: says what was saved.
    """

    def __init__(self, number: int, line: str) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}; {line}")
        self.exit_status = 128 + number


def stopped(number: int, line: str) -> BaseException:
    """Returns the exception for a signal: KeyboardInterrupt for Ctrl-C, `Stopped` for others.

    Args:
        number: the signal.
        line: says what was saved.
    """
    return KeyboardInterrupt(line) if number == signal.SIGINT else Stopped(number, line)
