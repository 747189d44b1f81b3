"""The points of a grid: all combinations of the values that a study tries for some keys."""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from polyad.model.config_yaml import Written


class Point(NamedTuple):
    """One combination."""

    name: str
    """As `learning_rate=2.0e-5,top_k=16`, which is a folder's name too; empty without a grid."""
    keys: Mapping[str, Any]
    """Its value of each dotted key."""


def points(grid: Mapping[str, Sequence[Any]]) -> list[Point]:
    """All combinations, the last key's values fastest.

    Args:
        grid: the values of each dotted key; none make one point without a name.

    Raises:
        ValueError: two points would have one name.
    """
    found = [
        Point(_name(keys), keys)
        for values in itertools.product(*grid.values())
        for keys in (dict(zip(grid, values, strict=True)),)
    ]
    names = [point.name for point in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{min(twice)} is there twice")
    return found


def as_written(value: Any) -> str:
    """A value as YAML that reads back as the same value, also for a folder called 0012."""
    if isinstance(value, Written):
        return value.text
    return json.dumps(value, default=lambda written: written.value)


def _name(keys: Mapping[str, Any]) -> str:
    """Keys by their last parts where those differ."""
    short = {key: key.rpartition(".")[2] for key in keys}
    if len(set(short.values())) < len(short):
        short = {key: key for key in keys}
    return ",".join(f"{short[key]}={_plain(as_written(value))}" for key, value in keys.items())


def _plain(text: str) -> str:
    """A value without what a folder's name should not have."""
    return re.sub(r"[^\w.+-]+", "-", text.strip('[]{}"'))
