"""A report as one self-contained HTML page, without scripts, external fonts or network access.

The page is the template `report.html`; here are the records of training and their charts.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from polyad.train.errors import ConfigError
from polyad.train.experts.probing import RoutedLayer
from polyad.train.page import (
    Points,
    axis_labels,
    interval,
    interval_axis,
    line_chart,
    load_matrix,
    number,
    page,
)
from polyad.train.records import LAST, METRICS_FILE, last_loss, records_of
from polyad.train.report.experts import ExpertRow
from polyad.train.report.held_out import ReportData
from polyad.train.tasks.task import Task

MAX_POINTS = 240
"""Maximum number of points of a curve."""
ROWS_SHOWN = 48
"""Number of experts listed; the others are in a fold."""


@dataclass(kw_only=True)
class Training:
    """A run's records."""

    losses: list[tuple[int, float]] = field(default_factory=list)
    """Training loss by step."""
    validations: list[tuple[int, float]] = field(default_factory=list)
    """Validation score by step."""
    newest: dict[str, Any] = field(default_factory=dict)
    """The newest value of each key; empty for weights without a run."""
    final_loss: float = math.nan
    """Mean training loss of the last steps."""

    def routing(self) -> dict[str, dict[str, Any]]:
        """The newest routing statistics by layer and measure; see
        `polyad.train.loop.statistics.measures`."""
        routing: dict[str, dict[str, Any]] = {}
        for key, value in self.newest.items():
            section, _, name = key.partition("/")
            layer, _, measure = name.rpartition("/")
            if section == "routing" and layer:
                routing.setdefault(layer, {})[measure] = value
        return routing


def read_training(run: Path, score: str) -> Training:
    """Reads a run's records.

    Args:
        run: the run's folder.
        score: the key of the validation score.

    Raises:
        ConfigError: there is no record.
    """
    training, recent = Training(), deque[dict[str, Any]](maxlen=LAST)
    if not (run / METRICS_FILE).is_file():
        raise ConfigError(f"{run}: has no {METRICS_FILE}, which `polyad train` writes")
    for record in records_of(run / METRICS_FILE):
        recent.append(record)
        training.newest |= {key: each for key, each in record.items() if each is not None}
        for key, points in (("loss", training.losses), (score, training.validations)):
            if record.get(key) is not None:
                points.append((record["step"], record[key]))
    if not recent:
        raise ConfigError(f"{run / METRICS_FILE}: contains no record of a step yet")
    training.final_loss = last_loss(list(recent))
    return training


def render_report(
    content: Mapping[str, Any],
    training: Training,
    task: type[Task[Any]],
    loss_unit: str,
    routed: Sequence[RoutedLayer],
    rows: Sequence[ExpertRow],
    read: ReportData | None,
) -> str:
    """Renders the page as HTML.

    Args:
        content: the values of `--json`.
        training: the run's records.
        task: the training task.
        loss_unit: the unit of the training loss; empty: no unit.
        routed: the layers with experts, in the model's order; empty for a dense model.
        rows: the experts.
        read: what was read; None if no data was.
    """
    changes = [row.effect.value for row in rows if row.effect]
    is_knockout = read is not None and read.knockout is not None
    axis = interval_axis([each for change in changes for each in change], of_ratios=not is_knockout)
    loads = _loads(routed, training.routing())
    curves = {"training loss": _means(training.losses)}
    if not task.higher_is_better and loss_unit == task.loss_unit:
        curves["validation loss"] = training.validations
    curves = {name: points for name, points in curves.items() if points}
    return page(
        "train/report/report.html",
        content=content,
        routed=routed,
        loss_unit=loss_unit,
        read=read,
        rows=rows,
        rows_shown=ROWS_SHOWN,
        is_knockout=is_knockout,
        is_sparse=not any(row.layer.shares for row in rows),
        axis_labels=axis_labels(axis),
        bar=lambda change: interval(axis, *change),
        loads=loads and load_matrix("Load of each layer", loads),
        curves=curves and line_chart("Loss over steps", curves),
        facts=facts(content, training, task, loss_unit),
    )


def facts(
    content: Mapping[str, Any], training: Training, task: type[Task[Any]], loss_unit: str
) -> list[tuple[str, str, str]]:
    """Facts of the run: names, values, and descriptions; see `render_report`."""
    if "parameters" not in content:  # a trace
        return [("Tokens", f"{content['units_read']:,}", "traced")]
    parameters, active = content["parameters"], content["active_parameters"]
    used = "all active for every token"
    if active != parameters:
        used = f"{active:,} active per token"
    size = ("Parameters", f"{parameters:,}", used)
    if not training.newest:  # weights without a run
        return [size]
    unit, in_unit = task.unit.name, f"{loss_unit}, " if loss_unit else ""
    units, score = content[f"{unit}s"], content[task.validation_score]
    return [
        ("Steps", f"{content['step']:,}", f"of {content['total_steps']:,}"),
        (f"{unit.title()}s", f"{units:,}" if units else "unknown", "seen in training"),
        size,
        ("Training loss", _or_none(training.final_loss), f"{in_unit}last {LAST} steps"),
        (
            task.validation_score.replace("_", " ").capitalize(),
            _or_none(math.nan if score is None else score),
            "latest",
        ),
    ]


def _or_none(value: float) -> str:
    return "not yet" if math.isnan(value) else number(value, 5)


def _means(points: Points) -> Points:
    """Averages points over at most `MAX_POINTS` spans; a mean is at the last step of its span."""
    spans = np.array_split(np.array(points), min(len(points), MAX_POINTS)) if points else []
    return [(float(span[-1, 0]), float(span[:, 1].mean())) for span in spans]


def _loads(
    routed: Sequence[RoutedLayer], routing: Mapping[str, dict[str, Any]]
) -> dict[str, list[float]]:
    """The newest loads of the layers in training, as multiples of the mean, by level."""
    loads = {}
    for layer in routed:
        values = [0.0 if v is None else v for v in routing.get(layer.name, {}).get("load", ())]
        first = 0
        for level, size in enumerate(layer.levels if len(values) == layer.num_experts else ()):
            name = layer.title + (f".{level}" if len(layer.levels) > 1 else "")
            loads[name] = [size * value for value in values[first : first + size]]
            first += size
    return loads
