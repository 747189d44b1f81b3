"""`polyad report`: one self-contained HTML page about a run's training and its experts.

The page has no scripts, external fonts or network access. It is the template `report.html`; here
are what it shows, and the records of training with their charts.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polyad.data.files import write_whole, writing
from polyad.model.build import build_model, count_parameters
from polyad.parallel.checkpoint.load import Checkpoint, best_checkpoint, newest_of, read_newest
from polyad.parallel.checkpoint.manage import BEST_FILE, STEP_FOLDER
from polyad.parallel.weights import is_weights_folder, open_checkpoint, open_weights
from polyad.train.config.adaptation import unused_parameters
from polyad.train.config.run import RunConfig, load_config
from polyad.train.errors import ConfigError
from polyad.train.experts.probing import (
    RoutedLayer,
    check_experts,
    choose_layers,
    every_layer,
)
from polyad.train.loop.metrics import LAST, Records, last_loss, read_records
from polyad.train.measures.routes import TracedText
from polyad.train.page import (
    Points,
    axis_labels,
    interval,
    interval_axis,
    line_chart,
    load_matrix,
    number,
    render,
)
from polyad.train.reading import config_from_weights
from polyad.train.report.held_out import (
    ExpertRow,
    Options,
    ReportData,
    expert_rows,
    read_held_out,
    read_trace,
)
from polyad.train.results import json_value
from polyad.train.tasks.language import LanguageModelling
from polyad.train.tasks.registry import TASKS
from polyad.train.tasks.task import Task
from polyad.train.tasks.text import TextTask

MAX_POINTS = 240
"""Maximum number of points of a curve."""
ROWS_SHOWN = 48
"""Number of experts listed; the others are in a fold."""


def render_report(
    content: Mapping[str, Any],
    records: Records,
    task: type[Task[Any]],
    loss_unit: str,
    routed: Sequence[RoutedLayer],
    rows: Sequence[ExpertRow],
    read: ReportData | None,
) -> str:
    """Renders the page as HTML.

    Args:
        content: the values of `--json`.
        records: the run's; empty for weights without a run.
        task: the training task.
        loss_unit: the unit of the training loss; empty: no unit.
        routed: the layers with experts, in the model's order; empty for a dense model.
        rows: the experts.
        read: what was read; None if no data was.
    """
    changes = [row.effect.value for row in rows if row.effect]
    is_knockout = read is not None and read.knockout is not None
    axis = interval_axis([each for change in changes for each in change], of_ratios=not is_knockout)
    loads = _loads(routed, content.get("routing", {}))
    curves = {"training loss": _means(_points(records, "loss"))}
    if not task.higher_is_better and loss_unit == task.loss_unit:
        curves["validation loss"] = _points(records, task.validation_score)
    curves = {name: points for name, points in curves.items() if points}
    return render(
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
        facts=facts(content, task, loss_unit, is_run=bool(records)),
    )


def facts(
    content: Mapping[str, Any], task: type[Task[Any]], loss_unit: str, *, is_run: bool
) -> list[tuple[str, str, str]]:
    """Facts of the run: names, values, and descriptions; see `render_report`."""
    if "parameters" not in content:  # a trace
        return [("Tokens", f"{content['units_read']:,}", "traced")]
    parameters, active = content["parameters"], content["active_parameters"]
    used = "all active for every token"
    if active != parameters:
        used = f"{active:,} active per token"
    size = ("Parameters", f"{parameters:,}", used)
    if not is_run:
        return [size]
    unit, in_unit = task.unit.name, f"{loss_unit}, " if loss_unit else ""
    units, score = content[f"{unit}s"], content[task.validation_score]
    return [
        ("Steps", f"{content['step']:,}", f"of {content['total_steps']:,}"),
        (f"{unit.title()}s", f"{units:,}" if units else "unknown", "seen in training"),
        size,
        ("Training loss", _or_none(content["loss"]), f"{in_unit}last {LAST} steps"),
        (
            task.validation_score.replace("_", " ").capitalize(),
            _or_none(math.nan if score is None else score),
            "latest",
        ),
    ]


def _or_none(value: float) -> str:
    return "not yet" if math.isnan(value) else number(value, 5)


def _points(records: Records, key: str) -> Points:
    """The values of a key by step."""
    return [(each["step"], each[key]) for each in records if each.get(key) is not None]


def _routing(newest: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The newest routing statistics by layer and measure; see `polyad.train.loop.step.measures`."""
    routing: dict[str, dict[str, Any]] = {}
    for key, value in newest.items():
        section, _, name = key.partition("/")
        layer, _, measure = name.rpartition("/")
        if section == "routing" and layer:
            routing.setdefault(layer, {})[measure] = value
    return routing


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
        for level, own in enumerate(layer.columns if len(values) == layer.num_experts else ()):
            name = layer.title + (f".{level}" if len(layer.levels) > 1 else "")
            loads[name] = [layer.levels[level] * value for value in values[own]]
    return loads


OUTPUT_FILE = "report.html"


def report(
    path: Path, *, output: Path | None = None, tokenizer: str | None = None, **options: Any
) -> dict[str, Any]:
    """Writes the page.

    Args:
        path: a run, read with its best checkpoint if it keeps it, else with its newest; one of its
            checkpoints; a folder of weights, which needs `data`; or the Parquet file of a trace.
        output: the file; None: `report.html` in the folder of the run, or of the weights; beside a
            trace its name with `.html`.
        tokenizer: the tokenizer of a trace; None: the one that it names.
        options: fields of `Options`.

    Returns:
        The result as JSON values, with `output`.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong.
    """

    def write(target: Path, content: dict[str, Any], text: str) -> dict[str, Any]:
        with writing(target):
            write_whole(target, text)
        return {"output": str(target), **content}

    if path.suffix == ".parquet":
        of_trace = report_of_trace(path, tokenizer, Options(**options))
        return write(output or path.with_suffix(".html"), *of_trace)
    run = path.absolute().parents[1] if STEP_FOLDER.fullmatch(path.name) else path
    if not (is_weights_folder(run) or (run / "config.yaml").is_file()):
        wrong = "is not the folder of a run" if run.exists() else "there is no such folder"
        raise ConfigError(f"{run}: {wrong}: it has no config.yaml")
    keeps_best = (path / "checkpoints" / BEST_FILE).is_file()
    return read_newest(
        path,
        lambda chosen: write(
            output or run / OUTPUT_FILE, *read_report(run, chosen, Options(**options))
        ),
        best_checkpoint if keeps_best else newest_of,
    )


def report_of_trace(
    path: Path, tokenizer: str | None, options: Options
) -> tuple[dict[str, Any], str]:
    """Returns the content of a page about a trace, without its model, as JSON values, and the page.

    Raises:
        ConfigError: it is no trace of sparse experts; or an option needs the model.
    """
    for option, value in (("--knockout", options.knockout), ("--data", options.data)):
        if value:
            raise ConfigError(f"{option}: is not allowed with a trace, which has no model")
    text = TracedText(path, tokenizer)
    layers = choose_layers(text.layers, options.layers)
    check_experts(layers, options.experts)
    read = read_trace(text, layers, options)
    rows = expert_rows(layers, read)
    content = {
        "run": path.name,
        "model": str(text.about.get("checkpoint") or text.about.get("routes") or ""),
        "checkpoint": str(path),
        "checkpoint_is_best": False,
        "units_read": read.units,
        "specialization": read.specialization,
        "experts": rows,
    }
    page = render_report(content, [], LanguageModelling, "", text.layers, rows, read)
    return json_value(content), page


def read_report(run: Path, checkpoint: Path, options: Options) -> tuple[dict[str, Any], str]:
    """Returns the content of a page for the chosen checkpoint as JSON values, without the curves
    (which metrics.jsonl has), and the page.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong.
    """
    is_run = not is_weights_folder(run)
    weights = open_checkpoint(checkpoint) if is_run else open_weights(checkpoint)
    config = load_config(run / "config.yaml") if is_run else config_from_weights(weights)
    model, task = build_model(weights.model_config()), TASKS[config.data.kind]
    routed = every_layer(model)
    layers = choose_layers(routed, options.layers)
    check_experts(layers, options.experts)
    if options.knockout and not issubclass(task, TextTask):
        raise ConfigError(f"--knockout: is not allowed with data.kind: {config.data.kind}")
    reads = bool(layers) and options.tokens != 0
    if not reads and (options.knockout or options.data):
        option = "--knockout" if options.knockout else f"--data {options.data}"
        raise ConfigError(f"{option}: is not allowed where no data is read for experts")
    records = read_records(run) if is_run else []
    newest = {key: each for record in records for key, each in record.items() if each is not None}
    read = read_held_out(weights, layers, options) if reads else None
    rows = [] if read is None else expert_rows(layers, read)
    parameters = count_parameters(model)
    units, score = f"{task.unit.name}s", task.validation_score
    is_best = (run / "checkpoints" / BEST_FILE).is_file() and best_checkpoint(run) == checkpoint
    content = {
        "run": run.resolve().name if run.name in ("", ".", "..") else str(run),
        "model": _in_words(config),
        "parameters": parameters,
        "active_parameters": parameters - unused_parameters(model),
        "checkpoint": str(weights.folder),
        "checkpoint_step": weights.training_step if isinstance(weights, Checkpoint) else 0,
        "checkpoint_is_best": is_best,
        "step": newest.get("step", 0),
        "total_steps": config.train.steps,
        units: newest.get(units),
        "loss": last_loss(records),
        score: newest.get(score),
        "routing": _routing(newest),
        "data": read and read.data,
        "split": read and read.split,
        "units_read": read and read.units,
        "units_in_split": read and read.of_units,
        "specialization": read and read.specialization,
        "knockout": read and read.knockout,
        "maps": read and read.images and read.images.maps,
        "experts": rows,
    }
    blocks = config.distill.blocks
    loss_unit = f"distill.blocks: {blocks}" if blocks else task.loss_unit
    page = render_report(content, records, task, loss_unit, routed, rows, read)
    return json_value(content), page


def _in_words(config: RunConfig) -> str:
    head = getattr(config.model, "head", None)
    sections = {**config.model.feed_forwards(), **({"model.head": head} if head else {})}
    kinds = [f"{key.removeprefix('model.')}: {each.kind}" for key, each in sections.items()]
    return "; ".join([config.model.in_words(), *kinds])
