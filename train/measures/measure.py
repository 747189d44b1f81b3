"""What a measure of experts is, and how a command takes one.

A new measure is one file with a `Measure` and its `Result`, and one line in `registry.py`:
`polyad evaluate`, `polyad report` and studies iterate over the registry.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from torch import nn

from polyad.data.text.manifest import SplitName
from polyad.parallel import comm
from polyad.parallel.weights import Choice
from polyad.train.errors import ConfigError
from polyad.train.experts.information import Summed
from polyad.train.experts.probing import RoutedLayer, routed_head, routed_layers
from polyad.train.reading import Evaluated, Reading, open_evaluated, read
from polyad.train.results import aligned
from polyad.train.study.config import StudyConfig
from polyad.train.tasks.samples import Samples, samples_of

Tree = Mapping[str, Any]
"""A result as JSON values."""


class Result(ABC):
    """What a measure found."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """What programs get: the keys of the measure."""

    @abstractmethod
    def amount(self) -> str:
        """What was read, after the name of the data: `: 1,024 tokens` or `, 24 images`."""

    def facts(self) -> list[tuple[str, str]]:
        """Names and values that people see first."""
        return []

    def notes(self) -> list[tuple[str, str]]:
        """Names and values at the end of those."""
        return []

    @abstractmethod
    def rows(self) -> list[str]:
        """Aligned lines for people."""

    def section(self, titles: Mapping[str, str]) -> str:
        """Its section of the page of a report, HTML without a heading; nothing if it has none.

        Args:
            titles: of the layers, by their names.
        """
        return ""


class Subject(NamedTuple):
    """What is measured on what."""

    model: nn.Module
    """In evaluation mode, whole on each process."""
    layers: Sequence[RoutedLayer]
    samples: Samples
    batch_size: int


class Asked(NamedTuple):
    """How a study takes a measure of a run."""

    command: tuple[str, ...]
    """Words of `polyad`."""
    options: tuple[str, ...]
    settings: Any
    """What the study says of it: a result that was made otherwise is made again."""


class Measure(ABC):
    """Adds up what one measure says of a model that reads held-out samples.

    Attributes:
        name: the option of `polyad evaluate`, the key of a study, the name in a report.
        title: the heading of its section.
        anchor: what a link to its section says; empty: its name.
        doing: what the command does, for a line that says that memory ran out.
        told: what it says of its progress.
        blocks: of which it wants to know what they get.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    anchor: ClassVar[str] = ""
    doing: ClassVar[str] = "measuring experts"
    told: ClassVar[str] = "measure experts"
    blocks: Sequence[int] = ()

    def __init__(self, subject: Subject) -> None:
        self.subject = subject

    @classmethod
    def refusal(cls, opened: Evaluated) -> str | None:
        """What is wrong with weights and data that it is not for; None: it is for them."""
        return None

    @classmethod
    def of(cls, opened: Evaluated, model: nn.Module, split: str, **options: Any) -> Self:
        """The measure that `polyad evaluate` takes: of all layers with experts, and of all samples.

        Args:
            opened: weights and data.
            model: of the weights.
            split: of the data.
            options: of the measure; by default there are none.

        Raises:
            ConfigError: the model has no experts, or an option is not allowed.
        """
        head = routed_head(model)
        layers = [*routed_layers(model), *([head] if head else [])]
        if not layers:
            raise ConfigError(
                f"{opened.weights.folder}: its model has no experts, in blocks or as its head"
            )
        return cls(Subject(model, layers, samples_of(opened.task, split), opened.batch_size))

    @abstractmethod
    def add(self, reading: Reading) -> None:
        """Adds a batch of this process."""

    @abstractmethod
    def result(self, summed: Summed = lambda values: values) -> Result:
        """What was found; all processes call it.

        Args:
            summed: over processes.

        Raises:
            ConfigError: numbers are not finite.
        """

    @classmethod
    def in_report(cls, subject: Subject) -> "Measure | None":
        """The measure that a report takes in its pass over held-out data; None: none."""
        return cls(subject)

    @classmethod
    def of_study(cls, config: StudyConfig) -> "Asked | None":
        """How a study takes it; None: it is not asked for.

        Args:
            config: of the study.
        """
        if cls.name not in config.measures:
            return None
        return Asked(("experts", "measure"), ("--name", cls.name), True)

    @classmethod
    def kept(cls, tree: Tree) -> Tree:
        """What a study keeps of a result."""
        return tree

    @classmethod
    def numbers(cls, tree: Tree) -> dict[str, float]:
        """The numbers of a result that a study compares, by name.

        Args:
            tree: what `kept` gave.
        """
        return {}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A measure that was taken of a checkpoint, and how."""

    checkpoint: str
    step: int
    data: str
    data_kind: str
    split: str
    result: Result
    weights: Choice
    precision: str
    processes: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """What programs get."""
        found = dict(vars(self))
        about = {
            name: found.pop(name) for name in ("checkpoint", "step", "data", "data_kind", "split")
        }
        del found["result"]
        return about | self.result.to_json() | found

    def text(self) -> str:
        """What people get."""
        facts = [
            ("checkpoint", f"{self.checkpoint} (step {self.step:,})"),
            ("split", f"{self.split} of {self.data}{self.result.amount()}"),
            *self.result.facts(),
            ("processes", f"{self.processes}"),
            *self.result.notes(),
        ]
        return "\n".join([*aligned(facts, "<"), *self.result.rows()])


def measure(
    path: Path,
    kind: type[Measure],
    *,
    data: str | None = None,
    split: SplitName = "validation",
    overrides: tuple[str, ...] = (),
    weights: Choice = "trained",
    base: Path | None = None,
    **options: Any,
) -> Measured:
    """Takes a measure, in one process or under torchrun.

    Args:
        path: a checkpoint, or a run whose newest one is taken.
        kind: the measure.
        data: as `data.path`; None takes the run's.
        split: `validation`, `test` or `train`.
        overrides: `key=value` for keys that evaluation reads.
        weights: which of the checkpoint's.
        base: see `open_weights`.
        options: of the measure; see its `of`.

    Returns:
        The same on each process.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong.
    """
    opened = open_evaluated(path, data, overrides, weights, base)
    if (refusal := kind.refusal(opened)) is not None:
        raise ConfigError(f"{kind.name}: {refusal}")
    opened.task.check_split(split)
    started = time.monotonic()
    with opened.loaded(kind.doing, split) as (model, world):
        taken = kind.of(opened, model, split, **options)
        read(
            model,
            taken.subject.layers,
            taken.subject.samples,
            [taken],
            batch_size=opened.batch_size,
            world=world,
            told=kind.told,
        )
        result = taken.result(lambda values: comm.sum_over_samples(values, world))
    return Measured(
        **opened.about(),
        data=opened.task.name,
        data_kind=opened.config.data.kind,
        split=split,
        result=result,
        weights=weights,
        precision=opened.config.train.precision,
        processes=world.size,
        seconds=time.monotonic() - started,
    )
