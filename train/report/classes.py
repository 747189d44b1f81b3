"""Predictions for labelled samples: scores per class, confusions, the samples with the largest
loss, and the experts of each class.

Shapes: B samples of a batch, N samples read, K classes, or choices.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from polyad.data.sequences.config import Metric
from polyad.data.sequences.samples import form_of
from polyad.train.errors import ConfigError
from polyad.train.experts.by_class import FEW_CLASSES
from polyad.train.reading import Reading
from polyad.train.tasks.samples import ImageSamples, SequenceSamples
from polyad.train.tasks.scores import (
    METRICS,
    ClassScore,
    accuracy,
    scores_of_predictions,
)
from polyad.train.tasks.sequences import SequenceTask

MOST_CHARACTERS = 300
"""Maximum number of characters shown of a text; a quarter of that for a choice."""
MOST_CONFUSIONS = 20
"""Number of most frequent confusions listed."""


class Confusion(NamedTuple):
    """Samples of one class that are predicted as another."""

    true: str
    predicted: str
    samples: int


@dataclass(frozen=True, kw_only=True)
class Example:
    """A sample with a large loss."""

    number: int
    """The sample's number in its split."""
    texts: list[str]
    """Its text as read by the model; empty for an image."""
    true: str
    predicted: str
    loss: float
    probability: float | None
    """Probability of the prediction; None for a number."""
    probability_of_true: float | None


@dataclass(frozen=True, kw_only=True)
class ClassPass:
    """Scores, confusions, examples, and the experts of each class."""

    task: str
    """`classification`, `regression` or `multiple_choice`."""
    data: str
    split: str
    unit: str
    """The name of a sample: sequence, image."""
    samples: int
    """Number of samples read."""
    of_samples: int
    """Number of samples in the whole split."""
    metrics: Mapping[Metric, float]
    loss: float
    """Mean loss."""
    held: Mapping[str, int]
    """Number of samples by class name; empty without classes."""
    scores: Mapping[str, ClassScore]
    """Scores by class name."""
    matrix_KK: npt.NDArray[np.int64] | None
    """Confusion matrix: true classes in rows, predicted ones in columns; None with more than
    `FEW_CLASSES`, and without classes."""
    confusions: list[Confusion]
    """The most frequent ones."""
    examples: list[Example]
    """The samples with the largest loss, the largest first."""
    groups: list[str]
    """The groups by which experts are counted: the classes, or a substitute."""

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "task": self.task,
            "data": self.data,
            "split": self.split,
            f"{self.unit}s": self.samples,
            f"{self.unit}s_in_split": self.of_samples,
            "loss": self.loss,
            **{str(name): value for name, value in self.metrics.items()},
            "per_class": {
                name: {f"{self.unit}s": self.held[name]} | score.to_json()
                for name, score in self.scores.items()
            },
            "confusion_matrix": self.matrix_KK,
            "confusions": self.confusions,
            "largest_losses": self.examples,
            "expert_classes": self.groups,
        }


class Predictions:
    """Collects predictions for images with one class each, or for sequences.

    Args:
        samples: the samples to read.
    """

    blocks: Sequence[int] = ()

    def __init__(self, samples: ImageSamples | SequenceSamples) -> None:
        self._samples, self._parts = samples, list[Tensor]()
        self._names: Sequence[str]
        """Names of the K classes, or of the choices' positions."""
        if isinstance(samples, ImageSamples):
            self._kind, self._names = "classification", samples.task.data.manifest.class_names
        else:
            data = samples.task.data
            self._kind = samples.task.schema.task
            self._names = data.class_names or [f"choice {n}" for n in range(data.choices)]
        self._is_number = self._kind == "regression"

    def add(self, reading: Reading) -> None:
        """Adds a batch."""
        samples, labels_B = self._samples, reading.batch.labels_B
        if isinstance(samples, ImageSamples):
            losses_B, outputs_BK = samples.task.examined(reading.output.float(), labels_B)
            number_B = torch.tensor(samples.numbers)[reading.number_R.cpu()]
        else:
            outputs_BK, losses_B = reading.output
            number_B = torch.from_numpy(samples.row_of)[reading.batch.numbers_B.cpu()]
        if self._is_number:
            unknown_B = torch.full_like(losses_B, torch.nan)
            found = (outputs_BK[:, 0], losses_B, unknown_B, unknown_B)
        else:
            if isinstance(samples, SequenceSamples):
                outputs_BK = outputs_BK.softmax(-1)
            highest_B, predicted_B = outputs_BK.max(-1)
            of_true_B = outputs_BK.gather(-1, labels_B.unsqueeze(-1)).squeeze(-1)
            found = (predicted_B, losses_B, highest_B, of_true_B)
        parts = [part.double().cpu() for part in (number_B, labels_B, *found)]
        self._parts.append(torch.stack(parts))

    def result(self, examples: int) -> ClassPass:
        """Returns the result.

        Args:
            examples: number of samples with the largest loss to keep.

        Raises:
            ConfigError: outputs are not finite.
        """
        found_6N = torch.cat(self._parts, dim=1).numpy()
        number_N, label_N, predicted_N, loss_N, *_ = found_6N
        if not np.isfinite(loss_N).all():
            raise ConfigError(
                "the outputs of the model are not finite: its weights hold NaN or inf, or are too "
                "large"
            )
        if not self._is_number:
            label_N, predicted_N = label_N.astype(int), predicted_N.astype(int)
        names = [] if self._is_number else self._names
        pairs = Counter(zip(label_N.tolist(), predicted_N.tolist(), strict=True)) if names else {}
        wrong = sorted((-count, t, p) for (t, p), count in pairs.items() if t != p)
        matrix_KK = None
        if 0 < len(names) <= FEW_CLASSES:
            classes = range(len(names))
            matrix_KK = np.array([[pairs[t, p] for p in classes] for t in classes])
        task, split, groups = self._samples.task, self._samples.split, self._samples.classes()
        assert groups is not None
        return ClassPass(
            task=self._kind,
            data=task.name,
            split=split,
            unit=task.unit.name,
            samples=len(loss_N),
            of_samples=task.units_of(split),
            metrics=self._metrics(label_N, predicted_N),
            loss=float(loss_N.mean()),
            held={name: int((label_N == label).sum()) for label, name in enumerate(names)},
            scores=scores_of_predictions(names, label_N, predicted_N) if names else {},
            matrix_KK=matrix_KK,
            confusions=[Confusion(names[t], names[p], -n) for n, t, p in wrong[:MOST_CONFUSIONS]],
            examples=[
                self._example(*found_6N[:, n].tolist())
                for n in np.lexsort((number_N, -loss_N))[:examples]
            ],
            groups=groups[0],
        )

    def _metrics(
        self, label_N: npt.NDArray[Any], predicted_N: npt.NDArray[Any]
    ) -> dict[Metric, float]:
        if isinstance(self._samples, ImageSamples):
            return {"accuracy": accuracy(label_N, predicted_N)}
        metrics = self._samples.task.schema.metrics
        return {name: METRICS[name](label_N, predicted_N) for name in metrics}

    def _example(
        self,
        number: float,
        label: float,
        predicted: float,
        loss: float,
        highest: float,
        of_true: float,
    ) -> Example:
        texts, names = list[str](), self._names
        if isinstance(self._samples, SequenceSamples):
            texts, names = described(self._samples.task, self._samples.split, int(number))
        if self._is_number:
            true, found = f"{label:.4g}", f"{predicted:.4g}"
        else:
            true, found = names[int(label)], names[int(predicted)]
        return Example(
            number=int(number),
            texts=texts,
            true=true,
            predicted=found,
            loss=loss,
            probability=None if self._is_number else highest,
            probability_of_true=None if self._is_number else of_true,
        )


def described(task: SequenceTask, split: str, row: int) -> tuple[list[str], Sequence[str]]:
    """Returns a row as text, from the tokens that the model reads, and the names of its classes or
    choices."""
    pieces, choices = task.data.encoded(split).pieces, task.data.choices
    form = form_of(task.model.kind, task.data.tokenizer)
    two = task.schema.pair is not None or bool(task.schema.choices)
    firsts, seconds = [], []
    for sequence in range(row * choices, (row + 1) * choices):
        start, stop = pieces.starts_R1[sequence : sequence + 2]
        ids = pieces.ids_S[start : stop - len(form.after)].tolist()
        begin = pieces.second_R[sequence]
        end_of_first = begin - len(form.between) if two else len(ids)
        firsts.append(task.data.tokenizer.decode(ids[len(form.before) : end_of_first]))
        seconds.append(task.data.tokenizer.decode(ids[begin:]) if two else "")
    if task.schema.choices:
        names = [f"{n}: {short(text, MOST_CHARACTERS // 4)}" for n, text in enumerate(seconds)]
        return [short(firsts[0])], names
    texts = [firsts[0], seconds[0]] if two else firsts
    return [short(text) for text in texts], task.data.class_names


def short(text: str, most: int = MOST_CHARACTERS) -> str:
    """Truncates a text to at most `most` characters, with an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"
