"""The teacher of a run: checked before anything is built, and loaded once in each process."""

from pathlib import Path
from typing import Any

import torch

from data.images.config import ImageDataConfig
from model.vision import ImageSettings
from parallel.checkpoint.checkpoint import Checkpoint
from parallel.weights import load_model, open_checkpoint
from train.config.run import RunConfig, parse_config
from train.errors import ConfigError
from train.tasks.distillation import Teacher
from train.tasks.images import ImageClassification
from train.tasks.task import Task


def check_teacher(config: RunConfig, task: Task[Any]) -> None:
    """Checks that a teacher reads what the student reads, and knows the same classes.

    Args:
        config: of the run.
        task: its task.

    Raises:
        ValueError: with an `exit_status` of 2: there is no such checkpoint, or it does not fit.
    """
    if config.distill.teacher is None:
        return
    key, data = f"distill.teacher: {config.distill.teacher}", config.data
    if not isinstance(task, ImageClassification) or not isinstance(data, ImageDataConfig):
        raise ConfigError(f"{key} is not allowed with data.kind: {data.kind}; images is")
    if data.loss != "softmax":
        raise ConfigError(
            f"{key} is not allowed with data.loss: {data.loss} (data.kind: {data.kind}): it "
            f"teaches probabilities that sum to 1; softmax is"
        )
    checkpoint = _open(config)
    theirs = parse_config(checkpoint.config_yaml, origin=str(checkpoint.folder))
    if not isinstance(theirs.model, ImageSettings) or not isinstance(theirs.data, ImageDataConfig):
        raise ConfigError(
            f"{key} has model.kind: {theirs.model.kind} and data.kind: {theirs.data.kind}; a model "
            f"of images with classes is needed"
        )
    task.check_classes(checkpoint, "distill.teacher")
    for name, its, ours in (
        ("model.image_size", theirs.model.image_size, task.model.image_size),
        ("model.num_classes", theirs.model.num_classes, task.model.num_classes),
        ("data.normalization", theirs.data.normalization, data.normalization),
        ("data.loss", theirs.data.loss, data.loss),
    ):
        if its != ours:
            raise ConfigError(f"{key} has {name}: {its}, not {ours}: both read the same images")


def set_teacher(config: RunConfig, task: Task[Any], device: torch.device) -> None:
    """Loads the teacher, if there is one, and gives it to the task.

    Args:
        config: of the run, checked.
        task: its task.
        device: of the training.
    """
    if config.distill.teacher is None:
        return
    assert isinstance(task, ImageClassification)
    model = load_model(_open(config), device, config.train.precision)
    task.learn_from(Teacher(model.requires_grad_(False), config.distill))


def _open(config: RunConfig) -> Checkpoint:
    try:
        return open_checkpoint(Path(config.distill.teacher or ""))
    except ValueError as error:
        raise ConfigError(f"distill.teacher: {error}") from None
