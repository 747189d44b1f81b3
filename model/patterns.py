"""Name patterns, by which a configuration selects parameters or layers of a model.

A pattern is a name, or the end of one after a dot, with * for any characters, including dots. A
pattern that matches nothing is an error, since it would silently have no effect.
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase


class PatternError(ValueError):
    """A pattern that matches nothing: a one-line error that suggests similar names."""

    exit_status = 2


def matched(key: str, patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Returns the names that match any of the patterns, in their order.

    Args:
        key: The key of the patterns, for errors.
        patterns: Names or ends of names, with * for any characters.
        names: All names.

    Raises:
        PatternError: A pattern matches no name.
    """
    names, chosen = list(names), set[str]()
    for pattern in patterns:
        some = {name for name in names if matches(pattern, name)}
        if not some:
            raise PatternError(f"{key}: {pattern!r} matches nothing; {_near(pattern, names)}")
        chosen |= some
    return [name for name in names if name in chosen]


def matches(pattern: str, name: str) -> bool:
    """Returns whether a pattern matches a whole name, or the end of one after a dot."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _near(pattern: str, names: list[str]) -> str:
    endings = kinds(names)
    close = get_close_matches(pattern.replace("*", "N"), endings, 3, 0.4)
    if close:
        return f"the nearest are {', '.join(close)}"
    more = f" and {len(endings) - 8} more" if len(endings) > 8 else ""
    return f"there are {', '.join(endings[:8])}{more}" if endings else "there are none"


def kinds(names: Iterable[str]) -> list[str]:
    """Returns the names without block numbers, without duplicates.

    Args:
        names: Names of parameters or layers.
    """
    return list(dict.fromkeys(re.sub(r"^blocks\.\d+(\.|$)", "", name) for name in names))
