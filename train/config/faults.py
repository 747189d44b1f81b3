"""The faults of a configuration in words."""

import difflib
import itertools
import re
from typing import Any

from pydantic import BaseModel, ValidationError

from model.config import SectionError
from model.config_yaml import MAX_DIGITS, NUMBER
from train.config.names import OURS, plain
from train.config.text import keys
from train.errors import one_line, shortened, shown

NEAR, NEAR_ELSEWHERE = 0.75, 0.8
"""How alike two names of one section, or of several, are if one may be meant by the other, as
`difflib` counts it: `lr` and `tf32` are not."""


def describe(error: ValidationError, tree: type[BaseModel]) -> str:
    """All faults in one line, the first few in full.

    Args:
        error: what pydantic found.
        tree: the configuration class whose keys are known.
    """
    known = set(keys(tree))
    faults = [_fault(fault, known) for fault in error.errors(include_url=False)]
    more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
    return "; ".join(faults[:3]) + more


def _fault(fault: Any, known: set[str]) -> str:
    # A union puts the member's kind into the location: model.feed_forward.dense.hidden_size.
    parts = [str(part) for part in fault["loc"]]
    kind: str = fault["type"]
    # A rule of a room puts values into its words.
    message = one_line(fault["msg"].removeprefix("Value error, "))
    if not parts:
        return message  # a rule of the whole tree names its keys itself
    broken = fault.get("ctx", {}).get("error")
    if isinstance(broken, SectionError):  # a rule between keys of a section
        return one_line(broken.within(".".join(_without_kind(parts, known))))
    *sections, last = parts
    key = ".".join([*_without_kind(sections, known), last])
    if kind == "extra_forbidden" and key in known:  # of another member of the union
        section, chosen = key.rpartition(".")[0], sections[-1]
        return (
            f"{key}: is not a key of {section}.kind: {chosen}, but of another kind; on the command "
            f"line {section}={{kind: {chosen}, ...}} replaces the whole section"
        )
    if kind == "extra_forbidden":
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
        return message  # the rule names its keys itself
    allowed = f"{message[0].lower()}{message[1:]}{_hint(kind, fault['input'])}"
    return f"{key}: {shown(fault['input'])} is not allowed: {allowed}"


def _without_kind(sections: list[str], known: set[str]) -> list[str]:
    """The sections of a location, without the kinds that unions put between them."""
    leaves = known - {
        section
        for key in known
        for section in itertools.accumulate(
            key.split(".")[:-1], lambda outer, inner: f"{outer}.{inner}"
        )
    }
    if any(_without_index(sections[:n]) in leaves for n in range(1, len(sections))):
        return sections  # names that the file gives, as those of a study's variants
    places = range(len(sections))
    for count in (0, 1, 2):  # of the model, and of its feed-forward
        for left_out in itertools.combinations(places, count):
            shorter = [section for place, section in enumerate(sections) if place not in left_out]
            if not shorter or _without_index(shorter) in known:
                return shorter
    return sections


def _hint(kind: str, value: Any) -> str:
    """An addition to an error about YAML that reads otherwise than it may look; often empty."""
    if not isinstance(value, str):
        return ""
    if kind == "bool_type" and value.lower() in {"yes", "no", "on", "off", "y", "n"}:
        return ", true or false"
    if kind in {"int_type", "float_type"} and NUMBER.fullmatch(value.replace("_", "")):
        if len(value) > MAX_DIGITS:
            return f" of at most {MAX_DIGITS} characters"
        return " without _" if "_" in value else " without quotes"
    return ""


def _unknown(key: str, known: set[str]) -> str:
    """The line about a key that is not there."""
    if near := nearest_key(key, known):
        return f"unknown key {shortened(key)}; the nearest is {near}"
    section = _without_index(key.split(".")[:-1])
    siblings = sorted(name for name in known if name.rpartition(".")[0] == section)
    return f"unknown key {shortened(key)}; there are {', '.join(siblings)}"


def nearest_key(key: str, known: set[str]) -> str | None:
    """The key that may be meant: of this section, of another one, or under another project's name.

    Args:
        key: dotted, and not known.
        known: all dotted keys.
    """
    *sections, last = key.split(".")
    section, name = _without_index(sections), plain(last)[:100]
    siblings = {plain(k.rpartition(".")[2]): k for k in known if k.rpartition(".")[0] == section}
    if name in siblings:
        return siblings[name]
    if OURS.get(name) in known:
        return OURS[name]
    everywhere = _unambiguous(known)
    if name in everywhere:
        return everywhere[name]
    if close := difflib.get_close_matches(name, siblings, n=1, cutoff=NEAR):
        return siblings[close[0]]
    ours = {theirs: key for theirs, key in OURS.items() if key in known} | everywhere
    close = difflib.get_close_matches(name, ours, n=1, cutoff=NEAR_ELSEWHERE)
    return ours[close[0]] if close else None


def _unambiguous(known: set[str]) -> dict[str, str]:
    """Dotted keys by their last name, where one of that name stands above all others."""
    found: dict[str, list[str]] = {}
    for key in sorted(known, key=lambda key: key.count(".")):
        found.setdefault(plain(key.rpartition(".")[2]), []).append(key)
    return {
        name: keys[0]
        for name, keys in found.items()
        if len(keys) == 1 or keys[0].count(".") < keys[1].count(".")
    }


def _without_index(sections: list[str]) -> str:
    """The dotted key, without the place in a list: data.mixture.0 is data.mixture."""
    return ".".join(section for section in sections if not section.isdigit())
