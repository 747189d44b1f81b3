"""The one error of this room that a user causes."""

import difflib
from collections.abc import Iterable
from pathlib import Path


class DataError(ValueError):
    """Bad input to `data`: one line that names the file or key, the value and what is allowed."""

    exit_status = 2


def user_path(text: str | Path) -> Path:
    """Reads a path as a shell would.

    Args:
        text: What the user wrote; `~` is the home folder.

    Returns:
        The path.

    Raises:
        DataError: It is empty, as an unset variable of a shell is, or names a user that is not
            there.
    """
    if not str(text):
        raise DataError("'': the path is empty")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise DataError(f"{text}: there is no user of that name to have a home folder") from None


def listed(names: Iterable[str], most: int = 20) -> str:
    """Lists names for an error message.

    Args:
        names: What there is.
        most: How many are written out.

    Returns:
        The names, quoted, or `none`.
    """
    quoted = [repr(name) for name in names]
    more = f" and {len(quoted) - most:,} more" if len(quoted) > most else ""
    return ", ".join(quoted[:most]) + more or "none"


def nearest(name: str, known: Iterable[str]) -> str:
    """Words the nearest match as the end of an error message.

    Args:
        name: What the user wrote.
        known: What would have been right.

    Returns:
        ` (did you mean 'x'?)`, or nothing where no known name is near.
    """
    matches = difflib.get_close_matches(name, sorted(set(known)), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
