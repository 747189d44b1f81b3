"""Reads a run's records, `metrics.jsonl`: a line a step. All readers judge a line alike."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polyad.train.errors import ConfigError

METRICS_FILE = "metrics.jsonl"
EVENTS = ("spike", "rewind")
"""What is told of a loss or gradient far above the last ones: the only values with keys."""
LARGEST = 1e300
"""No loss, norm or time of a run is above it."""


def record_of(line: bytes) -> dict[str, Any] | None:
    """The record in a line; None if it holds none, as one that is being written or was cut.

    Args:
        line: of the file.
    """
    try:
        tree = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(tree, dict) or type(tree.get("step")) is not int or tree["step"] < 0:
        return None
    known = all(_is_known(name, value) for name, value in tree.items())
    return tree if known and not isinstance(tree.get("loss"), list | bool) else None


def _is_known(name: str, value: object) -> bool:
    if isinstance(value, list):
        return all(map(_is_number, value))
    return _is_number(value) or (name in EVENTS and isinstance(value, dict))


def _is_number(value: object) -> bool:
    """Whether it is a number that a run writes, or null, which stands for one that is not finite.

    Floats are bounded so that sums of many are finite too.
    """
    if isinstance(value, int):
        return abs(value) < 2**63
    return value is None or (isinstance(value, float) and abs(value) <= LARGEST)


def records_of(path: Path) -> Iterator[dict[str, Any]]:
    """All records of a file, oldest first; other lines are left out."""
    with path.open("rb") as file:
        for line in file:
            if (record := record_of(line)) is not None:
                yield record


def read_records(run: Path) -> list[dict[str, Any]]:
    """All records of a run's folder, oldest first.

    Raises:
        ConfigError: there is none.
    """
    path = run / METRICS_FILE
    if not path.is_file():
        raise ConfigError(f"{run}: has no {METRICS_FILE}, which `polyad train` writes")
    found = list(records_of(path))
    if not found:
        raise ConfigError(f"{path}: holds no record of a step yet")
    return found
