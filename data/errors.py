"""The one error of this room that a user causes."""

import difflib
from collections.abc import Iterable


class DataError(ValueError):
    """Bad input to `data`: one line that names the file or key, the value and what is allowed."""

    exit_status = 2


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
