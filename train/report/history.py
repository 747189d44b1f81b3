"""The history of a run from metrics.jsonl, reduced to as many points as a page can show.

The file is read twice, line by line. The first pass reads only the steps: if a step has two
records, as after continuing from an older checkpoint, the later one counts, and all records between
them are dropped. Then records are averaged over at most `MAX_POINTS` equal spans of steps. Only
some records have loads of single experts (`log.every`). These have separate columns, one per such
record, or per fixed number of records if there are more than a heat map can show.
"""

import math
import re
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from polyad.train.errors import ConfigError
from polyad.train.page.matrices import MOST_COLUMNS
from polyad.train.records import METRICS_FILE, record_of

MAX_POINTS = 240
"""Maximum number of spans of steps."""
_LAYER = re.compile(r"routing/(.+)/(\w+)")

Series = list[float | None]
Row = npt.NDArray[np.float64]
_Sums = dict[int, tuple[Row, int]]
"""Sum and number of rows, by position."""


@dataclass(kw_only=True)
class LayerHistory:
    """The routing statistics of one layer over time."""

    scalars: dict[str, Series] = field(default_factory=dict)
    """One number per span, by measure; see `polyad.train.loop.statistics.measures`."""
    lists: dict[str, list[Row | None]] = field(default_factory=dict)
    """One number per expert and span, by measure, except `load`."""
    load: list[Row | None] = field(default_factory=list)
    """The load of every expert, per column of a heat map; None for columns without records; empty
    if there are none."""

    def last(self, measure: str) -> float | None:
        """The newest value of a measure."""
        return last(self.scalars.get(measure, []))


@dataclass(kw_only=True)
class History:
    """A run's records."""

    steps: list[int]
    """The last step of each span that has a record."""
    width: int
    """Number of steps per span."""
    load_steps: list[int]
    """The last step of each column of `LayerHistory.load`."""
    load_width: int
    """Number of records per column."""
    scalars: dict[str, Series]
    """Mean value per span, by name; None for spans without records."""
    layers: dict[str, LayerHistory]
    """Layers by name, in the model's order."""
    last_record: dict[str, Any]
    """The last record of the file, without lists."""
    final_loss: float | None
    """The mean training loss of the last ten steps."""
    unreadable: int
    """Number of unreadable lines, such as one being written, or cut off when a run was killed."""


def no_history() -> History:
    """The history for weights without a run."""
    return History(
        steps=[],
        width=1,
        load_steps=[],
        load_width=1,
        scalars={},
        layers={},
        last_record={"step": 0},
        final_loss=None,
        unreadable=0,
    )


def last(series: Series) -> float | None:
    """The newest value of a series."""
    return next((value for value in reversed(series) if value is not None), None)


def read_history(
    folder: Path,
    max_points: int = MAX_POINTS,
    max_columns: int = MOST_COLUMNS,
    progress: Callable[[float], None] = lambda share: None,
) -> History:
    """Reads a run's metrics; needs memory for layers and experts, and 8 bytes per step.

    Args:
        folder: the run's folder.
        max_points: maximum number of spans.
        max_columns: maximum number of columns of loads.
        progress: called with the share done from time to time.

    Raises:
        ConfigError: the file is missing, or has no records.
    """
    path = folder / METRICS_FILE
    if not path.is_file():
        raise ConfigError(
            f"{folder}: has no {METRICS_FILE}: a report needs a run that `polyad train` has started"
        )
    keep, first, newest, unreadable = _standing(path)
    if not keep or newest < first:
        raise ConfigError(f"{path}: contains no record of a step yet")
    width = math.ceil((newest - first + 1) / max_points)
    spans, columns = _Spans(first, width), _Columns(max_columns)
    losses: list[float] = []
    record: dict[str, Any] = {}
    for number, line in enumerate(_lines(path)):
        if number % 100 == 99:
            progress(number / len(keep))
        if number >= len(keep) or not keep[number]:  # lines added meanwhile by a run in progress
            continue
        if (found := record_of(line)) is None:
            continue
        record = found
        spans.add(record)
        columns.add(record)
        if record.get("loss") is not None:
            losses = [*losses[-9:], record["loss"]]
    progress(1.0)
    if not record:
        raise ConfigError(f"{path}: contains no record of a step yet")
    scalars, layers = spans.means()
    for name, rows in columns.means().items():
        layers.setdefault(name, LayerHistory()).load = rows
    return History(
        steps=spans.steps(),
        width=width,
        scalars=scalars,
        load_steps=columns.steps,
        load_width=columns.width,
        layers=dict(sorted(layers.items(), key=lambda item: _natural(item[0]))),
        last_record={name: v for name, v in record.items() if not isinstance(v, list)},
        final_loss=math.fsum(losses) / len(losses) if losses else None,
        unreadable=unreadable,
    )


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from file


def _standing(path: Path) -> tuple[bytearray, int, int, int]:
    """Returns the lines to use, their first and newest step, and the number of unreadable lines."""
    steps, unreadable = array("q"), 0
    for line in _lines(path):
        record = record_of(line)
        unreadable += record is None and bool(line.strip())
        steps.append(-1 if record is None else record["step"])
    keep, first, newest, bound = bytearray(len(steps)), math.inf, -1, math.inf
    for number in range(len(steps) - 1, -1, -1):
        if 0 <= steps[number] < bound:
            bound = steps[number]
            keep[number] = 1
            first, newest = min(first, bound), max(newest, bound)
    return keep, int(first) if newest >= 0 else 0, newest, unreadable


class _Spans:
    """Sums of records over spans of steps."""

    def __init__(self, first: int, width: int) -> None:
        self._first, self._width = first, width
        self._last_step: dict[int, int] = {}
        self._sums: dict[str, dict[int, tuple[float, int]]] = {}
        self._rows: dict[str, _Sums] = {}

    def add(self, record: dict[str, Any]) -> None:
        span = (record["step"] - self._first) // self._width
        self._last_step[span] = record["step"]
        for name, value in record.items():
            if isinstance(value, list):
                if _load_of(name) is None:
                    _add(self._rows.setdefault(name, {}), span, _row(value))
            elif isinstance(value, int | float) and not isinstance(value, bool):
                sums = self._sums.setdefault(name, {})
                before, count = sums.get(span, (0.0, 0))
                sums[span] = before + value, count + 1

    def steps(self) -> list[int]:
        """The last step of each span."""
        return [self._last_step[span] for span in sorted(self._last_step)]

    def means(self) -> tuple[dict[str, Series], dict[str, LayerHistory]]:
        spans = sorted(self._last_step)
        scalars: dict[str, Series] = {}
        layers: dict[str, LayerHistory] = {}
        for name, sums in self._sums.items():
            values = [sums[s][0] / sums[s][1] if s in sums else None for s in spans]
            if match := _LAYER.fullmatch(name):
                layers.setdefault(match[1], LayerHistory()).scalars[match[2]] = values
            else:
                scalars[name] = values
        for name, rows in self._rows.items():
            if match := _LAYER.fullmatch(name):
                means = [rows[s][0] / rows[s][1] if s in rows else None for s in spans]
                layers.setdefault(match[1], LayerHistory()).lists[match[2]] = means
        return scalars, layers


class _Columns:
    """Loads of single experts, with a column per record. If there are more than `most`, neighbors
    are merged, so that all columns have equally many records."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._records = 0
        self._rows: dict[str, _Sums] = {}
        self.steps: list[int] = []
        self.width = 1

    def add(self, record: dict[str, Any]) -> None:
        loads = {
            layer: value
            for name, value in record.items()
            if isinstance(value, list) and (layer := _load_of(name)) is not None
        }
        if not loads:
            return
        if self._records == self._most * self.width:
            self._halve()
        column = self._records // self.width
        self._records += 1
        self.steps[column:] = [record["step"]]
        for layer, value in loads.items():
            _add(self._rows.setdefault(layer, {}), column, _row(value))

    def _halve(self) -> None:
        self.steps = [*self.steps[1::2], *self.steps[len(self.steps) // 2 * 2 :]]
        self.width *= 2
        for layer, rows in self._rows.items():
            halved: _Sums = {}
            for column, (total, count) in sorted(rows.items()):
                _add(halved, column // 2, total, count)
            self._rows[layer] = halved

    def means(self) -> dict[str, list[Row | None]]:
        """The means, by layer."""
        columns = range(len(self.steps))
        return {
            layer: [rows[c][0] / rows[c][1] if c in rows else None for c in columns]
            for layer, rows in self._rows.items()
        }


def _load_of(name: str) -> str | None:
    """The layer of a load's key; None for other keys."""
    match = _LAYER.fullmatch(name)
    return match[1] if match and match[2] == "load" else None


def _row(value: list[float | None]) -> Row:
    return np.array([math.nan if v is None else v for v in value], np.float64)


def _add(sums: _Sums, place: int, row: Row, count: int = 1) -> None:
    """Adds rows to a sum, unless their length differs from earlier ones."""
    total, before = sums.get(place, (np.zeros_like(row), 0))
    if total.shape == row.shape:
        sums[place] = total + row, before + count


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts blocks.2 before blocks.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
