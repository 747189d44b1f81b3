"""Interfaces of examinations and measures of a checkpoint.

    Examination   checks the user's options, examines weights and data, and returns `Tables`
    Measure       an examination that accumulates over one pass over samples, reading all routers

A new measure is one file with a `Measure`, and one line in `registry.py`: `polyad experts NAME`
reads the registry.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import nn

from polyad.data.text.manifest import SplitName
from polyad.parallel import comm
from polyad.parallel.weights import Choice
from polyad.train.errors import ConfigError
from polyad.train.experts.information import Summed
from polyad.train.experts.interventions import Intervention
from polyad.train.experts.probing import RoutedLayer, routed_head, routed_layers
from polyad.train.reading import Evaluated, Reading, open_evaluated, read
from polyad.train.results import Tables
from polyad.train.tasks.samples import Samples, samples_of


class Subject(NamedTuple):
    """The subject of a measure: a model, its layers and samples."""

    model: nn.Module
    """In evaluation mode, whole on each process."""
    layers: Sequence[RoutedLayer]
    samples: Samples
    batch_size: int


class Examination(ABC):
    """An examination of a checkpoint by one command.

    Attributes:
        name: its name in errors.
        doing: describes the work, for an out-of-memory error.
        reads_split: whether it reads a split of the data.
        needs_whole: why the whole model must be in memory; None: it may be read block by block,
            see `polyad.train.reading.Reading`.
    """

    name: ClassVar[str]
    doing: ClassVar[str] = "measuring experts"
    reads_split: ClassVar[bool] = True
    needs_whole: ClassVar[str | None] = "it takes all of a model at once"

    @classmethod
    @abstractmethod
    def checked(cls, opened: Evaluated, split: str, **options: Any) -> Any:
        """Checks the user's options, before processes connect and weights are loaded.

        Args:
            opened: weights and data.
            split: name of the split.
            options: options of this examination.

        Returns:
            The argument `settings` of `take`.

        Raises:
            ConfigError: the weights, the data or an option are not allowed.
        """

    @classmethod
    @abstractmethod
    def take(
        cls, opened: Evaluated, split: str, settings: Any, model: nn.Module, world: comm.World
    ) -> Tables:
        """Examines the weights; all processes call it.

        Args:
            opened: weights and data.
            split: name of the split.
            settings: the result of `checked`.
            model: the weights' model, in evaluation mode, whole on each process.
            world: this process.

        Returns:
            The same on each process.
        """


class Measure(Examination):
    """A measure that accumulates over a model's pass over held-out samples.

    Attributes:
        label: label of its progress.
        blocks: the blocks whose inputs it needs.
    """

    label: ClassVar[str] = "measure experts"
    blocks: Sequence[int] = ()

    def __init__(self, subject: Subject) -> None:
        self.subject = subject

    @classmethod
    def checked(cls, opened: Evaluated, split: str, **options: Any) -> Any:
        """Returns the options as they are."""
        return options

    @classmethod
    def take(
        cls, opened: Evaluated, split: str, settings: Any, model: nn.Module, world: comm.World
    ) -> Tables:
        """Reads the samples once."""
        taken = cls.of(opened, split, settings, model)
        taken.read(world)
        return taken.result(lambda values: comm.sum_over_samples(values, world))

    @classmethod
    def of(cls, opened: Evaluated, split: str, settings: Any, model: nn.Module) -> Self:
        """Makes the measure of a command, for all layers with experts and all samples; see
        `take`."""
        head = routed_head(model)
        layers = [*routed_layers(model), *([head] if head else [])]
        if not layers:
            raise ConfigError(
                f"{opened.weights.folder}: its model has no experts, in blocks or as its head"
            )
        return cls(Subject(model, layers, samples_of(opened.task, split), opened.batch_size))

    @torch.inference_mode()
    def read(self, world: comm.World | None = None) -> None:
        """Reads its samples in a separate pass for this measure; see
        `polyad.train.reading.read`."""
        model, layers, samples, batch_size = self.subject
        for reading in read(
            *(model, layers, samples),
            batch_size=batch_size,
            world=world,
            label=self.label,
            blocks=self.blocks,
        ):
            self.add(reading)

    @abstractmethod
    def add(self, reading: Reading) -> None:
        """Adds a batch of this process."""

    @abstractmethod
    def result(self, summed: Summed = lambda values: values) -> Tables:
        """Returns the result; all processes call this.

        Args:
            summed: sums values over processes.

        Raises:
            ConfigError: numbers are not finite.
        """


def examine(
    path: Path,
    kind: type[Examination],
    *,
    data: str | None = None,
    split: SplitName = "validation",
    overrides: tuple[str, ...] = (),
    weights: Choice = "trained",
    base: Path | None = None,
    interventions: Sequence[Intervention] = (),
    **options: Any,
) -> Tables:
    """Examines a checkpoint, in one process or under torchrun.

    Args:
        path: a checkpoint, or a run (its newest checkpoint).
        kind: the examination.
        data: as `data.path`; None: the run's.
        split: `validation`, `test` or `train`.
        overrides: `key=value` for keys that evaluation reads.
        weights: which of the checkpoint's weights.
        base: see `open_weights`.
        interventions: see `open_evaluated`.
        options: see the examination's `checked`.

    Returns:
        The same on each process.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong.
    """
    opened = open_evaluated(path, data, overrides, weights, base, interventions)
    settings = kind.checked(opened, split, **options)
    if kind.reads_split:
        opened.task.check_split(split)
    started, reads = time.monotonic(), split if kind.reads_split else None
    with opened.loaded(kind.doing, reads, needs_whole=kind.needs_whole) as (model, world):
        result = kind.take(opened, split, settings, model, world)
        seconds = time.monotonic() - started
    about = opened.about()
    if kind.reads_split:
        about |= {
            "data": opened.task.name,
            "data_kind": opened.config.data.kind,
            "split": split,
        }
    if interventions:
        about["interventions"] = [str(each) for each in interventions]
    how = {
        "weights": weights,
        "precision": opened.config.train.precision,
        "processes": world.size,
        "seconds": seconds,
    }
    return result.with_facts(about, how)
