"""The interface of a task, as used by the loop, the guard, metrics, evaluation and reports.

These know neither tokens nor images. A task defines a sample, the loss of a model on it, the scores
of a checkpoint on held-out data, and what must stay the same during a run. A new task is one file
with a subclass of `Task`, and one line in `registry.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, Protocol, Self, TypeVar

from pydantic import Field
from torch import Tensor
from torch.utils.data import Dataset

from polyad.data.config import DataSettings
from polyad.data.sampler import HeldOutBatch, held_out_batches
from polyad.model.config import Config
from polyad.model.output import ModelOutput, RoutingStats
from polyad.model.settings import ModelSettings
from polyad.parallel import comm
from polyad.parallel.weights import Weights
from polyad.parallel.zero import CrossEntropy

Batch = TypeVar("Batch", bound=tuple[Tensor, ...])
"""A micro-batch. If its samples are padded, it has the number of others as `real_tokens`, like
`SequenceBatch`."""
Share = Callable[[float], None]
"""Progress callback: called with the share of the work done, from 0 to 1."""


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
    """The unit of throughput."""

    name: str
    """The singular: `token` for the key `tokens_per_second`."""
    short: str
    """The short form for the console: `tok` for tok/s."""


class Score(NamedTuple):
    """A score of a checkpoint."""

    name: str
    """The key in results."""
    title: str
    """The title of the column in a table."""
    digits: int
    """Digits after the decimal point."""
    unit: str = ""
    """The unit, for example `nats a token`."""


class Predictor(Protocol):
    """A model that predicts: the engine in training, or `OneDevice`."""

    @property
    def cross_entropy(self) -> CrossEntropy:
        """The cross-entropy for this model's logits, which a layout may have sharded by class."""

    def __call__(self, *inputs: Tensor, **named: Tensor) -> ModelOutput:
        """The forward pass."""


@dataclass(frozen=True, kw_only=True)
class Sections:
    """The sections of a configuration that a task needs."""

    data: DataSettings
    model: ModelSettings
    evaluation: EvaluationConfig
    seed: int
    """Seed of the sample order."""
    init_from: str | None = None
    """The weights that a new run starts from."""


@dataclass(frozen=True)
class CheckpointExtras:
    """What a checkpoint stores for a task."""

    state: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `TrainState`."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Contents of small files by name, for example of a tokenizer."""


@dataclass(frozen=True)
class Scoring:
    """A model to score on held-out samples; all processes score together."""

    model: Predictor
    """In evaluation mode."""
    batch_size: int
    """Samples per forward pass."""
    world: comm.World
    """This process."""
    report: Share | None = None
    """Called with the share of the samples done."""

    def batches(self, samples: Dataset[Any], num_workers: int = 0) -> Iterator[HeldOutBatch]:
        """Yields this process's batches of samples, as `held_out_batches` does."""
        rank, ranks = self.world.data_parallel_rank, self.world.data_parallel_size
        return held_out_batches(
            samples, self.batch_size, rank, ranks, self.world.device, self.report, num_workers
        )


class Task(ABC, Generic[Batch]):
    """A training task on one kind of data; `open` makes one.

    Attributes:
        model: The model's configuration, completed with the values that the data determines.
    """

    data_settings: ClassVar[type[DataSettings]]
    """The class of the section `data`, whose `kind` selects the task."""
    unit: ClassVar[Unit]
    scores: ClassVar[tuple[Score, ...]]
    """The scores that `score` returns, the most important one first."""
    loss_unit: ClassVar[str] = ""
    """The unit of the training loss, such as `nats a token`; empty: no unit."""
    validation_score: ClassVar[str] = "validation_loss"
    """The most important key of what `validate` returns."""
    higher_is_better: ClassVar[bool] = False
    """Whether higher values of that key are better; false for a loss."""
    attack: ClassVar[str | None] = None
    """The attack of `polyad evaluate --attack` on data of this kind; None: there is none."""
    model: ModelSettings

    @classmethod
    @abstractmethod
    def open(cls, sections: Sections) -> Self:
        """Opens the data to train on, and checks that the model fits it.

        No slow imports; no process group exists yet.

        Raises:
            ValueError: With an `exit_status` of 2 and a message of one line.
        """

    @classmethod
    def open_held_out(cls, sections: Sections, weights: Weights) -> Self:
        """Opens data to score weights on; their training data need not exist."""
        task = cls.open(sections)
        task.check_weights(weights, "checkpoint")
        return task

    @property
    @abstractmethod
    def place(self) -> str:
        """The key that names the data, with its value, for error messages."""

    @property
    def name(self) -> str:
        """The name of the data in results."""
        return self.place

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A digest of the training data; a run continues only if it is unchanged."""

    def contents(self, split: str) -> str:
        """A digest of a split's contents, which the processes of a run compare.

        Args:
            split: an existing split.
        """
        return self.fingerprint

    @property
    @abstractmethod
    def samples(self) -> Dataset[Any]:
        """An endless dataset by global sample number. Samples are NamedTuples of tensors, which a
        loader stacks to a batch. Which sample a number refers to depends on the seed alone. Samples
        of a micro-batch may be padded together, by `__getitems__`."""

    @property
    @abstractmethod
    def samples_per_epoch(self) -> int:
        """Number of samples before the data repeats."""

    @abstractmethod
    def losses(self, model: Predictor, batch: Batch) -> tuple[Tensor, tuple[RoutingStats, ...]]:
        """Computes the loss of a model on a micro-batch.

        Args:
            model: In training or evaluation mode.
            batch: On the model's device.

        Returns:
            The loss of each target of each sample, fp32, of any shape, whose mean training
            minimizes; and the routing statistics of the layers.
        """

    @property
    @abstractmethod
    def has_validation(self) -> bool:
        """Whether there is data for validation during training."""

    @abstractmethod
    def validate(self, scoring: Scoring) -> dict[str, float]:
        """Scores held-out data during training; all processes call it together.

        Args:
            scoring: The model, and how it is scored.

        Returns:
            Keys to add to the step's record, including `validation_score`; the same on each
            process.
        """

    @abstractmethod
    def score(self, scoring: Scoring, split: str) -> dict[str, Any]:
        """Scores a whole split for `polyad evaluate`; all processes call it together.

        Args:
            scoring: The model, and how it is scored.
            split: `train`, `validation` or `test`.

        Returns:
            JSON values by key, the same on each process: the scores that `scores` names, and
            `UNITs_scored`.
        """

    def rows(self, scores: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Names and values of what `score` returned, formatted for display."""
        units = f"{self.unit.name}s"
        return [
            *((s.title, f"{scores[s.name]:.{s.digits}f} {s.unit}".rstrip()) for s in self.scores),
            ("scored", f"{scores[f'{units}_scored']:,} {units}"),
        ]

    @abstractmethod
    def units_of(self, split: str) -> int:
        """The number of units in a split.

        Raises:
            ValueError: There is no such split, or it is empty; has an `exit_status` of 2.
        """

    def check_split(self, split: str) -> None:
        """Checks that a split can be scored; raises what `units_of` does."""
        self.units_of(split)

    def counted(self, samples: int) -> dict[str, int]:
        """Converts a number of samples to units, as a mapping from the unit's name."""
        return {f"{self.unit.name}s": samples * self.model.units_per_sample()}

    def kept(self) -> CheckpointExtras:
        """What a checkpoint stores for this task."""
        return CheckpointExtras(state={"data_fingerprint": self.fingerprint})

    @property
    def notes(self) -> Sequence[str]:
        """Notes on the data to show before a run, a line each."""
        return ()

    def sequences_of_sample(self) -> tuple[int, int | None] | None:
        """The number of sequences per sample, and their mean number of tokens without padding
        (None: the model's maximum), to count FLOPs. None where a step is not a forward and a
        backward pass of the whole model."""
        return 1, None

    def reinitialized_prefixes(self, weights: Weights) -> tuple[str, ...]:
        """Name prefixes of parameters that are initialized from the seed, not from these weights.

        Args:
            weights: Another run's, or those of another kind of model, such as a language model.
        """
        return ()

    def check_weights(self, weights: Weights, owner: str) -> None:
        """Checks that weights fit the inputs and targets of this data, such as token ids or
        classes.

        Args:
            weights: This run's, or another's.
            owner: Name of the weights in the error.

        Raises:
            ValueError: They do not fit; has an `exit_status` of 2.
        """

    def sources(self, samples: Sequence[int]) -> dict[str, list[int]]:
        """The documents that samples were cut from, to find bad data: numbers by name of the
        data."""
        return {}


@dataclass(frozen=True)
class OneDevice:
    """A model outside of training, on one device."""

    model: Callable[..., ModelOutput]
    cross_entropy: CrossEntropy

    def __call__(self, *inputs: Tensor, **named: Tensor) -> ModelOutput:
        """The forward pass."""
        return self.model(*inputs, **named)
