"""`polyad report`: an HTML page about a run's training and its experts."""

from pathlib import Path
from typing import Any

from polyad.data.files import write_whole, writing
from polyad.model.build import build_model, count_parameters
from polyad.parallel.checkpoint.load import Checkpoint, best_checkpoint, newest_of, read_newest
from polyad.parallel.checkpoint.manage import BEST_FILE, STEP_FOLDER
from polyad.parallel.weights import is_weights_folder, open_checkpoint, open_weights
from polyad.train.config.adaptation import unused_parameters
from polyad.train.config.run import RunConfig, load_config
from polyad.train.errors import ConfigError
from polyad.train.experts.probing import check_experts, choose_layers, routed_head, routed_layers
from polyad.train.measures.routes import TracedText
from polyad.train.reading import config_from_weights
from polyad.train.report.experts import expert_rows
from polyad.train.report.held_out import Options, read_held_out, read_trace
from polyad.train.report.page import Training, read_training, render_report
from polyad.train.results import json_value
from polyad.train.tasks.language import LanguageModelling
from polyad.train.tasks.registry import TASKS
from polyad.train.tasks.text import TextTask

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
    if path.suffix == ".parquet":
        target = path.with_suffix(".html") if output is None else output
        content, text = report_of_trace(path, tokenizer, Options(**options))
        with writing(target):
            write_whole(target, text)
        return {"output": str(target), **content}
    run = path.absolute().parents[1] if STEP_FOLDER.fullmatch(path.name) else path
    if not (is_weights_folder(run) or (run / "config.yaml").is_file()):
        wrong = "is not the folder of a run" if run.exists() else "there is no such folder"
        raise ConfigError(f"{run}: {wrong}: it has no config.yaml")
    target = run / OUTPUT_FILE if output is None else output

    def written(chosen: Path) -> dict[str, Any]:
        content, text = read_report(run, chosen, Options(**options))
        with writing(target):
            write_whole(target, text)
        return {"output": str(target), **content}

    keeps_best = (path / "checkpoints" / BEST_FILE).is_file()
    return read_newest(path, written, best_checkpoint if keeps_best else newest_of)


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
    page = render_report(content, Training(), LanguageModelling, "", text.layers, rows, read)
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
    head = routed_head(model)
    routed = routed_layers(model) + ([] if head is None else [head])
    layers = choose_layers(routed, options.layers)
    check_experts(layers, options.experts)
    if options.knockout and not issubclass(task, TextTask):
        raise ConfigError(f"--knockout: is not allowed with data.kind: {config.data.kind}")
    reads = bool(layers) and options.tokens != 0
    if not reads and (options.knockout or options.data):
        option = "--knockout" if options.knockout else f"--data {options.data}"
        raise ConfigError(f"{option}: is not allowed where no data is read for experts")
    training = read_training(run, task.validation_score) if is_run else Training()
    read = read_held_out(weights, layers, options) if reads else None
    rows = [] if read is None else expert_rows(layers, read)
    parameters, newest = count_parameters(model), training.newest
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
        "loss": training.final_loss,
        score: newest.get(score),
        "routing": training.routing(),
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
    page = render_report(content, training, task, loss_unit, routed, rows, read)
    return json_value(content), page


def _in_words(config: RunConfig) -> str:
    head = getattr(config.model, "head", None)
    sections = {**config.model.feed_forwards(), **({"model.head": head} if head else {})}
    kinds = [f"{key.removeprefix('model.')}: {each.kind}" for key, each in sections.items()]
    return "; ".join([config.model.in_words(), *kinds])
