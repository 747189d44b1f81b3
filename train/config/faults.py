"""Error messages for configurations: one line that names the key, its value and what is allowed."""

import difflib
import re
from typing import Any

from pydantic import BaseModel, ValidationError

from polyad.model.config import SectionError
from polyad.train.config.gone import GONE
from polyad.train.config.text import keys
from polyad.train.errors import one_line, shortened, shown

MOST = 450
"""Maximum length of one error about a configuration, without the file name."""
SHOWN = 3
"""Number of errors of a file that are shown."""
NEAR, NEAR_ELSEWHERE = 0.75, 0.8
"""Minimum similarity of two names in one section, or in several, to suggest one for the other (as
in `difflib`); `lr` and `tf32` do not reach it."""


def describe(error: ValidationError, tree: type[BaseModel]) -> str:
    """Describes all errors in one line, the first few in full.

    Args:
        error: the error from pydantic.
        tree: the configuration class with the known keys.
    """
    known = set(keys(tree))
    faults = error.errors(include_url=False)
    lines = [*dict.fromkeys(shortened(_fault(fault, known), MOST) for fault in faults)]
    more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return "; ".join(lines[:SHOWN]) + more


def _fault(fault: Any, known: set[str]) -> str:
    # Unions add the kind of the member to the location: data.text.path.
    parts = [str(part) for part in fault["loc"]]
    kind: str = fault["type"]
    # Messages of validators may contain values.
    message = one_line(fault["msg"].removeprefix("Value error, "))
    if not parts:
        return message  # validators of the whole tree name keys themselves
    broken = fault.get("ctx", {}).get("error")
    if isinstance(broken, SectionError):  # a validator of several keys in a section
        return one_line(broken.within(".".join(_without_kind(parts, known))))
    *sections, last = parts
    key = ".".join([*_without_kind(sections, known), last])
    if kind == "extra_forbidden":
        if key in known and len(parts) > 1:
            return f"{key}: is a key of another kind than {parts[-2]}"
        return _unknown(key, known)
    key = shortened(key)
    if kind == "union_tag_invalid":
        tag, allowed = fault["ctx"]["tag"], fault["ctx"]["expected_tags"].replace("'", "")
        return f"{key}.kind: {shown(tag)} is not allowed: {allowed}"
    if kind == "missing":
        return f"{key}: is missing"
    if kind == "value_error" and re.match(r"[\w.]+: ", message):
        return message  # the validator names its keys itself
    allowed = f"{message[0].lower()}{message[1:]}"
    return f"{key}: {shown(fault['input'])} is not allowed: {allowed}"


def _without_kind(sections: list[str], known: set[str]) -> list[str]:
    """The sections of a location, without the kinds that unions add."""
    kept: list[str] = []
    for section in sections:
        above = _without_index(kept)
        is_leaf = above in known and not any(key.startswith(f"{above}.") for key in known)
        # Below a leaf are names from the file, such as a study's variants.
        if is_leaf or section.isdigit() or _without_index([*kept, section]) in known:
            kept.append(section)
    return kept


def _unknown(key: str, known: set[str]) -> str:
    """The line about an unknown key."""
    *sections, last = key.split(".")
    section = _without_index(sections)
    name = f"{section}.{last}" if section else last
    gone = GONE.get(f"study.{name}") if "variants" in known else GONE.get(name) or GONE.get(last)
    if gone:
        return f"{key}: went with {gone}; see CHANGELOG"
    if near := _nearest_key(section, last, known):
        return f"unknown key {shortened(key)}; the nearest is {near}"
    siblings = ", ".join(sorted(_siblings(section, known)))
    return f"unknown key {shortened(key)}; there are {shortened(siblings)}"


def _nearest_key(section: str, name: str, known: set[str]) -> str | None:
    """The key that may be meant, in this section or in another one; None if none is similar."""
    # Of equal names in several sections the outermost is meant.
    everywhere = {
        key.rpartition(".")[2]: key for key in sorted(known, key=lambda key: -key.count("."))
    }
    for names, cutoff in ((_siblings(section, known), NEAR), (everywhere, NEAR_ELSEWHERE)):
        if close := difflib.get_close_matches(name.lower()[:100], names, n=1, cutoff=cutoff):
            return names[close[0]]
    return None


def _siblings(section: str, known: set[str]) -> dict[str, str]:
    """The dotted keys of a section by their last part."""
    return {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == section}


def _without_index(sections: list[str]) -> str:
    """The dotted key without a list index: data.mixture.0 is data.mixture."""
    return ".".join(section for section in sections if not section.isdigit())
