"""`polyad report`: an HTML page about a run's training and its experts."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from polyad.data.files import write_whole
from polyad.model.build import build_model, count_parameters
from polyad.model.emoe.config import EmergentMoEConfig
from polyad.model.mumoe.config import MuMoEConfig
from polyad.model.mumoe.head import MuMoEHeadConfig
from polyad.model.mxd.config import SparseTableConfig
from polyad.model.smoe.config import SparseMoEConfig
from polyad.model.vision import ImageModelSettings
from polyad.parallel.checkpoint.format import CheckpointError
from polyad.parallel.checkpoint.load import (
    Checkpoint,
    best_checkpoint,
    find_checkpoint,
    read_newest,
)
from polyad.parallel.checkpoint.manage import BEST_FILE, STEP_FOLDER, complete_checkpoints
from polyad.parallel.weights import is_weights_folder, open_checkpoint, open_weights
from polyad.train.config.adaptation import unused_parameters
from polyad.train.config.run import RunConfig, load_config
from polyad.train.errors import ConfigError, RunError
from polyad.train.experts.probing import check_experts, choose_layers, routed_head, routed_layers
from polyad.train.reading import config_of
from polyad.train.report.held_out import Options, read_held_out
from polyad.train.report.page import Report, Training, read_training, render_report
from polyad.train.results import json_value
from polyad.train.tasks.registry import task_class
from polyad.train.tasks.text import TextTask

OUTPUT_FILE = "report.html"


def report(
    run: Path,
    *,
    output: Path | None = None,
    checkpoint: int | None = None,
    best: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Writes the page.

    Args:
        run: a run's folder, or a folder of weights, which needs `data`.
        output: the file; None: `report.html` in that folder.
        checkpoint: step of the checkpoint that reads the data; None: the best one if the run keeps
            it, else the newest.
        best: whether it must be the best one.
        options: fields of `Options`.

    Returns:
        The result as JSON values, with `output`.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong.
    """
    if not is_weights_folder(run):
        _run_config(run)
    elif checkpoint is not None or best:
        option = "--best" if best else f"--checkpoint {checkpoint}"
        raise ConfigError(f"{option}: is not allowed with {run}, a folder of weights")
    target = run / OUTPUT_FILE if output is None else output

    def written(chosen: Path) -> dict[str, Any]:
        _check_output(target)
        content = read_report(run, chosen, Options(**options))
        text = render_report(content)
        with _writing(target, RunError):
            write_whole(target, text)
        return {"output": str(target), **json_value(content)}

    def choose(run: Path) -> Path:
        return run if is_weights_folder(run) else _checkpoint(run, checkpoint, best=best)

    return read_newest(run, written, choose)


def read_report(run: Path, checkpoint: Path, options: Options) -> Report:
    """Returns the content of a page for the chosen checkpoint; with `Options`.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong.
    """
    is_run = not is_weights_folder(run)
    weights = open_checkpoint(checkpoint) if is_run else open_weights(checkpoint)
    config = _run_config(run) if is_run else config_of(weights)
    model = build_model(weights.model_config())
    head = routed_head(model)
    routed = routed_layers(model) + ([] if head is None else [head])
    layers = choose_layers(routed, options.layers)
    check_experts(layers, options.experts)
    task, blocks = task_class(config.data.kind), config.distill.blocks
    if options.knockout and not (layers and issubclass(task, TextTask)):
        lacking = f"has data.kind: {config.data.kind}" if layers else "has no experts"
        raise ConfigError(f"--knockout: is not allowed: {run} {lacking}")
    for option, value in (
        ("--knockout", options.knockout),
        ("--data", options.data),
    ):
        if value and (options.tokens == 0 or not layers):
            why = "--tokens 0, which reads nothing" if layers else f"{run}, which has no experts"
            raise ConfigError(f"{option}: is not allowed with {why}")
    training = read_training(run, task.validation_score) if is_run else Training()
    read = None
    if layers and options.tokens != 0:
        read = read_held_out(weights, layers, options)
    parameters = count_parameters(model)
    return Report(
        run=run.resolve().name if run.name in ("", ".", "..") else str(run),
        kind=_in_words(config),
        parameters=parameters,
        active_parameters=parameters - unused_parameters(model),
        checkpoint=str(weights.folder),
        checkpoint_step=weights.training_step if isinstance(weights, Checkpoint) else 0,
        is_best=_best(run) == weights.folder,
        total_steps=config.train.steps,
        most_validated=config.evaluation.max_windows,
        training=training,
        task=task,
        loss_unit=f"distill.blocks: {blocks}" if blocks else task.loss_unit,
        routed=routed,
        layers=layers,
        read=read,
    )


def _run_config(run: Path) -> RunConfig:
    if not run.exists():
        raise ConfigError(f"{run}: there is no such folder; give the folder of a run")
    if STEP_FOLDER.fullmatch(run.name) and (run / "index.json").exists():
        step = int(run.name.removeprefix("step-"))
        raise ConfigError(
            f"{run}: is a checkpoint; give the run's folder, with --checkpoint {step}"
        )
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{run}: is not the folder of a run: it has no config.yaml")
    return load_config(run / "config.yaml")


def _best(run: Path) -> Path | None:
    """The best checkpoint of a run that marks one, if it still exists."""
    try:
        return best_checkpoint(run) if (run / "checkpoints" / BEST_FILE).is_file() else None
    except CheckpointError:
        return None


def _checkpoint(run: Path, step: int | None, *, best: bool) -> Path:
    if best and step is not None:
        raise ConfigError(f"--best: is not allowed with --checkpoint {step}")
    if best:
        return best_checkpoint(run)
    if step is None:
        return _best(run) or find_checkpoint(run)
    found = {
        int(folder.name.removeprefix("step-")): folder
        for folder in complete_checkpoints(run / "checkpoints")
    }
    if step not in found:
        there = ", ".join(str(number) for number in found) or "none"
        raise ConfigError(f"--checkpoint: {step} is not allowed: {run} has {there}")
    return found[step]


def _check_output(target: Path) -> None:
    if target.is_dir():
        raise ConfigError(f"--output: {target} is a folder, but a file is needed")
    if not target.parent.is_dir():
        raise ConfigError(f"--output: {target}: there is no folder {target.parent}")
    with _writing(
        target, ConfigError
    ):  # test now: reading may take long, and permissions are not everything
        tempfile.TemporaryFile(dir=target.parent).close()


@contextmanager
def _writing(target: Path, kind: type[Exception]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise kind(
            f"--output: {target} cannot be written: {error.strerror}; choose another place with "
            "--output"
        ) from None


def _in_words(config: RunConfig) -> str:
    model, feed_forward = config.model, config.model.known_feed_forward()
    words = model.in_words() + _head_in_words(config)
    if isinstance(feed_forward, SparseMoEConfig):
        experts = (
            f"{feed_forward.num_experts} sparse experts, {feed_forward.top_k} active per token"
        )
        graph = "no graph" if feed_forward.graph == "none" else f"{feed_forward.graph} graph"
        return f"{words}; {experts}, {feed_forward.score} score, {graph}"
    if isinstance(feed_forward, EmergentMoEConfig):
        return (
            f"{words}; {feed_forward.num_experts} experts split from dense feed-forwards, "
            f"{feed_forward.used_experts()} active per token, {feed_forward.score} score"
        )
    if isinstance(feed_forward, MuMoEConfig):
        return f"{words}; muMoE: {_factorized(feed_forward)}"
    if isinstance(feed_forward, SparseTableConfig):
        levels = " x ".join(f"{number:,}" for number in feed_forward.num_experts)
        name = "mixture of decoders" if feed_forward.kind == "mxd" else "transcoder"
        return f"{words}; {name}: {levels} experts, at most {feed_forward.top_k} active per token"
    return f"{words}; dense"


def _head_in_words(config: RunConfig) -> str:
    model = config.model
    head = model.known_head() if isinstance(model, ImageModelSettings) else None
    return f", head: muMoE of {_factorized(head)}" if isinstance(head, MuMoEHeadConfig) else ""


def _factorized(config: MuMoEConfig | MuMoEHeadConfig) -> str:
    levels = " x ".join(f"{number:,}" for number in config.num_experts)
    return f"{levels} experts, {config.factorization} of rank {config.rank}, {config.gate} gate"


def report_line(result: dict[str, Any]) -> str:
    """The line with the location of the page."""
    return f"report  {result['output']}"
