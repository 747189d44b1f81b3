"""A report as one self-contained HTML page, without scripts, external fonts or network access.

The page is the template `report.html`; here are the content of the page and of `--json`, and the
charts of training.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from polyad.train.errors import ConfigError
from polyad.train.experts.probing import RoutedLayer
from polyad.train.page.charts import (
    Points,
    axis_labels,
    interval,
    interval_axis,
    line_chart,
    load_matrix,
)
from polyad.train.page.template import number, page
from polyad.train.records import LAST, METRICS_FILE, last_loss, records_of
from polyad.train.report.experts import ExpertRow, expert_rows
from polyad.train.report.held_out import HeldOut
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
        found: dict[str, dict[str, Any]] = {}
        for key, value in self.newest.items():
            section, _, name = key.partition("/")
            layer, _, measure = name.rpartition("/")
            if section == "routing" and layer:
                found.setdefault(layer, {})[measure] = value
        return found


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


@dataclass(frozen=True, kw_only=True)
class Report:
    """The whole content of a report."""

    run: str
    kind: str
    """The model in words."""
    parameters: int
    active_parameters: int
    checkpoint: str
    checkpoint_step: int
    is_best: bool
    """Whether it is the checkpoint with the best validation, if the run keeps that."""
    total_steps: int
    most_validated: int | None
    """Maximum number of samples that a validation during training reads; None: the whole split."""
    training: Training
    task: type[Task[Any]]
    """The training task."""
    loss_unit: str
    """The unit of the training loss; empty: no unit."""
    routed: list[RoutedLayer]
    """The layers with experts, in the model's order; empty for a dense model."""
    layers: list[RoutedLayer]
    """Those whose experts are listed."""
    read: HeldOut | None
    """None if no data was read."""

    def rows(self) -> list[ExpertRow]:
        """The experts, as the page lists them."""
        return [] if self.read is None else expert_rows(self.layers, self.read)

    @property
    def validation(self) -> float | None:
        """The newest validation score of training."""
        return self.training.newest.get(self.task.validation_score)

    def to_json(self) -> dict[str, Any]:
        """JSON values, without the curves: those are in metrics.jsonl."""
        newest, units, read = self.training.newest, f"{self.task.unit.name}s", self.read
        return {
            "run": self.run,
            "model": self.kind,
            "parameters": self.parameters,
            "active_parameters": self.active_parameters,
            "checkpoint": self.checkpoint,
            "checkpoint_step": self.checkpoint_step,
            "checkpoint_is_best": self.is_best,
            "step": newest.get("step", 0),
            "total_steps": self.total_steps,
            units: newest.get(units),
            "loss": self.training.final_loss,
            self.task.validation_score: self.validation,
            "validation_max_windows": self.most_validated,
            "routing": self.training.routing(),
            "data": read and read.data,
            "split": read and read.split,
            "units_read": read and read.units,
            "units_in_split": read and read.of_units,
            "specialization": read and read.specialization,
            "knockout": read and read.knockout,
            "maps": read and read.images and read.images.maps,
            "experts": self.rows(),
        }


def render_report(report: Report) -> str:
    """Renders the page.

    Args:
        report: its content.

    Returns:
        HTML.
    """
    rows, read = report.rows(), report.read
    changes = [row.effect.value for row in rows if row.effect]
    is_knockout = read is not None and read.knockout is not None
    axis = interval_axis([each for change in changes for each in change], of_ratios=not is_knockout)
    loads = _loads(report)
    curves = _curves(report)
    return page(
        "train/report/report.html",
        report=report,
        read=read,
        rows=rows,
        rows_shown=ROWS_SHOWN,
        is_knockout=is_knockout,
        is_sparse=not any(layer.shares for layer in report.layers),
        axis_labels=axis_labels(axis),
        bar=lambda change: interval(axis, *change),
        loads=loads and load_matrix("Load of each layer", loads),
        curves=curves and line_chart("Loss over steps", curves),
        facts=facts(report),
    )


def facts(report: Report) -> list[tuple[str, str, str]]:
    """Facts of the run: names, values, and descriptions."""
    training, task = report.training, report.task
    unit, in_unit = task.unit.name, f"{report.loss_unit}, " if report.loss_unit else ""
    units, active = training.newest.get(f"{unit}s"), report.active_parameters
    used = f"{active:,} active per token"
    if active == report.parameters:
        used = "all active for every token"
    size = ("Parameters", f"{report.parameters:,}", used)
    if not training.newest:  # weights without a run
        return [size]
    return [
        ("Steps", f"{training.newest['step']:,}", f"of {report.total_steps:,}"),
        (f"{unit.title()}s", f"{units:,}" if units else "unknown", "seen in training"),
        size,
        ("Training loss", _or_none(training.final_loss), f"{in_unit}last {LAST} steps"),
        *(
            (name, _or_none(math.nan if value is None else value), about)
            for name, value, about in task.validation_facts(
                report.validation, report.most_validated
            )
        ),
    ]


def _or_none(value: float) -> str:
    return "not yet" if math.isnan(value) else number(value, 5)


def _curves(report: Report) -> Mapping[str, Points]:
    """The training loss, and the validation score where it is a loss of the same unit."""
    training, task = report.training, report.task
    curves = {"training loss": _means(training.losses)}
    if not task.higher_is_better and report.loss_unit == task.loss_unit:
        curves["validation loss"] = training.validations
    return {name: points for name, points in curves.items() if points}


def _means(points: Points) -> Points:
    """Averages points over at most `MAX_POINTS` spans; a mean is at the last step of its span."""
    spans = np.array_split(np.array(points), min(len(points), MAX_POINTS)) if points else []
    return [(float(span[-1, 0]), float(span[:, 1].mean())) for span in spans]


def _loads(report: Report) -> dict[str, list[float]]:
    """The newest loads of the layers in training, as multiples of the mean, by level."""
    loads = {}
    routing = report.training.routing()
    for layer in report.routed:
        values = [0.0 if v is None else v for v in routing.get(layer.name, {}).get("load", ())]
        first = 0
        for level, size in enumerate(layer.levels if len(values) == layer.num_experts else ()):
            name = layer.title + (f".{level}" if len(layer.levels) > 1 else "")
            loads[name] = [size * value for value in values[first : first + size]]
            first += size
    return loads
