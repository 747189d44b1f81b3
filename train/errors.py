"""Errors that end a command, and the exit statuses of `polyad`.

0        done
1        the run failed, or the program has a fault (then with a traceback)
2        bad input: one line names the key or file, the value, and what is allowed
75       a process of the run stalled, and the line names it with its host: the same command goes on
         from the last checkpoint, best without that host if it happens there again
128 + n  stopped by signal n: 130 Ctrl-C (SIGINT), 138 SIGUSR1, 143 SIGTERM. A training run has
         saved the step that it was in, if there was time, and the same command continues from there

A scheduler starts a run again after 75, 138 and 143, and after 137 (a process was killed); 1 and 2
need a person to look. Under `polyad launch` torchrun starts the processes again by itself, as often
as --max-restarts says: after 75 and 137, and after 1, with which processes end that have lost
another one. It never does after 2, nor after 128 + n for these three signals.
"""

import errno
import re
import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Signals that ask a command to end; every command that trains treats them alike."""

STALLED = 75
"""EX_TEMPFAIL of sysexits.h: a failure that may be gone when one tries again."""

OUTPUT_ERRORS = frozenset(
    {
        errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM,
        errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EEXIST,
        errno.ENOTEMPTY,
    }
)  # fmt: skip
"""Errors of a file system that the user can solve: one line and no traceback."""

MAX_SHOWN = 200
"""Characters of a value that an error shows at most."""
MAX_LINE = 1800
"""Characters that an error has at most."""
_LONG = re.compile(
    rf"(?<![\w'])'[^']{{{MAX_SHOWN + 1},}}'(?!\w)"  # a string as Python quotes it
    rf'|(?<![\w"])"[^"]{{{MAX_SHOWN + 1},}}"(?!\w)'
    rf"|\S{{{MAX_SHOWN + 1},}}"
)


def shown(value: object) -> str:
    """A value as an error shows it: at most 200 characters of it, on one line."""
    return shortened(repr(value))


def shortened(text: str, most: int = MAX_SHOWN) -> str:
    """A text, or its beginning and its end with an ellipsis between them.

    Args:
        text: of any length.
        most: characters that are left of it.
    """
    end = most // 4
    return text if len(text) <= most else f"{text[: most - end - 1]}…{text[-end:]}"


def one_line(message: object) -> str:
    """An error as it is printed: one line, of which no part is long or controls a terminal.

    Args:
        message: with whatever people wrote into files and command lines.
    """
    text = " ".join(str(message).split())
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return shortened(_LONG.sub(lambda found: shortened(found[0]), text), MAX_LINE)


class ConfigError(ValueError):
    """Bad configuration: one line that names the key, the value and what is allowed."""

    exit_status = 2


class RunError(RuntimeError):
    """A run that cannot go on, though its input was good: one line that says why."""

    exit_status = 1


class Stopped(BaseException):
    """A run that ended because a signal asked it to: one line that says where it goes on.

    As KeyboardInterrupt, it is no Exception: a library that catches those is not to swallow it.

    Args:
        number: the signal.
        line: what is kept.
    """

    def __init__(self, number: int, line: str) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}; {line}")
        self.exit_status = 128 + number


def stopped(number: int, line: str) -> BaseException:
    """What a signal raises: KeyboardInterrupt for Ctrl-C, `Stopped` for another one.

    Args:
        number: the signal.
        line: what is kept.
    """
    return KeyboardInterrupt(line) if number == signal.SIGINT else Stopped(number, line)
