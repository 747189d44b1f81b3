"""What a pass over labelled samples finds: scores of each class, confusions, the samples with the
largest loss, and the experts of each class.

Shapes: B samples of a batch, N all that are read, K classes, or choices.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from polyad.data.sequences.schemas import Metric
from polyad.train.errors import ConfigError
from polyad.train.experts.report.by_class import LevelByClass
from polyad.train.experts.routing_measures import Division
from polyad.train.tasks.benchmark_metrics import ClassScore, scores_of_predictions

FEW_CLASSES = 20
"""Up to so many classes confusions are a whole matrix."""
MOST_CONFUSIONS = 20
"""The most frequent confusions that are named."""


class Confusion(NamedTuple):
    """Samples of one class that are predicted to be of another."""

    true: str
    predicted: str
    samples: int


@dataclass(frozen=True, kw_only=True)
class Example:
    """A sample with a large loss."""

    number: int
    """In its split."""
    texts: list[str]
    """What the model reads of it; of an image none."""
    true: str
    predicted: str
    loss: float
    probability: float | None
    """Of what is predicted; None for a number."""
    probability_of_true: float | None


class Described(NamedTuple):
    """What is said of a sample for people."""

    texts: list[str]
    names: Sequence[str]
    """Of the K classes, or of this sample's choices."""


@dataclass(frozen=True, kw_only=True)
class ClassPass:
    """Scores, confusions, examples, and the experts of each class."""

    task: str
    """`classification`, `regression` or `multiple_choice`."""
    data: str
    split: str
    unit: str
    """What a sample is called: sequence, image."""
    samples: int
    """Samples that were read."""
    of_samples: int
    """Samples of the whole split."""
    metrics: Mapping[Metric, float]
    loss: float
    """The mean."""
    held: Mapping[str, int]
    """Samples of each class, by its name; without classes nothing."""
    scores: Mapping[str, ClassScore]
    """By the name of the class."""
    matrix_KK: npt.NDArray[np.int64] | None
    """How many samples of each class (row) are predicted to be of each (column); None with more
    than `FEW_CLASSES`, and without classes."""
    confusions: list[Confusion]
    """The most frequent ones."""
    examples: list[Example]
    """Those with the largest loss, the largest first."""
    groups: list[str]
    """What experts are counted by: the classes, or what stands for them."""
    layers: Mapping[str, list[LevelByClass]]
    """Of each layer its levels, by the layer's name."""
    division: Division
    """How experts divide the work: the same, and the entropies of gates."""

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
                name: {f"{self.unit}s": self.held[name]} | score._asdict()
                for name, score in self.scores.items()
            },
            "confusion_matrix": None if self.matrix_KK is None else self.matrix_KK.tolist(),
            "confusions": [confusion._asdict() for confusion in self.confusions],
            "largest_losses": [vars(example) for example in self.examples],
            "expert_classes": self.groups,
            "experts": {
                name: [level.to_json() for level in levels] for name, levels in self.layers.items()
            },
            "entropies": {
                name: [level.to_json() for level in levels]
                for name, levels in self.division.entropies.items()
            },
        }


class Outcomes:
    """Predictions and losses of single samples, as a pass finds them."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    def add(self, number_B: Tensor, labels_B: Tensor, outputs_BK: Tensor, losses_B: Tensor) -> None:
        """Adds samples of which one output is right.

        Args:
            number_B: of each in its split.
            labels_B: the right ones.
            outputs_BK: probabilities.
            losses_B: in nats.
        """
        highest_B, predicted_B = outputs_BK.max(-1)
        of_true_B = outputs_BK.gather(-1, labels_B.unsqueeze(-1)).squeeze(-1)
        self._keep(number_B, labels_B, predicted_B, losses_B, highest_B, of_true_B)

    def add_numbers(
        self, number_B: Tensor, labels_B: Tensor, outputs_B: Tensor, losses_B: Tensor
    ) -> None:
        """Adds samples whose label is a number.

        Args:
            number_B: of each in its split.
            labels_B: the right numbers.
            outputs_B: predicted ones.
            losses_B: squared errors.
        """
        unknown_B = torch.full_like(losses_B, torch.nan)
        self._keep(number_B, labels_B, outputs_B, losses_B, unknown_B, unknown_B)

    def _keep(self, *parts: Tensor) -> None:
        self._parts.append(torch.stack([part.double().cpu() for part in parts]))

    def result(
        self,
        *,
        names: Sequence[str],
        numbers: bool,
        examples: int,
        describe: Callable[[int], Described],
        measure: Callable[[npt.NDArray[Any], npt.NDArray[Any]], dict[Metric, float]],
    ) -> dict[str, Any]:
        """The fields of `ClassPass` that follow from them.

        Args:
            names: of the classes, or of the places of choices; of numbers none.
            numbers: whether labels are numbers.
            examples: how many are kept.
            describe: says for people what a sample of a number is.
            measure: metrics from labels and predictions.

        Raises:
            ConfigError: losses are not finite.
        """
        found_6N = torch.cat(self._parts, dim=1).numpy()
        number_N, labels_N, predicted_N, losses_N, highest_N, of_true_N = found_6N
        if not np.isfinite(losses_N).all():
            raise ConfigError(
                "the outputs of the model are not finite: its weights hold NaN or inf, or are too "
                "large"
            )
        if not numbers:
            labels_N, predicted_N = labels_N.astype(int), predicted_N.astype(int)
        shown = np.lexsort((number_N, -losses_N))[:examples]
        return {
            "samples": len(losses_N),
            "loss": float(losses_N.mean()),
            "metrics": measure(labels_N, predicted_N),
            "examples": [
                _example(
                    describe(int(number_N[n])),
                    number=int(number_N[n]),
                    label=labels_N[n].item(),
                    predicted=predicted_N[n].item(),
                    loss=float(losses_N[n]),
                    probabilities=None if numbers else (float(highest_N[n]), float(of_true_N[n])),
                )
                for n in shown
            ],
            **of_classes([] if numbers else names, labels_N, predicted_N),
        }


def of_classes(
    names: Sequence[str], labels_N: npt.NDArray[Any], predicted_N: npt.NDArray[Any]
) -> dict[str, Any]:
    """The fields of `ClassPass` about single classes.

    Args:
        names: of the K classes; none: there are none.
        labels_N: numbers of the right classes.
        predicted_N: of predicted ones.
    """
    if not names:
        return {"held": {}, "scores": {}, "matrix_KK": None, "confusions": []}
    classes = len(names)
    held_K = np.bincount(labels_N, minlength=classes)
    pairs = Counter(zip(labels_N.tolist(), predicted_N.tolist(), strict=True))
    matrix_KK = None
    if classes <= FEW_CLASSES:
        matrix_KK = np.array([[pairs[t, p] for p in range(classes)] for t in range(classes)])
    wrong = sorted((-count, t, p) for (t, p), count in pairs.items() if t != p)
    return {
        "held": dict(zip(names, held_K.tolist(), strict=True)),
        "scores": scores_of_predictions(names, labels_N, predicted_N),
        "matrix_KK": matrix_KK,
        "confusions": [Confusion(names[t], names[p], -n) for n, t, p in wrong[:MOST_CONFUSIONS]],
    }


def _example(
    said: Described,
    *,
    number: int,
    label: float,
    predicted: float,
    loss: float,
    probabilities: tuple[float, float] | None,
) -> Example:
    if probabilities is None:
        true, found = f"{label:.4g}", f"{predicted:.4g}"
    else:
        true, found = said.names[int(label)], said.names[int(predicted)]
    highest, of_true = probabilities or (None, None)
    return Example(
        number=number,
        texts=said.texts,
        true=true,
        predicted=found,
        loss=loss,
        probability=highest,
        probability_of_true=of_true,
    )
