"""The teacher of a run, checked before anything is built, and loaded once per process.

A teacher for `distill.blocks` also provides all other weights of the run.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from polyad.data.errors import prefixed
from polyad.model.build import build_model
from polyad.model.config import flatten
from polyad.model.decoder import DecoderSettings
from polyad.model.feedforward import FeedForward
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.checkpoint.manage import complete_checkpoints
from polyad.parallel.families import FamilyWeights
from polyad.parallel.weights import Weights, check_fits, fill, load_model, open_weights
from polyad.parallel.zero import Engine, Precision
from polyad.train.config.run import RunConfig, config_of_checkpoint
from polyad.train.errors import ConfigError
from polyad.train.tasks.distillation import BlockTeacher, Teacher
from polyad.train.tasks.images import ImageClassification
from polyad.train.tasks.labelled import LabelledTask
from polyad.train.tasks.language import LanguageModelling
from polyad.train.tasks.sequences import SequenceTask
from polyad.train.tasks.task import Task

SAME = {
    "text": ("model.vocab_size",),
    "images": (
        "data.kind",
        "model.image_size",
        "model.num_classes",
        "data.normalization",
        "data.loss",
    ),
    "sequences": ("data.kind", "model.kind", "model.head.num_classes"),
}
"""Keys in which teacher and student are equal, by data.kind: what goes in, and what comes out."""
TRAINING_ALONE = ("model.recompute", "model.compile", "model.dropout", "model.initializer_range")
"""Keys of a model that do not affect its outputs once it is trained."""


class TeacherAt(NamedTuple):
    """The teacher's checkpoint: for a run the newest one when the student started."""

    folder: Path
    step: int


def check_teacher(config: RunConfig, task: Task[Any]) -> TeacherAt | None:
    """Checks that a teacher has the student's inputs and the same classes or tokens.

    Returns:
        Its checkpoint; None: there is no teacher.

    Raises:
        ValueError: with an `exit_status` of 2: there is no such checkpoint, or it does not fit.
    """
    if config.distill.teacher is None:
        return None
    key = f"distill.teacher: {config.distill.teacher}"
    weights = open_teacher(Path(config.distill.teacher))
    model, length = weights.model_config(), 0
    theirs: dict[str, Any] = {"model": model.model_dump(mode="json")}
    if isinstance(weights, Checkpoint):
        theirs = config_of_checkpoint(weights).model_dump(mode="json")
    if isinstance(task, LanguageModelling):
        length = task.model.sequence_length
        if not isinstance(model, DecoderSettings) or model.head:
            raise ConfigError(f"{key} has model.kind: {model.kind}, and predicts no next token")
    elif "data" not in theirs:
        raise ConfigError(f"{key} is a folder of weights without data; a checkpoint is needed")
    if isinstance(task, ImageClassification):
        task.check_classes(weights, "distill.teacher")
    else:
        task.check_weights(weights, "distill.teacher")
    _check_same(key, config.model_dump(mode="json"), theirs, SAME[config.data.kind])
    if isinstance(task, SequenceTask):
        length = task.data.max_length
        if task.schema.task == "regression":
            raise ConfigError(f"{key} is not allowed with {task.place}, whose labels are numbers")
        task.check_classes(weights, "distill.teacher")
    if config.distill.blocks is not None:
        assert isinstance(config.model, DecoderSettings)
        check_original(key, weights, config.model)
    elif (limit := getattr(model, "sequence_length", length)) < length:
        raise ConfigError(f"{key} has model.sequence_length: {limit}, less than {length}")
    step = weights.training_step if isinstance(weights, Checkpoint) else 0
    return TeacherAt(weights.folder, step)


def check_original(key: str, weights: Weights, ours: DecoderSettings) -> None:
    """Checks that a model equals another one except for its replaced feed-forwards.

    Args:
        key: name of the other model in errors.
        weights: the other model's weights.
        ours: the model with replaced blocks.

    Raises:
        ConfigError: it does not.
    """
    original = ours.original()
    with prefixed(key, ConfigError):
        check_fits(weights, original)
    if not isinstance(weights, FamilyWeights):  # these compare all keys themselves
        theirs, own = (
            {"model": each.filled().model_dump(mode="json")}
            for each in (weights.model_config(), original)
        )
        names = [name for name in flatten(own) if name not in TRAINING_ALONE]
        _check_same(key, own, theirs, names)


def _check_same(
    key: str, ours: dict[str, Any], theirs: dict[str, Any], names: Iterable[str]
) -> None:
    """Checks keys of a student and its teacher."""
    own, its = flatten(ours), flatten(theirs)
    for name in names:
        if its.get(name) != own.get(name):
            raise ConfigError(f"{key} has {name}: {its.get(name)}, not {own.get(name)}")


def of_step(teacher: TeacherAt, step: int | None, key: str) -> TeacherAt:
    """Returns the teacher's checkpoint from which a run has its other weights.

    Args:
        teacher: the teacher's newest checkpoint.
        step: its step when the run started; None: the run has no checkpoint yet.
        key: name of the teacher in errors.

    Raises:
        ConfigError: that checkpoint does not exist any more.
    """
    if step in (None, teacher.step):
        return teacher
    folder = teacher.folder.with_name(f"step-{step:08d}")
    if folder not in complete_checkpoints(folder.parent):
        raise ConfigError(
            f"{key}: {folder}, from which this run started, no longer exists; choose another "
            "run.folder to start over"
        )
    return TeacherAt(folder, step or 0)


def set_teacher(
    teacher: TeacherAt | None, config: RunConfig, task: Task[Any], engine: Engine
) -> None:
    """Loads the teacher, if there is one, and passes it to the task.

    Args:
        teacher: the same on all processes, since a run in training may have newer checkpoints.
        config: the run's configuration, checked.
        task: its task.
        engine: its engine.
    """
    if teacher is None:
        return
    assert isinstance(task, LanguageModelling | LabelledTask)
    loaded = load_teacher(teacher.folder, config, engine.device)
    if isinstance(loaded, BlockTeacher):
        assert isinstance(task, LanguageModelling)
        loaded.attach_to(engine.module)
    task.teacher = loaded


def load_teacher(folder: Path, config: RunConfig, device: torch.device) -> Teacher | BlockTeacher:
    """Loads a teacher, or for `distill.blocks` only the feed-forwards that teach.

    Args:
        folder: path of a run, a checkpoint or a folder of weights.
        config: the student's configuration.
        device: device for the weights.

    Raises:
        ConfigError: there are no weights.
    """
    weights, precision = open_teacher(folder), config.train.precision
    if config.distill.blocks is None:
        model = load_model(weights, device, precision).requires_grad_(False)
        return Teacher(model, config.distill)
    assert isinstance(config.model, DecoderSettings)
    replaced = config.model.replaced_blocks()
    layers = original_feed_forwards(weights, replaced, device, precision)
    return BlockTeacher(layers, config.distill.blocks)


def original_feed_forwards(
    weights: Weights, blocks: Sequence[int], device: torch.device, precision: Precision
) -> dict[int, FeedForward]:
    """Loads the feed-forwards of some blocks, frozen and in evaluation mode, without other weights.

    Args:
        weights: weights of the whole model.
        blocks: block numbers.
        device: device for the feed-forwards.
        precision: precision of their parameters.
    """
    model = build_model(weights.model_config()).eval().requires_grad_(False)
    names = {block: f"blocks.{block}.feed_forward" for block in blocks}
    fill(model, weights, device, precision, tuple(f"{name}." for name in names.values()))
    layers = {block: model.get_submodule(name) for block, name in names.items()}
    return {block: layer for block, layer in layers.items() if isinstance(layer, FeedForward)}


def open_teacher(path: Path, key: str = "distill.teacher") -> Weights:
    """Opens a teacher's weights.

    Args:
        path: path of a run, a checkpoint or a folder of weights.
        key: name of the teacher in errors.

    Raises:
        ConfigError: there are none.
    """
    with prefixed(key, ConfigError):
        return open_weights(path)
