"""`polyad report`: an HTML page about a run's training and its experts."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from polyad.data.files import write_whole
from polyad.data.images.config import ImageDataConfig
from polyad.data.sequences.config import SequenceDataConfig
from polyad.data.text.manifest import SplitName
from polyad.model.build import build_model, count_parameters
from polyad.model.emoe.config import EmergentMoEConfig
from polyad.model.mumoe.config import MuMoEConfig
from polyad.model.mumoe.head import MuMoEHeadConfig
from polyad.model.mxd.config import SparseTableConfig
from polyad.model.smoe.config import SelectingConfig, SparseMoEConfig
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
from polyad.train.console import Progress
from polyad.train.errors import ConfigError, RunError
from polyad.train.experts.probing import check_experts, choose_layers, routed_head, routed_layers
from polyad.train.reading import config_of
from polyad.train.records import METRICS_FILE
from polyad.train.report.content import HeldOut, Report
from polyad.train.report.history import History, no_history, read_history
from polyad.train.report.lines import expert_lines
from polyad.train.report.page import render_report
from polyad.train.report.passes import Asked, read_held_out
from polyad.train.report.top_images import MOST_IMAGES
from polyad.train.results import json_value
from polyad.train.tasks.registry import task_class

TOKENS = 250_000
"""Default for the approximate number of tokens to read."""
OUTPUT_FILE = "report.html"
LONG_FILE = 20_000_000
"""Size of metrics.jsonl in bytes above which reading it takes seconds."""


def report(
    run: Path,
    *,
    output: Path | None = None,
    checkpoint: int | None = None,
    best: bool = False,
    data: str | None = None,
    split: SplitName = "validation",
    layers: Sequence[str] = (),
    experts: Sequence[str] = (),
    top: int = 8,
    tokens: int | None = None,
    knockout: bool = False,
    stream: Path | None = None,
) -> dict[str, Any]:
    """Writes the page.

    Args:
        run: a run's folder, or a folder of weights, which needs `data`.
        output: the file; None: `report.html` in that folder.
        checkpoint: step of the checkpoint that reads the data; None: the best one if the run keeps
            it, else the newest.
        best: whether it must be the best one.
        data: prepared data, or labelled sequences; None: the run's.
        split: `validation`, `test` or `train`.
        layers: blocks whose experts are shown, by number; empty: first, middle and last.
        experts: experts to show in each of these; empty: see `choose_experts`.
        top: number of tokens or images per expert, and of samples with the largest loss.
        tokens: approximate number to read, spread evenly over the split (at most 20,000 images); 0
            reads nothing; None: `TOKENS` for text, all for sequences.
        knockout: whether to also measure text without each shown expert.
        stream: see `polyad.train.reading.open_evaluated`.

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
        found = read_report(
            run,
            chosen,
            data=data,
            split=split,
            layers=layers,
            experts=experts,
            top=top,
            tokens=tokens,
            knockout=knockout,
            stream=stream,
        )
        page = render_report(found)
        with _writing(target, RunError):
            write_whole(target, page)
        lines = json_value(expert_lines(found))
        return {"output": str(target), **json_value(found), "experts": lines}

    def choose(run: Path) -> Path:
        return run if is_weights_folder(run) else _checkpoint(run, checkpoint, best=best)

    return read_newest(run, written, choose)


def read_report(
    run: Path,
    checkpoint: Path,
    *,
    data: str | None = None,
    split: SplitName = "validation",
    layers: Sequence[str] = (),
    experts: Sequence[str] = (),
    top: int = 8,
    tokens: int | None = None,
    knockout: bool = False,
    stream: Path | None = None,
) -> Report:
    """Returns the content of a page for the chosen checkpoint; for options see `report`.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong.
    """
    is_run = not is_weights_folder(run)
    weights = open_checkpoint(checkpoint) if is_run else open_weights(checkpoint)
    config = _run_config(run) if is_run else config_of(weights)
    history = _history(run) if is_run else no_history()
    model = build_model(weights.model_config())
    head = routed_head(model)
    routed = routed_layers(model) + ([] if head is None else [head])
    chosen = choose_layers(routed, layers)
    check_experts(chosen, experts)
    if knockout and not (chosen and config.data.kind == "text"):
        lacking = f"has data.kind: {config.data.kind}; text has it" if chosen else "has no experts"
        raise ConfigError(f"--knockout: is not allowed: {run} {lacking}")
    if knockout and tokens == 0:
        raise ConfigError("--knockout: is not allowed with --tokens 0, which reads nothing")
    if stream is not None and tokens == 0:
        raise ConfigError("--stream: is not allowed with --tokens 0, which reads nothing")
    what = _what_is_read(config, has_experts=bool(chosen))
    if what is None:
        other_split = None if split == "validation" else split
        asked = {"--data": data, "--split": other_split, "--experts": " ".join(experts)}
        asked["--stream"] = None if stream is None else str(stream)
        _check_unread(run, config, asked)
    held_out = HeldOut()
    if what is not None and tokens != 0:
        # Labelled sequences are read completely, text and images are not.
        default, most = {"text": (TOKENS, None), "images": (MOST_IMAGES, MOST_IMAGES)}.get(
            what, (None, None)
        )
        limit = tokens or default
        asked_for = Asked(
            layers=chosen,
            every_layer=chosen if layers else routed,
            experts=tuple(dict.fromkeys(experts)),
            top=top,
            data=data,
            split=split,
            limit=limit if most is None or limit is None else min(limit, most),
            knockout=knockout,
            stream=stream,
        )
        held_out = read_held_out(weights, what, asked_for)
    parameters = count_parameters(model)
    task, taught = task_class(config.data.kind), config.distill.blocks
    return Report(
        run=run.resolve().name if run.name in ("", ".", "..") else str(run),
        kind=_in_words(config),
        is_sparse=isinstance(config.model.known_feed_forward(), SelectingConfig),
        parameters=parameters,
        active_parameters=parameters - unused_parameters(model),
        checkpoint=str(weights.folder),
        checkpoint_step=weights.training_step if isinstance(weights, Checkpoint) else 0,
        is_best=_best(run) == weights.folder,
        total_steps=config.train.steps,
        most_validated=config.evaluation.max_windows,
        history=history,
        task=task,
        loss_unit=f"distill.blocks: {taught}" if taught else task.loss_unit,
        routed=routed,
        read=held_out,
    )


def _what_is_read(
    config: RunConfig, *, has_experts: bool
) -> Literal["sequences", "images", "text"] | None:
    """The kind of held-out data that a page covers; None: the page uses only `metrics.jsonl`."""
    if isinstance(config.data, SequenceDataConfig):
        return "sequences"
    if isinstance(config.data, ImageDataConfig):
        return "images" if has_experts or config.data.kind == "images" else None
    return "text" if has_experts and config.data.kind == "text" else None


def _check_unread(run: Path, config: RunConfig, asked: Mapping[str, object]) -> None:
    """Rejects options for reading data if none is read."""
    masked = config.data.kind == "masked_text"
    why = f"has data.kind: {config.data.kind}" if masked else "has no experts"
    for option, value in asked.items():
        if value:
            raise ConfigError(
                f"{option}: {value} is not allowed: {run} {why}, so its report reads no data"
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


def _history(run: Path) -> History:
    path = run / METRICS_FILE
    size = path.stat().st_size if path.is_file() else 0
    if size < LONG_FILE:
        return read_history(run)
    return read_history(run, progress=Progress(f"read {METRICS_FILE}", size / 1e6, "MB"))


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
