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

from polyad.data.config import DataSettings
from polyad.data.sampler import evaluation_batches
from polyad.model.config import Config
from polyad.model.output import ModelOutput, RoutingStats
from polyad.model.settings import ModelSettings
from polyad.parallel import comm
from polyad.parallel.checkpoint.format import State
from polyad.parallel.weights import Weights
from polyad.parallel.zero import CrossEntropy

Batch = TypeVar("Batch", bound=tuple[Tensor, ...])
"""A micro-batch. One whose samples are padded has `real_tokens`, as `SequenceBatch`."""
Share = Callable[[float], None]
"""Called with the share of some work that is done, from 0 to 1."""


class EvaluationConfig(Config):
    """Validation during training, and `polyad evaluate`."""

    every: Annotated[int, Field(ge=0)] = 0
    """Number of steps between validations; 0: validate only at the end of the run."""
    patience: Annotated[int, Field(ge=1)] | None = None
    """Early stopping: the run ends after this many validations in a row without a better score;
    null: no early stopping."""
    max_windows: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of text windows, or images, scored in each validation during training; null:
    the whole split."""
    stride: Annotated[int, Field(ge=1)] | None = None
    """Number of tokens by which the window moves over the text; null: its whole length. Smaller
    strides give every token more context, and take longer."""
    batch_size: Annotated[int, Field(ge=1)] | None = None
    """Number of windows or images per forward pass; null: `train.micro_batch_size`."""


class Unit(NamedTuple):
    """What throughput counts."""

    name: str
    """The singular: `token` for the key `tokens_per_second`."""
    short: str
    """The short form for the console: `tok` for tok/s."""


class Score(NamedTuple):
    """A number that a checkpoint is scored by."""

    name: str
    """The key in results."""
    title: str
    """The title of the column in a table."""
    digits: int
    """Digits after the decimal point."""
    unit: str = ""
    """The unit, for example `nats a token`."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """How well a model does on a split: what `Task.scores` names, `UNITs_scored`, and how.

    Each task has a class of its own, whose fields are the keys that programs get, in their order.
    """

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return dict(vars(self))

    def rows(self, task: "type[Task[Any]]") -> list[tuple[str, str]]:
        """Names and values for people."""
        found, units = self.to_json(), f"{task.unit.name}s"
        return [
            *((s.title, f"{found[s.name]:.{s.digits}f} {s.unit}".rstrip()) for s in task.scores),
            ("scored", f"{found[f'{units}_scored']:,} {units}"),
        ]


class Predictor(Protocol):
    """A model that predicts: the engine in training, or `OneDevice`."""

    @property
    def cross_entropy(self) -> CrossEntropy:
        """The loss for the logits that this model returns; a layout may have cut them by class."""

    def __call__(self, *inputs: Tensor, **named: Tensor) -> ModelOutput:
        """The forward pass."""


class StoredData(Protocol):
    """A folder of data with digests that its files can be verified by."""

    path: Path

    def bytes_to_verify(self) -> int:
        """Bytes that verification reads."""

    def faults(self, read: Callable[[int], None]) -> Iterator[tuple[str, str]]:
        """Reads all files; yields the name of each damaged one, and what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class Sections:
    """The sections of a configuration that a task is opened with."""

    data: DataSettings
    model: ModelSettings
    evaluation: EvaluationConfig
    seed: int
    """The seed of the order of samples."""
    micro_batch_size: int = 1
    """Samples in a forward pass of one process."""
    init_from: str | None = None
    """The weights that a new run starts from."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What a checkpoint stores for a task."""

    state: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `TrainState`."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Contents of small files by name, for example of a tokenizer."""


def real_tokens(batch: tuple[Tensor, ...]) -> Tensor | None:
    """How many tokens of a micro-batch are no padding; None: none is, in any micro-batch."""
    tokens: Tensor | None = getattr(batch, "real_tokens", None)
    return tokens


def dealt_out(
    samples: Dataset[Any],
    total: int,
    batch_size: int,
    world: comm.World,
    *,
    report: Share | None = None,
    num_workers: int = 0,
) -> Iterator[tuple[Any, Tensor]]:
    """Held-out samples as this process reads them; see `evaluation_batches`.

    Args:
        samples: All of them.
        total: How many there are.
        batch_size: Samples in a forward pass.
        world: This process; each process gets as many batches.
        report: Is told the share done after every batch.
        num_workers: Loader processes.

    Yields:
        Batches on the CPU, and which of their samples count [B].
    """
    ranks, done = world.data_parallel_size, 0
    for batch, counts_B in evaluation_batches(
        samples,
        total,
        batch_size,
        rank=world.data_parallel_rank,
        ranks=ranks,
        num_workers=num_workers,
    ):
        yield batch, counts_B
        done += len(counts_B) * ranks
        if report is not None:
            report(min(1.0, done / total))


class Task(ABC, Generic[Batch]):
    """What is learned from a kind of data; `open` makes one.

    Attributes:
        model: The model's configuration, with what the data decides filled in.
    """

    data_settings: ClassVar[type[DataSettings]]
    """The class of the section `data`; its `kind` chooses the task."""
    unit: ClassVar[Unit]
    scores: ClassVar[tuple[Score, ...]]
    """The numbers that `score` returns, the most important one first."""
    loss_unit: ClassVar[str] = ""
    """The unit of the training loss, as nats a token; empty: it has none that says more."""
    sample: ClassVar[str] = "sample"
    """What a sample of held-out data is called."""
    validation_score: ClassVar[str] = "validation_loss"
    """The most important key of what `validate` returns."""
    higher_is_better: ClassVar[bool] = False
    """Whether that is better the higher it is; a loss is better the lower."""
    attack: ClassVar[str | None] = None
    """What `polyad evaluate --attack` does to data of this kind; None: there is nothing."""
    model: ModelSettings

    @classmethod
    @abstractmethod
    def open(cls, sections: Sections) -> Self:
        """Opens the data to train on, and checks that the model fits it.

        Nothing slow is imported, and no process group exists yet.

        Raises:
            ValueError: With an `exit_status` of 2: one line says what is wrong.
        """

    @classmethod
    def open_held_out(cls, sections: Sections, weights: Weights) -> Self:
        """Opens data to score weights with; the data of their training need not be there."""
        task = cls.open(sections)
        task.check_weights(weights, "checkpoint")
        return task

    @property
    @abstractmethod
    def place(self) -> str:
        """The key that names the data, and what it says, for errors."""

    @property
    def name(self) -> str:
        """The name of the data in results."""
        return self.place

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A digest of the training data; a run goes on only with the same one."""

    def contents(self, split: str) -> str:
        """A digest of what a split holds, which processes of a run compare.

        Args:
            split: of those that there are.
        """
        return self.fingerprint

    @property
    @abstractmethod
    def samples(self) -> Dataset[Any]:
        """Samples by their global number, without end: NamedTuples of tensors, which a loader
        stacks to a batch. Which sample has a number depends on the seed alone. Those of a
        micro-batch may depend on each other in how they are padded, by `__getitems__`."""

    @property
    @abstractmethod
    def samples_per_epoch(self) -> int:
        """Samples until the data repeats."""

    @abstractmethod
    def losses(self, model: Predictor, batch: Batch) -> tuple[Tensor, tuple[RoutingStats, ...]]:
        """The loss of a model on a micro-batch.

        Args:
            model: In training, or not.
            batch: On the model's device.

        Returns:
            The loss of each target of each sample, fp32, of any shape; training minimizes the mean.
            And the routing statistics of the layers.
        """

    to_validate: ClassVar[str] = "data with such a split is needed"
    """What to do where there is no validation split."""

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
            Keys to add to the step's record, with `validation_score`; the same on each process.
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
    ) -> Scores:
        """Scores a whole split for `polyad evaluate`; all processes call it together.

        Args:
            model: In evaluation mode.
            split: `train`, `validation` or `test`.
            batch_size: Samples in a forward pass.
            world: This process.
            report: Is told the share done.

        Returns:
            The same on each process.
        """

    @abstractmethod
    def units_of(self, split: str) -> int:
        """The number of units in a split."""

    def rows_of(self, split: str) -> int | None:
        """How many sequences or images a model reads when it scores a split.

        Args:
            split: of those that there are.

        Returns:
            None: it is not known of this task.
        """
        return None

    def check_split(self, split: str) -> None:
        """Checks that a split is not empty.

        Raises:
            ValueError: With an `exit_status` of 2: there is nothing.
        """

    @classmethod
    def validation_facts(
        cls, value: float | None, most: int | None
    ) -> list[tuple[str, float | None, str]]:
        """What a report shows of the newest validation.

        Args:
            value: Of `validation_score`; None: nothing was validated yet.
            most: Samples that a validation reads, `evaluation.max_windows`; None: all.

        Returns:
            Titles, numbers, and what each is.
        """
        title = cls.validation_score.replace("_", " ").capitalize()
        return [(title, value, f"latest, {cls.validated_part(most)}")]

    @classmethod
    def validated_part(cls, most: int | None) -> str:
        """What a validation in training reads, for people; `polyad evaluate` reads all of a split.

        Args:
            most: Samples, at most; None: all.
        """
        if most is None:
            return "on the whole split"
        return f"on at most {most:,} {cls.sample}s of the split (evaluation.max_windows)"

    @property
    def trains_whole_model(self) -> bool:
        """Whether a step is a forward and a backward pass of the whole model, by which FLOPs are
        counted."""
        return True

    def counted(self, samples: int) -> dict[str, int]:
        """How many units so many samples are, by their name."""
        return {f"{self.unit.name}s": samples * self.model.units_per_sample()}

    def kept(self) -> Kept:
        """What a checkpoint stores for this task."""
        return Kept(state={"data_fingerprint": self.fingerprint})

    @property
    def notes(self) -> Sequence[str]:
        """What a person should know of the data before a run, a line each."""
        return ()

    def sequences_of_sample(self) -> tuple[int, int | None]:
        """How many sequences a sample has, and the mean number of tokens of one without padding, by
        which FLOPs are counted; None: as many as the model takes."""
        return 1, None

    def begins_anew(self, weights: Weights) -> tuple[str, ...]:
        """How the names of parameters begin that start from the seed, not from these weights.

        Args:
            weights: Of another run, or of another kind of model, as a language model's.
        """
        return ()

    @property
    def other_data(self) -> str:
        """What an error calls data that has another fingerprint."""
        return "other data"

    def same_data(self, state: State) -> bool:
        """Whether the run of a checkpoint was trained on the same data."""
        return state.data_fingerprint == self.fingerprint

    def check_weights(self, weights: Weights, owner: str) -> None:
        """Checks that weights fit the inputs and targets of this data, as token ids or classes.

        Args:
            weights: Of another run, or of this one.
            owner: What the error calls the weights.

        Raises:
            ValueError: With an `exit_status` of 2: they do not fit.
        """

    def sources(self, samples: Sequence[int]) -> dict[str, list[int]]:
        """Which documents samples were cut from, to find bad data: numbers by the data's name."""
        return {}

    def stored(self) -> Sequence[StoredData]:
        """Folders of data that are verified in the background."""
        return ()


@dataclass(frozen=True)
class OneDevice:
    """A model outside of training, on one device."""

    model: Callable[..., ModelOutput]
    cross_entropy: CrossEntropy

    def __call__(self, *inputs: Tensor, **named: Tensor) -> ModelOutput:
        """The forward pass."""
        return self.model(*inputs, **named)
