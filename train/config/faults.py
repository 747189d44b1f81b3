"""Error messages for configurations: one line that names the key, its value and what is allowed."""

import difflib
import itertools
import re
from typing import Any

from pydantic import BaseModel, ValidationError

from polyad.model.config import SectionError
from polyad.train.config.gone import GONE
from polyad.train.config.text import keys
from polyad.train.errors import MAX_SHOWN, one_line, shortened, shown


def _plain(name: str) -> str:
    """Normalizes spellings of a name, such as micro-batch-size and microBatchSize."""
    return name.lower().replace("_", "").replace("-", "")


MOST = 450
"""Maximum length of an error about a configuration, without the file name."""
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
    lines = dict.fromkeys(shortened(_fault(fault, known), MOST) for fault in faults)
    first: list[str] = []
    for line in lines:
        if first and sum(map(len, first)) + len(line) > MOST:
            break
        first.append(line)
    rest = len(lines) - len(first)
    return "; ".join(first) + (f"; and {rest} more" if rest else "")


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
        chooser = fault["ctx"]["discriminator"].strip("'")
        tag = fault["ctx"]["tag"]
        *others, other = fault["ctx"]["expected_tags"].replace("'", "").split(", ")
        allowed = " or ".join([", ".join(others), other] if others else [other])
        return f"{key}.{chooser}: {shown(tag)} is not allowed: {allowed}"
    if kind == "missing":
        return f"{key}: is missing"
    if kind in {"model_type", "model_attributes_type"}:
        return f"{key}: {shown(fault['input'])} is not allowed: a section of keys is needed"
    if kind == "value_error" and re.match(r"[\w.]+: ", message):
        return message  # the validator names its keys itself
    allowed = f"{message[0].lower()}{message[1:]}"
    return f"{key}: {shown(fault['input'])} is not allowed: {allowed}"


def _without_kind(sections: list[str], known: set[str]) -> list[str]:
    """The sections of a location, without the kinds that unions add."""
    leaves = known - {
        section
        for key in known
        for section in itertools.accumulate(
            key.split(".")[:-1], lambda outer, inner: f"{outer}.{inner}"
        )
    }
    if any(_without_index(sections[:n]) in leaves for n in range(1, len(sections))):
        return sections  # names from the file, such as a study's variants
    places = range(len(sections))
    for count in (0, 1, 2):  # kinds of the model and of its feed-forward
        for left_out in itertools.combinations(places, count):
            shorter = [section for place, section in enumerate(sections) if place not in left_out]
            if not shorter or _without_index(shorter) in known:
                return shorter
    return sections


def _unknown(key: str, known: set[str]) -> str:
    """The line about an unknown key."""
    name = _without_index(key.split("."))
    of_study = "variants" in known
    if gone := GONE.get(f"study.{name}" if of_study else name) or GONE.get(name.rpartition(".")[2]):
        return f"{key}: went with {gone}; see CHANGELOG"
    if near := nearest_key(key, known):
        return f"unknown key {shortened(key)}; the nearest is {near}"
    section = _without_index(key.split(".")[:-1])
    siblings = [
        name.rpartition(".")[2] for name in sorted(known) if name.rpartition(".")[0] == section
    ]
    if len(listed := ", ".join(siblings)) <= MAX_SHOWN:
        return f"unknown key {shortened(key)}; there are {listed}"
    return (
        f"unknown key {shortened(key)}; `polyad schema` has the {len(siblings)} keys of "
        f"{section or 'the configuration'}"
    )


def nearest_key(key: str, known: set[str]) -> str | None:
    """The key that may be meant, in this section or in another one; None if none is similar."""
    *sections, last = key.split(".")
    section, name = _without_index(sections), _plain(last)[:100]
    siblings = {_plain(k.rpartition(".")[2]): k for k in known if k.rpartition(".")[0] == section}
    if name in siblings:
        return siblings[name]
    if close := difflib.get_close_matches(name, siblings, n=1, cutoff=NEAR):
        return siblings[close[0]]
    everywhere = _unambiguous(known)
    close = difflib.get_close_matches(name, everywhere, n=1, cutoff=NEAR_ELSEWHERE)
    return everywhere[close[0]] if close else None


def _unambiguous(known: set[str]) -> dict[str, str]:
    """Dotted keys by their last part, if one key with that part is above all others."""
    places: dict[str, list[str]] = {}
    for key in sorted(known, key=lambda key: key.count(".")):
        places.setdefault(_plain(key.rpartition(".")[2]), []).append(key)
    return {
        name: keys[0]
        for name, keys in places.items()
        if len(keys) == 1 or keys[0].count(".") < keys[1].count(".")
    }


def _without_index(sections: list[str]) -> str:
    """The dotted key without a list index: data.mixture.0 is data.mixture."""
    return ".".join(section for section in sections if not section.isdigit())
