"""The teacher of a run, checked before anything is built, and loaded once per process.

A teacher for `distill.blocks` also provides all other weights of the run.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from polyad.data.images.config import ImageDataConfig
from polyad.model.build import build_model
from polyad.model.decoder import DecoderSettings
from polyad.model.feedforward import FeedForward
from polyad.model.settings import ModelSettings
from polyad.model.vision import ImageSettings
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.checkpoint.manage import complete_checkpoints
from polyad.parallel.families import FamilyWeights
from polyad.parallel.weights import Weights, check_fits, fill, load_model, open_weights
from polyad.parallel.zero import Engine, Precision
from polyad.train.config.run import RunConfig, parse_config
from polyad.train.config.text import flatten
from polyad.train.errors import ConfigError
from polyad.train.tasks.distillation import BlockTeacher, Learner, Teacher
from polyad.train.tasks.images import ImageClassification
from polyad.train.tasks.language import LanguageModelling
from polyad.train.tasks.sequences import SequenceTask
from polyad.train.tasks.task import Task
from polyad.train.tasks.vocabulary import class_names_of, differing

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
    if not isinstance(task, Learner):
        raise ConfigError(
            f"{key} is not allowed with data.kind: {config.data.kind}; allowed: images, sequences, "
            "text"
        )
    weights = open_teacher(Path(config.distill.teacher))
    if isinstance(task, LanguageModelling):
        _check_text(config, task, weights)
    elif not isinstance(weights, Checkpoint):
        raise ConfigError(
            f"{key} is a folder of weights, which does not record what it was trained on; convert "
            f"it to a checkpoint with `polyad convert {weights.folder} DESTINATION --to polyad`"
        )
    elif isinstance(task, ImageClassification):
        _check_images(config, task, weights, _config_of(weights))
    elif isinstance(task, SequenceTask):
        _check_sequences(config, task, weights, _config_of(weights))
    step = weights.training_step if isinstance(weights, Checkpoint) else 0
    return TeacherAt(weights.folder, step)


def _config_of(checkpoint: Checkpoint) -> RunConfig:
    return parse_config(checkpoint.config_yaml, origin=str(checkpoint.folder))


def _check_images(
    config: RunConfig, task: ImageClassification, checkpoint: Checkpoint, theirs: RunConfig
) -> None:
    key, data = f"distill.teacher: {config.distill.teacher}", task.settings
    if data.loss != "softmax":
        raise ConfigError(
            f"{key} is not allowed with data.loss: {data.loss} (data.kind: {data.kind}): it "
            "teaches probabilities that sum to 1; allowed: softmax"
        )
    if not isinstance(theirs.model, ImageSettings) or not isinstance(theirs.data, ImageDataConfig):
        raise ConfigError(f"{key} has {_kinds(theirs)}; a model of images with classes is needed")
    task.check_classes(checkpoint, "distill.teacher")
    _check_same(
        key,
        "both read the same images",
        ("model.image_size", theirs.model.image_size, task.model.image_size),
        ("model.num_classes", theirs.model.num_classes, task.model.num_classes),
        ("data.normalization", theirs.data.normalization, data.normalization),
        ("data.loss", theirs.data.loss, data.loss),
    )


def _check_sequences(
    config: RunConfig, task: SequenceTask, checkpoint: Checkpoint, theirs: RunConfig
) -> None:
    key, model = f"distill.teacher: {config.distill.teacher}", theirs.model
    if task.schema.task == "regression":
        raise ConfigError(
            f"{key} is not allowed with {task.place}, whose labels are numbers: distillation needs "
            "probabilities of classes or choices"
        )
    if theirs.data.kind != config.data.kind or not isinstance(model, type(task.model)):
        raise ConfigError(
            f"{key} has {_kinds(theirs)}; it has to be {_kinds(config)}, to read the same tokens"
        )
    task.check_weights(checkpoint, "distill.teacher")
    theirs_named, ours_named = class_names_of(checkpoint.folder) or [], list(task.data.class_names)
    if theirs_named != ours_named:
        differences = differing(ours_named, theirs_named, "distill.teacher")
        raise ConfigError(f"{task.place} has {differences}")
    its, ours = (getattr(each.head, "num_classes", None) for each in (model, task.model))
    why = "both give each sample as many numbers"
    _check_same(key, why, ("model.head.num_classes", its, ours))
    _check_length(key, model, task.data.max_length, "data.max_length")


def _check_text(config: RunConfig, task: LanguageModelling, weights: Weights) -> None:
    key, model = f"distill.teacher: {config.distill.teacher}", weights.model_config()
    if config.distill.blocks is None and config.parallel.tensor_parallel_size > 1:
        raise ConfigError(
            f"{key} is not allowed with parallel.tensor_parallel_size: "
            f"{config.parallel.tensor_parallel_size}, which cuts the vocabulary that it teaches; "
            "allowed: 1"
        )
    data = _config_of(weights).data.kind if isinstance(weights, Checkpoint) else config.data.kind
    if not isinstance(model, DecoderSettings) or model.head or data != config.data.kind:
        raise ConfigError(
            f"{key} has model.kind: {model.kind} and data.kind: {data}; a model that predicts the "
            f"next token is needed: {_kinds(config)}"
        )
    task.check_weights(weights, "distill.teacher")
    if config.distill.blocks is not None:
        check_original(key, weights, task.model)
        return
    _check_same(
        key,
        "both score the same tokens",
        ("model.vocab_size", model.vocab_size, task.model.vocab_size),
    )
    _check_length(key, model, task.model.sequence_length, "model.sequence_length")


def check_original(key: str, weights: Weights, ours: DecoderSettings) -> None:
    """Checks that a model equals another one except for its replaced feed-forwards.

    Args:
        key: name of the other model in errors.
        weights: the other model's weights.
        ours: the model with replaced blocks.

    Raises:
        ConfigError: it does not.
    """
    theirs = weights.model_config()
    if not isinstance(theirs, DecoderSettings):
        raise ConfigError(f"{key} has model.kind: {theirs.kind}, not {ours.kind}")
    if theirs.replaced is not None:
        raise ConfigError(
            f"{key} has model.replaced: blocks {theirs.replaced_blocks()} no longer have their own "
            "feed-forward; distill.blocks needs a teacher without model.replaced"
        )
    of_replaced = [theirs.block_feed_forwards()[block] for block in ours.replaced_blocks()]
    if any(getattr(each, "graph", "none") == "attention" for each in of_replaced):
        raise ConfigError(
            f"{key} has model.feed_forward.graph: attention, which reads more than the input of "
            "the feed-forward; distill.blocks is not allowed with it"
        )
    try:
        check_fits(weights, ours.original())
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None
    if isinstance(weights, FamilyWeights):  # these compare all keys themselves
        return
    its, own = (
        flatten({"model": each.filled().model_dump(mode="json")})
        for each in (theirs, ours.original())
    )
    _check_same(
        key,
        "distill.blocks changes its feed-forwards alone",
        *((name, its.get(name), own[name]) for name in own if name not in TRAINING_ALONE),
    )


def _kinds(config: RunConfig) -> str:
    return f"model.kind: {config.model.kind} and data.kind: {config.data.kind}"


def _check_same(key: str, why: str, *values: tuple[str, Any, Any]) -> None:
    """Checks keys for which both teacher and student have a value."""
    for name, its, ours in values:
        if its != ours:
            raise ConfigError(f"{key} has {name}: {its}, not {ours}: {why}")


def _check_length(key: str, model: ModelSettings, length: int, name: str) -> None:
    """Checks that a teacher can read samples of this many tokens."""
    its = getattr(model, "sequence_length", 0)
    if its < length:
        raise ConfigError(
            f"{key} has model.sequence_length: {its}, less than {name}: {length}, but it has to "
            "read the same text as the student"
        )


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
    for folder in complete_checkpoints(teacher.folder.parent):
        if folder.name == f"step-{step:08d}":
            return TeacherAt(folder, step or 0)
    raise ConfigError(
        f"{key} is at step {teacher.step:,}, but its checkpoint of step {step:,}, from which this "
        "run started, no longer exists; choose another run.folder to start over"
    )


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
    assert isinstance(task, Learner)
    loaded = _loaded(open_teacher(teacher.folder), config, engine.device)
    if isinstance(loaded, BlockTeacher):
        assert isinstance(task, LanguageModelling)
        loaded.teach(engine.module)
        task.block_teacher = loaded
    else:
        task.teacher = loaded


def teacher_here(config: RunConfig, device: torch.device) -> Teacher | BlockTeacher | None:
    """Loads the teacher with its newest weights; None: there is none.

    Raises:
        ConfigError: There is no such checkpoint.
    """
    if config.distill.teacher is None:
        return None
    return _loaded(open_teacher(Path(config.distill.teacher)), config, device)


def _loaded(weights: Weights, config: RunConfig, device: torch.device) -> Teacher | BlockTeacher:
    if config.distill.blocks is not None:
        assert isinstance(config.model, DecoderSettings)
        layers = original_feed_forwards(
            weights, config.model.replaced_blocks(), device, config.train.precision
        )
        return BlockTeacher(layers, config.distill.blocks)
    model = load_model(weights, device, config.train.precision)
    return Teacher(model.requires_grad_(False), config.distill)


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
    try:
        return open_weights(path)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None
