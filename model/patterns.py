"""Patterns of names: which parameters or layers of a model a configuration means.

A pattern is a name, or its end after a dot, with * for anything, dots among it. One that matches
nothing is an error: it would silently do nothing.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase


class PatternError(ValueError):
    """A pattern that matches nothing: one line that names it, and what is near."""

    exit_status = 2


def matched(key: str, patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """The names that any of the patterns matches, in their order.

    Args:
        key: That of the patterns, for errors.
        patterns: Names or ends of names, with * for anything.
        names: All there are.

    Raises:
        PatternError: A pattern matches none of them.
    """
    names, found = list(names), set[str]()
    for pattern in patterns:
        some = {name for name in names if matches(pattern, name)}
        if not some:
            raise PatternError(f"{key}: {pattern!r} matches nothing; {_near(pattern, names)}")
        found |= some
    return [name for name in names if name in found]


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches a whole name, or what is behind one of its dots."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _near(pattern: str, names: list[str]) -> str:
    known = kinds(names)
    close = get_close_matches(pattern.replace("*", "N"), known, 3, 0.4)
    if close:
        return f"the nearest are {', '.join(close)}"
    more = f" and {len(known) - 8} more" if len(known) > 8 else ""
    return f"there are {', '.join(known[:8])}{more}" if known else "there are none"


def kinds(names: Iterable[str]) -> list[str]:
    """Names without the numbers of blocks, each once.

    Args:
        names: Names of parameters or layers.
    """
    return list(dict.fromkeys(_without_number(name) for name in names))


def _without_number(name: str) -> str:
    first, *rest = name.split(".")
    return ".".join(rest[1:]) if first == "blocks" and rest and rest[0].isdecimal() else name
