"""The error of `data` for bad input, and checks of paths and names."""

import difflib
import os
import re
import signal
from collections.abc import Iterable
from pathlib import Path


class DataError(ValueError):
    """Bad input to `data`: one line that names the file or key, the value and what is allowed.

    Args:
        message: The line. Torch re-raises an error of a loader process with its whole traceback in
            front, so that the line comes last.
    """

    exit_status = 2

    def __init__(self, message: str) -> None:
        found = _OF_A_LOADER.match(message)
        super().__init__(found[1] if found else message)


_OF_A_LOADER = re.compile(r"Caught \w+ in DataLoader worker.*\n[\w.]+: (.*?)\s*\Z", re.DOTALL)


_LOADER_ENDED = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:is killed by signal: (.+?)\.|exited)"
)


def loader_ended(error: BaseException | None) -> str | None:
    """Describes how a loader process ended, if that is what caused an error.

    Torch raises the error wherever the reading process is at that moment, and again when the next
    batch is due; only the first error knows the signal.

    Args:
        error: The error that ended a command.

    Returns:
        One line: which process, why, and what to try; None if the error has another cause.
    """
    line = None
    while error is not None:
        if found := _LOADER_ENDED.match(str(error)):
            line = _line_of(found[1], found[2])
            if found[2]:
                break
        error = error.__cause__ or error.__context__
    return line


def _line_of(process: str, description: str | None) -> str:
    number = next((n for n in signal.Signals if signal.strsignal(n) == description), None)
    reason = f"signal {number.value} ({number.name})" if number else (description or "itself")
    if number == signal.SIGKILL:
        reason += ", as Linux does where memory runs out"
    elif number == signal.SIGBUS:
        reason += ", as where /dev/shm is full"
    return (
        f"a loader process (pid {process}) was ended by {reason}: "
        f"try fewer of them (data.num_workers; 0 reads in the process that trains)"
    )


MAX_NAME_BYTES = 255
"""Maximum length of one name in a path, in bytes: the limit of nearly every file system."""
MAX_PATH_BYTES = 3840
"""Maximum length of a folder's path, in bytes: Linux allows 4,096; the rest is for file names."""


def path_fault(text: str) -> str | None:
    """Returns why no file or folder can have this path on any file system; None if one can."""
    if not text:  # for example an unset shell variable
        return "the path is empty"
    if "\0" in text:
        return "a path holds no NUL"
    longest = max(len(os.fsencode(name)) for name in text.split("/"))
    if longest > MAX_NAME_BYTES:
        return f"a name of {longest:,} bytes is too long, at most {MAX_NAME_BYTES} are allowed"
    size = len(os.fsencode(text))
    if size > MAX_PATH_BYTES:
        return f"a path of {size:,} bytes is too long, at most {MAX_PATH_BYTES:,} are allowed"
    return None


def check_path(text: str | None) -> str | None:
    """Returns a path of a configuration, after checking that a file can have it.

    Raises:
        ValueError: No file can have it.
    """
    if text is not None and (fault := path_fault(text)):
        raise ValueError(fault)
    return text


def user_path(text: str | Path) -> Path:
    """Expands a path as a shell would.

    Args:
        text: The path as the user wrote it; `~` is the home folder.

    Returns:
        The path.

    Raises:
        DataError: No file can have this path, or it names a user that does not exist.
    """
    if fault := path_fault(str(text)):
        raise DataError(f"{str(text)!r}: {fault}")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise DataError(f"{text}: there is no user of that name") from None


def check_at_least(least: int, **numbers: int) -> None:
    """Checks that numbers, given by name, are at least `least`.

    Raises:
        DataError: One is below `least`.
    """
    for name, value in numbers.items():
        if value < least:
            raise DataError(f"{name} {value}: at least {least}")


def check_attack(rate: float, seed: int) -> None:
    """Checks the strength and the seed of an attack on held-out samples.

    Raises:
        DataError: A number is out of its range.
    """
    if not 0 <= rate <= 1:  # NaN is not
        raise DataError(f"rate: {rate} is not allowed; a number from 0 to 1")
    if seed < 0:
        raise DataError(f"seed: {seed} is not allowed; at least 0")


def one_line(error: BaseException, most: int | None = None) -> str:
    """Returns the message of a library's error as one line, of at most `most` characters."""
    return " ".join(str(error).split())[:most] or type(error).__name__


def listed(names: Iterable[str], most: int = 20) -> str:
    """Lists names for an error message.

    Args:
        names: The names.
        most: How many are written out.

    Returns:
        The names, quoted, or `none`.
    """
    quoted = [repr(name) for name in names]
    more = f" and {len(quoted) - most:,} more" if len(quoted) > most else ""
    return ", ".join(quoted[:most]) + more or "none"


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the end of an error message that suggests the nearest known name.

    Args:
        name: What the user wrote.
        known: The allowed names.

    Returns:
        ` (did you mean 'x'?)`, or an empty string if no known name is close.
    """
    matches = difflib.get_close_matches(name, sorted(set(known)), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
