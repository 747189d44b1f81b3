"""Reads a run's records, `metrics.jsonl`, one line per step, and summarizes them."""

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from polyad.train.errors import ConfigError

METRICS_FILE = "metrics.jsonl"
Records: TypeAlias = Sequence[dict[str, Any]]
LAST = 10
"""Number of last records over which final values are averaged, since single steps vary."""


def records_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yields all records of a file, oldest first; other lines, such as an incomplete one, are
    skipped."""
    with path.open("rb") as file:
        for line in file:
            try:
                tree = json.loads(line)
            except ValueError:
                continue
            if isinstance(tree, dict) and type(tree.get("step")) is int and tree["step"] >= 0:
                yield tree


def read_records(run: Path) -> list[dict[str, Any]]:
    """Returns all records of a run's folder, oldest first.

    Raises:
        ConfigError: there is none.
    """
    path = run / METRICS_FILE
    if not path.is_file():
        raise ConfigError(f"{run}: has no {METRICS_FILE}, which `polyad train` writes")
    records = list(records_of(path))
    if not records:
        raise ConfigError(f"{path}: contains no record of a step yet")
    return records


def last_loss(records: Records) -> float:
    """The mean training loss of the last steps."""
    losses = [record["loss"] for record in records[-LAST:] if record["loss"] is not None]
    return statistics.fmean(losses) if losses else float("nan")


def median_rate(records: Records, unit: str = "token") -> float:
    """The median throughput of steps, in the task's units per second."""
    rates = [rate for record in records if (rate := record.get(f"{unit}s_per_second")) is not None]
    return float(statistics.median(rates)) if rates else math.nan


def peak_memory(records: Records) -> int:
    """The peak memory of one process, in bytes."""
    return max(int(record.get("memory_bytes") or 0) for record in records)


def last_routing(records: Records) -> dict[str, float]:
    """Routing statistics of all layers, averaged over the last steps.

    Args:
        records: a run's records.

    Returns:
        Each `routing/MEASURE` under its measure, and `shared_experts`; empty for a dense model.
    """
    newest: dict[str, list[float]] = {}
    for record in records[-LAST:]:
        for key, value in record.items():
            section, _, name = key.partition("/")
            if section == "routing" and "/" not in name and isinstance(value, int | float):
                newest.setdefault(name, []).append(float(value))
    means = {name: statistics.fmean(values) for name, values in newest.items()}
    shared = shared_experts(records)
    return means if shared is None else means | {"shared_experts": shared}


def shared_experts(records: Records) -> float | None:
    """The effective number of experts used by the tokens of the last steps.

    Args:
        records: a run's records; only those of steps with a console line have loads.

    Returns:
        The exponential of the entropy of a layer's mean load, averaged over layers: from 1 to the
        number of experts (for a hierarchy the product over levels). None for a dense model.
    """
    last = [record for record in records[-LAST:] if any(map(_is_load, record))]
    each = []
    for key in filter(_is_load, last[-1] if last else ()):
        loads = zip(*(record[key] for record in last), strict=True)
        shares = [statistics.fmean(values) for values in loads]
        each.append(math.exp(-math.fsum(p * math.log(p) for p in shares if p > 0)))
    return statistics.fmean(each) if each else None


def last_fluctuation(records: Records) -> dict[str, float]:
    """Returns the shares of tokens that changed experts between the last two checkpoints.

    Args:
        records: a run's records; those at checkpoints have it with `log.fluctuation: true`.

    Returns:
        Shares of the probe set, averaged over layers: `top1`, with a different first expert, and
        `set`, with a different set. Empty if nothing was logged.
    """
    for record in reversed(records):
        if "fluctuation/top1" in record:
            return {name: float(record[f"fluctuation/{name}"]) for name in ("top1", "set")}
    return {}


def _is_load(key: str) -> bool:
    return key.startswith("routing/") and key.endswith("/load")
