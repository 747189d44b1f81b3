"""What is found out about a checkpoint, and how a command does it.

    Examination   what a user asks is checked; the weights and the data are examined; a `Result`
    Measure       an examination that adds up one pass over samples with all routers read

A new measure is one file with a `Measure` and its `Result`, and one line in `registry.py`:
`polyad experts measure`, `polyad report` and studies iterate over the registry.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from torch import nn

from polyad.data.text.manifest import SplitName
from polyad.model.settings import ModelSettings
from polyad.parallel import comm
from polyad.parallel.streamed import seconds_before
from polyad.parallel.weights import Choice
from polyad.train.errors import ConfigError
from polyad.train.experts.information import Summed
from polyad.train.experts.interventions import Intervention
from polyad.train.experts.probing import RoutedLayer, routed_head, routed_layers
from polyad.train.page.html import Figure
from polyad.train.reading import Evaluated, Reading, open_evaluated, read
from polyad.train.results import aligned
from polyad.train.study.config import StudyConfig
from polyad.train.tasks.samples import Samples, samples_of
from polyad.train.tasks.text import TextTask

Tree = Mapping[str, Any]
"""A result as JSON values."""


class Result(ABC):
    """What was found.

    Attributes:
        first: the keys that programs get before the others, of the result or of `Examined`.
        last: those that they get after the others.
    """

    first: ClassVar[tuple[str, ...]] = ("checkpoint", "step", "data", "data_kind", "split")
    last: ClassVar[tuple[str, ...]] = ("weights", "precision", "processes", "seconds")

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """What programs get: the result's own keys."""

    def amount(self) -> str:
        """What was read, after the name of the data: `: 1,024 tokens` or `, 24 images`."""
        return ""

    def source(self, data: str) -> list[tuple[str, str]]:
        """Names and values that say what was read.

        Args:
            data: the split and the name of the data.
        """
        return [("split", f"{data}{self.amount()}")]

    def facts(self) -> list[tuple[str, str]]:
        """Names and values that people see first."""
        return []

    def notes(self) -> list[tuple[str, str]]:
        """Names and values at the end of those."""
        return []

    def rows(self) -> list[str]:
        """Aligned lines for people, after names and values."""
        return []

    def section(self, titles: Mapping[str, str]) -> Iterable[str | Figure]:
        """Its section of the page of a report, texts and figures; nothing if it has none.

        Args:
            titles: the title of each layer, by its name.
        """
        return ()


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


class Examination(ABC):
    """Something that is found out about a checkpoint by one command.

    Attributes:
        name: what errors call it; of a measure also the key of a study and the name in a report.
        doing: what the command does, for a line that says that memory ran out.
        reads_split: whether it reads a split of the data.
        needs_whole: why the whole model has to be in memory; None: it may be read block by block,
            see `polyad.train.reading.Reading`.
    """

    name: ClassVar[str]
    doing: ClassVar[str] = "measuring experts"
    reads_split: ClassVar[bool] = True
    needs_whole: ClassVar[str | None] = "it takes all of a model at once"

    @classmethod
    @abstractmethod
    def checked(cls, opened: Evaluated, split: str, **options: Any) -> Any:
        """Checks what a user asks, before processes meet and before weights are in memory.

        Args:
            opened: weights and data.
            split: of the data.
            options: of this examination.

        Returns:
            What `take` gets as `asked`.

        Raises:
            ConfigError: the weights, the data or an option are not allowed.
        """

    @classmethod
    @abstractmethod
    def take(
        cls, opened: Evaluated, split: str, asked: Any, model: nn.Module, world: comm.World
    ) -> Result:
        """Examines the weights; all processes call it.

        Args:
            opened: weights and data.
            split: of the data.
            asked: what `checked` gave.
            model: of the weights, in evaluation mode, whole on each process.
            world: this process.

        Returns:
            The same on each process.
        """


class Measure(Examination):
    """Adds up what one measure says of a model that reads held-out samples.

    Attributes:
        title: the heading of its section.
        anchor: what a link to its section says; empty: its name.
        told: what it says of its progress.
        blocks: of which it wants to know what they get.
    """

    title: ClassVar[str]
    anchor: ClassVar[str] = ""
    told: ClassVar[str] = "measure experts"
    blocks: Sequence[int] = ()

    def __init__(self, subject: Subject) -> None:
        self.subject = subject

    @classmethod
    def checked(cls, opened: Evaluated, split: str, **options: Any) -> Any:
        """Refuses weights and data that the measure is not for."""
        if (refusal := cls.refusal(opened)) is not None:
            raise ConfigError(f"{cls.name}: {refusal}")
        return options

    @classmethod
    def refusal(cls, opened: Evaluated) -> str | None:
        """What is wrong with weights and data that it is not for; None: it is for them."""
        return None

    @classmethod
    def take(
        cls, opened: Evaluated, split: str, asked: Any, model: nn.Module, world: comm.World
    ) -> Result:
        """Reads the samples once."""
        taken = cls.of(opened, split, asked, model)
        taken.read(world)
        return taken.result(lambda values: comm.sum_over_samples(values, world))

    @classmethod
    def of(cls, opened: Evaluated, split: str, asked: Any, model: nn.Module) -> Self:
        """The measure that a command takes: of all layers with experts, and of all samples; see
        `take`."""
        head = routed_head(model)
        layers = [*routed_layers(model), *([head] if head else [])]
        if not layers:
            raise ConfigError(
                f"{opened.weights.folder}: its model has no experts, in blocks or as its head"
            )
        return cls(Subject(model, layers, samples_of(opened.task, split), opened.batch_size))

    def read(self, world: comm.World | None = None) -> None:
        """Reads its samples, in a pass for this measure alone; see `polyad.train.reading.read`."""
        model, layers, samples, batch_size = self.subject
        read(model, layers, samples, [self], batch_size=batch_size, world=world, told=self.told)

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
    def is_for(cls, model: ModelSettings, *, has_experts: bool) -> bool:
        """Whether a study takes it of a variant: by default of one with experts.

        Args:
            model: the variant's.
            has_experts: whether any part of it is a mixture of experts.
        """
        return has_experts

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


def needs_text(name: str, opened: Evaluated) -> None:
    """Refuses data that is neither text nor masked text.

    Args:
        name: of the command.
        opened: weights and data.

    Raises:
        ConfigError: it is other data.
    """
    if not isinstance(opened.task, TextTask):
        raise ConfigError(
            f"{name}: is not allowed with data.kind: {opened.config.data.kind}; allowed with: "
            "text, masked_text"
        )


def needs_one_process(name: str, world: comm.World) -> None:
    """Refuses several processes.

    Args:
        name: of the command.
        world: this process.

    Raises:
        ConfigError: there are several.
    """
    if world.size > 1:
        raise ConfigError(f"{name}: one process does it, and there are {world.size}")


@dataclass(frozen=True, kw_only=True)
class Examined:
    """What was found out about a checkpoint, and how."""

    checkpoint: str
    step: int
    data: str
    data_kind: str
    split: str
    interventions: Sequence[Intervention]
    result: Result
    weights: Choice
    precision: str
    processes: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """What programs get."""
        found = self.result.to_json()
        known, last = vars(self) | found, self.result.last
        changed = ("interventions",) if self.interventions else ()
        names = (*self.result.first, *changed, *(name for name in found if name not in last), *last)
        return {name: known[name] for name in names}

    def text(self) -> str:
        """What people get."""
        facts = [
            ("checkpoint", f"{self.checkpoint} (step {self.step:,})"),
            *self.result.source(f"{self.split} of {self.data}"),
            *(("intervention", str(each)) for each in self.interventions),
            *self.result.facts(),
            ("processes", f"{self.processes}"),
            *self.result.notes(),
        ]
        return "\n".join([*aligned(facts, "<"), *self.result.rows()])


def examine(
    path: Path,
    kind: type[Examination],
    *,
    data: str | None = None,
    split: SplitName = "validation",
    overrides: tuple[str, ...] = (),
    weights: Choice = "trained",
    base: Path | None = None,
    stream: Path | None = None,
    interventions: Sequence[Intervention] = (),
    **options: Any,
) -> Examined:
    """Examines a checkpoint, in one process or under torchrun.

    Args:
        path: a checkpoint, or a run whose newest one is taken.
        kind: what is found out.
        data: as `data.path`; None takes the run's.
        split: `validation`, `test` or `train`.
        overrides: `key=value` for keys that evaluation reads.
        weights: which of the checkpoint's.
        base: see `open_weights`.
        stream: see `open_evaluated`.
        interventions: see `open_evaluated`.
        options: see `checked` of the examination.

    Returns:
        The same on each process.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong.
    """
    opened = open_evaluated(path, data, overrides, weights, base, stream, interventions)
    asked = kind.checked(opened, split, **options)
    if kind.reads_split:
        opened.task.check_split(split)
    started, reads = time.monotonic(), split if kind.reads_split else None
    with opened.loaded(kind.doing, reads, needs_whole=kind.needs_whole) as (model, world):
        result = kind.take(opened, split, asked, model, world)
        seconds = time.monotonic() - started + seconds_before(model)
    return Examined(
        **opened.about(),
        data=opened.task.name,
        data_kind=opened.config.data.kind,
        split=split,
        interventions=interventions,
        result=result,
        weights=weights,
        precision=opened.config.train.precision,
        processes=world.size,
        seconds=seconds,
    )
