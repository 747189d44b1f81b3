"""Cells of a study's tables."""

import math
from collections.abc import Mapping
from typing import Any

Row = tuple[str, ...]


def difference_cells(difference: Mapping[str, Any] | None, digits: int = 4) -> Row:
    """The mean, its interval, and how many pairs.

    Args:
        difference: of pairs; None leaves the cells empty.
        digits: after the point.
    """
    if difference is None:
        return "", "", ""
    interval = "none of one pair"
    if difference["pairs"] > 1:
        interval = f"{difference['low']:+.{digits}f} to {difference['high']:+.{digits}f}"
        interval += mark(difference)
    return pm(difference, digits, sign="+"), interval, f"{difference['pairs']}"


def mark(difference: Mapping[str, Any]) -> str:
    """A star where an interval leaves 0 out.

    Args:
        difference: of pairs.
    """
    return " *" if difference["excludes_zero"] else ""


def pm(values: Mapping[str, Any], digits: int, sign: str = "") -> str:
    """A mean and its standard deviation; one run has none. An empty cell where none is finite.

    Args:
        values: as `spread` makes them.
        digits: after the point.
        sign: + shows that of positive numbers, too.
    """
    if math.isnan(values["mean"]):
        return ""
    mean, deviation = f"{values['mean']:{sign}.{digits}f}", values["deviation"]
    return mean if math.isnan(deviation) else f"{mean} ± {deviation:.{digits}f}"
