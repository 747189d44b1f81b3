"""Reads a run's records, `metrics.jsonl`, a line a step; all readers judge a line alike. And what
the records of a run come to."""

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

from polyad.train.errors import ConfigError

METRICS_FILE = "metrics.jsonl"
Records: TypeAlias = Sequence[dict[str, Any]]
EVENTS = ("spike", "rewind")
"""Keys for a loss or gradient far above the last ones: the only values that are dictionaries."""
LARGEST = 1e300
"""No loss, norm or time of a run is above it."""
LAST = 10
"""Records that numbers of the end of training are averaged over, since single steps vary."""


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
        raise ConfigError(f"{path}: contains no record of a step yet")
    return found


def last_loss(records: Records) -> float:
    """The mean training loss of the last steps."""
    losses = [record["loss"] for record in records[-LAST:] if record["loss"] is not None]
    return statistics.fmean(losses) if losses else float("nan")


def median_rate(records: Records, unit: str = "token") -> float:
    """The median throughput of steps, in the task's units per second."""
    rates = [rate for record in records if (rate := record.get(f"{unit}s_per_second")) is not None]
    return float(statistics.median(rates)) if rates else math.nan


def peak_memory(records: Records) -> int:
    """The peak memory of a process, in bytes."""
    return max(int(record.get("memory_bytes") or 0) for record in records)


def last_routing(records: Records) -> dict[str, float]:
    """Routing statistics of all layers, averaged over the last steps.

    Args:
        records: of a run.

    Returns:
        Each `routing/MEASURE` by its measure, and `shared_experts`; nothing of a model that does
        not route.
    """
    found: dict[str, list[float]] = {}
    for record in records[-LAST:]:
        for key, value in record.items():
            section, _, name = key.partition("/")
            if section == "routing" and "/" not in name and isinstance(value, int | float):
                found.setdefault(name, []).append(float(value))
    means = {name: statistics.fmean(values) for name, values in found.items()}
    shared = shared_experts(records)
    return means if shared is None else means | {"shared_experts": shared}


def shared_experts(records: Records) -> float | None:
    """The effective number of experts that the tokens of the last steps used in all.

    Args:
        records: of a run; loads stand in those of steps that had a line on the console.

    Returns:
        The exponential of the entropy of a layer's mean load, the mean over layers: from 1 to the
        number of experts (of a hierarchy to the levels' product). None of a model that does not
        route.
    """
    last = [record for record in records[-LAST:] if any(map(_is_load, record))]
    each = []
    for key in filter(_is_load, last[-1] if last else ()):
        loads = zip(*(record[key] for record in last), strict=True)
        shares = [statistics.fmean(values) for values in loads]
        each.append(math.exp(-math.fsum(p * math.log(p) for p in shares if p > 0)))
    return statistics.fmean(each) if each else None


def last_fluctuation(records: Records) -> dict[str, float] | None:
    """Which tokens changed experts between the last two checkpoints.

    Args:
        records: of a run; those of checkpoints have it with `log.fluctuation: true`.

    Returns:
        Shares of the probe set, the mean over layers: `top1`, with another first expert, and `set`,
        with other experts; and `steps` between the two. None where nothing was logged.
    """
    read = [record for record in records if "fluctuation/seconds" in record]
    if len(read) < 2 or "fluctuation/top1" not in read[-1]:
        return None
    last = {name: float(read[-1][f"fluctuation/{name}"]) for name in ("top1", "set")}
    return last | {"steps": read[-1]["step"] - read[-2]["step"]}


def head_changes(records: Records) -> float | None:
    """How often the attention head that a graph of tokens is made of changed in a run.

    Args:
        records: of a run.

    Returns:
        Changes from one record that names the head to the next, the mean over layers; None where no
        record names one.
    """
    heads: dict[str, list[int]] = {}
    for record in records:
        for key, value in record.items():
            if key.startswith("routing/") and key.endswith("/attention_head"):
                heads.setdefault(key, []).append(value)
    changes = [sum(a != b for a, b in pairwise(numbers)) for numbers in heads.values()]
    return statistics.fmean(changes) if changes else None


def validations(records: Records, score: str, units: str) -> list[dict[str, Any]]:
    """What a run was validated to while it was trained, oldest first.

    Args:
        records: of a run.
        score: the key of the score.
        units: the key of what was seen of the data, as `tokens`.

    Returns:
        Of each step with a finite score and known units `step`, the units and `score`.
    """
    return [
        {"step": record["step"], units: record[units], "score": float(record[score])}
        for record in records
        if record.get(score) is not None and units in record
    ]


def _is_load(key: str) -> bool:
    return key.startswith("routing/") and key.endswith("/load")
