"""What is learned, as the loop, the guard, metrics, evaluation and reports see it.

They know neither tokens nor images: a task says what a sample is, what a model loses on it, how
well a checkpoint does on held-out data, and what of all this a run must not change. A new task is
one file with a subclass of `Task`, and one line in `registry.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, Protocol, Self, TypeVar

from pydantic import Field
from torch import Tensor
from torch.utils.data import Dataset

from data.config import DataSettings
from model.config import Config
from model.output import ModelOutput, RoutingStats
from model.settings import ModelSettings
from parallel import comm
from parallel.checkpoint.checkpoint import Checkpoint
from parallel.checkpoint.state_file import State
from parallel.weights import Weights
from parallel.zero import CrossEntropy
from train.errors import ConfigError

Batch = TypeVar("Batch", bound=tuple[Tensor, ...])
Share = Callable[[float], None]
"""Is told the share of something that is done."""


class EvaluationConfig(Config):
    """Validation while training, and `polyad evaluate`."""

    every: Annotated[int, Field(ge=0)] = 0
    """Steps between validations; 0 validates at the end of the run only."""
    max_windows: Annotated[int, Field(ge=1)] | None = None
    """Windows of the split that are scored in training; null: all of them."""
    stride: Annotated[int, Field(ge=1)] | None = None
    """Tokens a window moves on; null: its whole length. Less gives more context, and costs more."""
    batch_size: Annotated[int, Field(ge=1)] | None = None
    """Windows in a forward pass; null: `train.micro_batch_size`."""


class Unit(NamedTuple):
    """What throughput counts."""

    name: str
    """As in `tokens_per_second`."""
    short: str
    """As in tok/s."""


class Score(NamedTuple):
    """A number that a checkpoint is scored by."""

    name: str
    """Its key in results."""
    title: str
    """Of a table's column."""
    digits: int
    """Behind the point."""
    unit: str = ""
    """As in nats a token."""


class Predictor(Protocol):
    """A model that predicts: the engine in training, or `OneDevice`."""

    @property
    def cross_entropy(self) -> CrossEntropy:
        """Of logits as the model gives them: a layout may have cut them by class."""

    def __call__(self, *inputs: Tensor) -> ModelOutput:
        """The forward pass."""


class ProbeSet(Protocol):
    """Held-out inputs that several checkpoints read, to compare what experts were given."""

    def batches(self, batch_size: int, world: comm.World) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's inputs, and which of their units count; all have as many batches."""


class StoredData(Protocol):
    """A folder whose files say what they should hold."""

    path: Path

    def bytes_to_verify(self) -> int:
        """How much there is to read."""

    def faults(self, read: Callable[[int], None]) -> Iterator[tuple[str, str]]:
        """Reads all of it; gives the name of each file that is not what was written, and why."""


@dataclass(frozen=True, kw_only=True)
class Sections:
    """The sections of a configuration that a task is opened with."""

    data: DataSettings
    model: ModelSettings
    evaluation: EvaluationConfig
    seed: int
    """Of the order of samples."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What a checkpoint carries of a task."""

    state: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `TrainState`."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Small files by name, as a tokenizer."""


class Task(ABC, Generic[Batch]):
    """What is learned from a kind of data; `open` makes one.

    Attributes:
        model: The model's configuration, with what the data decides filled in.
    """

    data_settings: ClassVar[type[DataSettings]]
    """The class of the section `data`; its `kind` chooses the task."""
    unit: ClassVar[Unit]
    scores: ClassVar[tuple[Score, ...]]
    """What `score` gives, the one to look at first; all are better when they are lower, or all when
    they are higher, as that one is."""
    validation_score: ClassVar[str] = "validation_loss"
    """What of `validate` is the one to look at."""
    model: ModelSettings

    @classmethod
    @abstractmethod
    def open(cls, sections: Sections) -> Self:
        """Opens the data to train on, and looks whether it and the model can belong together.

        Nothing slow is imported, and no process group exists yet.

        Raises:
            ValueError: With an `exit_status` of 2: one line says what is wrong.
        """

    @classmethod
    def open_held_out(cls, sections: Sections, checkpoint: Checkpoint) -> Self:
        """As `open`, to score a checkpoint with: nothing is asked of the data of training."""
        task = cls.open(sections)
        task.check_weights(checkpoint, "checkpoint")
        return task

    @property
    @abstractmethod
    def place(self) -> str:
        """The key that names the data, and what it says, for errors."""

    @property
    def name(self) -> str:
        """What results call the data."""
        return self.place

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Names what training sees: a run that goes on has to find the same."""

    @property
    @abstractmethod
    def samples(self) -> Dataset[Any]:
        """Samples by their global number, without end: NamedTuples of tensors, which a loader
        stacks to a batch. Which sample has a number depends on the seed alone."""

    @property
    @abstractmethod
    def samples_per_epoch(self) -> int:
        """How many there are until they come again."""

    @abstractmethod
    def losses(self, model: Predictor, batch: Batch) -> tuple[Tensor, tuple[RoutingStats, ...]]:
        """What a model loses on a micro-batch.

        Args:
            model: In training, or not.
            batch: On the model's device.

        Returns:
            The loss of each target of each sample, fp32, of any shape; the mean is trained on. And
            what routers did.
        """

    @property
    @abstractmethod
    def has_validation(self) -> bool:
        """Whether there is data to validate with while training."""

    @abstractmethod
    def validate(
        self, model: Predictor, *, batch_size: int, world: comm.World, report: Share
    ) -> dict[str, float]:
        """Scores held-out data while training; all processes call it together.

        Args:
            model: In evaluation mode.
            batch_size: Samples in a forward pass.
            world: This process.
            report: Is told the share done.

        Returns:
            What the step's record has more, `validation_score` among it; the same on each process.
        """

    @abstractmethod
    def score(
        self,
        model: Predictor,
        split: str,
        *,
        batch_size: int,
        world: comm.World,
        report: Share | None = None,
    ) -> dict[str, Any]:
        """Scores a whole split for `polyad evaluate`; all processes call it together.

        Args:
            model: In evaluation mode.
            split: `train`, `validation` or `test`.
            batch_size: Samples in a forward pass.
            world: This process.
            report: Is told the share done.

        Returns:
            JSON values, the same on each process: the numbers that `scores` lists, `UNITs_scored`,
            and how they were made.
        """

    @abstractmethod
    def units_of(self, split: str) -> int:
        """How many units a split has to be scored."""

    def check_split(self, split: str) -> None:
        """Checks that there is something in a split to be scored.

        Raises:
            ValueError: With an `exit_status` of 2: there is nothing.
        """

    @classmethod
    def score_rows(cls, result: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Scores for a person: names and values."""
        counted = f"{cls.unit.name}s_scored"
        return [
            *((s.title, f"{result[s.name]:.{s.digits}f} {s.unit}".rstrip()) for s in cls.scores),
            ("scored", f"{result[counted]:,} {cls.unit.name}s"),
        ]

    def counted(self, samples: int) -> dict[str, int]:
        """How many units so many samples are, by their name."""
        return {f"{self.unit.name}s": samples * self.model.units_per_sample()}

    def kept(self) -> Kept:
        """What a checkpoint carries."""
        return Kept(state={"data_fingerprint": self.fingerprint})

    @property
    def other_data(self) -> str:
        """What to call data that has another fingerprint."""
        return "other data"

    def same_data(self, state: State) -> bool:
        """Whether a checkpoint's run has seen the same data."""
        return state.data_fingerprint == self.fingerprint

    def check_weights(self, weights: Weights, owner: str) -> None:
        """Checks that weights mean by inputs and outputs what this data does.

        Args:
            weights: Of another run, or of this one.
            owner: Who has them, for the error.

        Raises:
            ValueError: With an `exit_status` of 2: they mean something else.
        """

    def sources(self, samples: Sequence[int]) -> dict[str, list[int]]:
        """What samples were made of, to find bad data: numbers of documents, by the data's name."""
        return {}

    def stored(self) -> Sequence[StoredData]:
        """The folders of its data, for a check in the background."""
        return ()

    def probe(self, units: int) -> ProbeSet:
        """Held-out inputs, of at least so many units if there are as many.

        Raises:
            ValueError: With an `exit_status` of 2: this task has none.
        """
        raise ConfigError(
            f"log.fluctuation: true is not allowed with {self.place}, of which no set of inputs is "
            f"known to compare routing on"
        )


@dataclass(frozen=True)
class OneDevice:
    """A model outside of training, on one device."""

    model: Callable[..., ModelOutput]
    cross_entropy: CrossEntropy

    def __call__(self, *inputs: Tensor) -> ModelOutput:
        """The forward pass."""
        return self.model(*inputs)
