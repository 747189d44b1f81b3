"""Interfaces of analyses and measures of a checkpoint.

    Analysis   has the user's options, reads weights and data, and returns `Tables`
    Measure    an analysis that accumulates over one pass over samples, reading all routers

A new measure is one file with a `Measure`, and one line in `registry.py`: `polyad experts NAME`
reads the registry.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from polyad.data.text.manifest import SplitName
from polyad.parallel import comm
from polyad.train.errors import ConfigError
from polyad.train.experts.information import Summed
from polyad.train.experts.probing import RoutedLayer, every_layer
from polyad.train.reading import EvaluationContext, ForwardPass, Subject, summing
from polyad.train.results import Tables
from polyad.train.tasks.samples import samples_of


@dataclass(kw_only=True)
class Analysis(ABC):
    """An analysis of a checkpoint by one command. Its fields are its options.

    Attributes:
        name: its name in errors.
        doing: describes the work, for its progress and an out-of-memory error.
        reads_split: whether it reads a split of the data.
    """

    name: ClassVar[str]
    doing: ClassVar[str] = "measuring experts"
    reads_split: ClassVar[bool] = True

    @property
    def needs_whole(self) -> str | None:
        """Why the whole model must be in memory; None: it may be read block by block, see
        `polyad.train.reading.ForwardPass`."""
        return "it takes all of a model at once"

    def check(self, opened: EvaluationContext) -> None:  # noqa: B027  # most refuse nothing
        """Checks the options, before processes connect and weights are loaded.

        Args:
            opened: weights and data.

        Raises:
            ConfigError: the weights, the data or an option are not allowed.
        """

    @abstractmethod
    def run(self, opened: EvaluationContext, model: nn.Module, world: comm.World) -> Tables:
        """Analyses the weights; all processes call it.

        Args:
            opened: weights and data.
            model: the weights' model, in evaluation mode, whole on each process.
            world: this process.

        Returns:
            The same on each process.
        """


class Measure(Analysis):
    """A measure that accumulates over a model's pass over held-out samples.

    Attributes:
        blocks: the blocks whose inputs it needs.
        subject: what is read.
    """

    blocks: Sequence[int] = ()
    subject: Subject

    def run(self, opened: EvaluationContext, model: nn.Module, world: comm.World) -> Tables:
        """Reads the samples once."""
        self.begin(self.subject_of(opened, model))
        self.read(world)
        return self.result(summing(world))

    def subject_of(self, opened: EvaluationContext, model: nn.Module) -> Subject:
        """Opens what the pass needs, and returns what is read; see `run`.

        By default all layers with experts, and all samples.
        """
        layers = layers_of(opened, model)
        return Subject(model, layers, samples_of(opened.task, opened.split), opened.batch_size)

    def begin(self, subject: Subject) -> None:
        """Begins a pass.

        Args:
            subject: the model, layers and samples.
        """
        self.subject = subject

    @torch.inference_mode()
    def read(self, world: comm.World | None = None) -> None:
        """Reads its samples in a separate pass for this measure; see `Subject.read`."""
        for forward_pass in self.subject.read(world, label=self.doing, blocks=self.blocks):
            self.add(forward_pass)

    @abstractmethod
    def add(self, forward_pass: ForwardPass) -> None:
        """Adds a batch of this process."""

    @abstractmethod
    def result(self, summed: Summed = lambda values: values) -> Tables:
        """Returns the result; all processes call this.

        Args:
            summed: sums values over processes.

        Raises:
            ConfigError: numbers are not finite.
        """


def layers_of(opened: EvaluationContext, model: nn.Module) -> list[RoutedLayer]:
    """Returns all layers with experts, in blocks and as the head.

    Args:
        opened: the weights.
        model: their model.

    Raises:
        ConfigError: there are none.
    """
    if layers := every_layer(model):
        return layers
    raise ConfigError(
        f"{opened.weights.folder}: its model has no experts, in blocks or as its head"
    )


def examine(
    opened: EvaluationContext,
    analysis: Analysis,
    split: SplitName = "validation",
    *,
    model: nn.Module | None = None,
) -> Tables:
    """Examines weights, in one process or under torchrun.

    Args:
        opened: the weights and their data.
        analysis: the analysis, with its options.
        split: `validation`, `test` or `train`.
        model: the model on this process's device, in evaluation mode; None: it is loaded.

    Returns:
        The same on each process.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong.
    """
    opened = opened._replace(split=split)
    analysis.check(opened)
    reads = split if analysis.reads_split else None
    if reads is not None:
        opened.task.check_split(reads)
    started, whole = time.monotonic(), analysis.needs_whole
    with opened.loaded(analysis.doing, reads, model, needs_whole=whole) as (model, world):
        result = analysis.run(opened, model, world)
        seconds = time.monotonic() - started
    about = opened.about(reads)
    if opened.interventions:
        about["interventions"] = [str(each) for each in opened.interventions]
    return result.with_facts(about, {"processes": world.size, "seconds": seconds})
