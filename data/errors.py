"""The error of `data` for bad input, checks of paths and names, and lines for the user."""

import difflib
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class DataError(ValueError):
    """Bad input to `data`: one line that names the file or key, the value and what is allowed.

    Args:
        message: The line. Torch re-raises an error of a loader process with its whole traceback in
            front, so that the line comes last.
    """

    exit_status = 2

    def __init__(self, message: str) -> None:
        match = _OF_A_LOADER.match(message)
        super().__init__(match[1] if match else message)


_OF_A_LOADER = re.compile(r"Caught \w+ in DataLoader worker.*\n[\w.]+: (.*?)\s*\Z", re.DOTALL)


@contextmanager
def prefixed(place: str, error: type[ValueError] = DataError) -> Iterator[None]:
    """A context that prefixes errors about an input with its place.

    Args:
        place: The key, file or option.
        error: The type of the errors that are raised.
    """
    try:
        yield
    except ValueError as fault:
        raise error(f"{place}: {fault}") from None


def check_path(text: str | None) -> str | None:
    """Returns a path of a configuration, after checking that `user_path` expands it.

    Raises:
        DataError: It does not.
    """
    if text is not None:
        user_path(text)
    return text


def user_path(text: str | Path) -> Path:
    """Expands a path as a shell would.

    Args:
        text: The path as the user wrote it; `~` is the home folder.

    Returns:
        The path.

    Raises:
        DataError: It is empty, or names a user that does not exist.
    """
    if not str(text):
        raise DataError("'': the path is empty")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise DataError(f"{text}: there is no user of that name") from None


def say(line: str) -> None:
    """Prints a note or a warning to standard error."""
    print(f"polyad: {line}", file=sys.stderr, flush=True)


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


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Returns the end of an error message that suggests the nearest allowed name.

    Args:
        name: What the user wrote.
        allowed: The allowed names.

    Returns:
        ` (did you mean 'x'?)`, or an empty string if no allowed name is close.
    """
    matches = difflib.get_close_matches(name, sorted(set(allowed)), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
