"""Scores of held-out labelled samples, for a split and for single classes.

Benchmark metrics are computed by scikit-learn and scipy.

Shapes: B images of a micro-batch, K classes, S bins of confidence, N scored samples.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from polyad.data.sequences.config import Metric
from polyad.parallel import comm

Numbers = npt.NDArray[np.generic]


def accuracy(labels_N: Numbers, predictions_N: Numbers) -> float:
    """Share of samples whose predicted class, or choice, is right."""
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(labels_N, predictions_N))


def f1(labels_N: Numbers, predictions_N: Numbers) -> float:
    """F1 of the second class, as GLUE scores MRPC and QQP; 0 without true positives."""
    from sklearn.metrics import f1_score

    return float(f1_score(labels_N == 1, predictions_N == 1, zero_division=0))


def macro_f1(labels_N: Numbers, predictions_N: Numbers) -> float:
    """Mean F1 over the classes that occur in labels or predictions."""
    from sklearn.metrics import f1_score

    return float(f1_score(labels_N, predictions_N, average="macro", zero_division=0))


def matthews(labels_N: Numbers, predictions_N: Numbers) -> float:
    """Matthews' correlation, as GLUE scores CoLA; 0 where all predictions are one class."""
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(labels_N, predictions_N))


def pearson(labels_N: Numbers, predictions_N: Numbers) -> float:
    """Pearson's correlation; 0 where undefined, as for constant predictions."""
    from scipy.stats import pearsonr

    return _correlation(pearsonr, labels_N, predictions_N)


def spearman(labels_N: Numbers, predictions_N: Numbers) -> float:
    """Spearman's rank correlation; 0 where undefined."""
    from scipy.stats import spearmanr

    return _correlation(spearmanr, labels_N, predictions_N)


def _correlation(
    correlate: Callable[..., tuple[float, float]], labels_N: Numbers, predictions_N: Numbers
) -> float:
    if len(labels_N) < 2:
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # constant numbers have no correlation
        found = float(correlate(labels_N, predictions_N)[0])
    return 0.0 if np.isnan(found) else found


METRICS: Mapping[Metric, Callable[[Numbers, Numbers], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "macro_f1": macro_f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}
TITLES: Mapping[Metric, str] = {
    "accuracy": "accuracy",
    "f1": "F1",
    "macro_f1": "macro F1",
    "matthews": "Matthews",
    "pearson": "Pearson",
    "spearman": "Spearman",
}


class ClassScore(NamedTuple):
    """Scores of one class against the others; None where a share is 0 / 0."""

    held: int
    """Samples of the class."""
    predicted: int
    """Samples predicted as this class."""
    right: int
    """Number of these that belong to the class."""
    precision: float | None
    """right / predicted."""
    recall: float | None
    """right / samples of the class."""
    f1: float | None
    """The harmonic mean of both."""

    def to_json(self) -> dict[str, Any]:
        """JSON values, without the number of samples, whose key depends on the kind of data."""
        found = self._asdict()
        del found["held"]
        return found


def class_scores(
    names: Sequence[str], held_K: Numbers, predicted_K: Numbers, right_K: Numbers
) -> dict[str, ClassScore]:
    """Computes scores per class from counts, which can be summed over processes.

    Args:
        names: Names of the classes.
        held_K: Samples of each class.
        predicted_K: Samples predicted as the class.
        right_K: Samples of the class that are predicted as such.

    Returns:
        Scores by class name, as in scikit-learn's `precision_recall_fscore_support`.
    """
    counts = (np.asarray(each_K).tolist() for each_K in (held_K, predicted_K, right_K))
    return {
        name: ClassScore(
            held=int(held),
            predicted=int(predicted),
            right=int(right),
            precision=right / predicted if predicted else None,
            recall=right / held if held else None,
            f1=2 * right / (held + predicted) if held + predicted else None,
        )
        for name, held, predicted, right in zip(names, *counts, strict=True)
    }


def scores_of_predictions(
    names: Sequence[str], labels_N: Numbers, predictions_N: Numbers
) -> dict[str, ClassScore]:
    """Computes scores per class from the labels and predictions of single samples.

    Args:
        names: Names of the classes.
        labels_N: Number of each sample's class.
        predictions_N: Number of its predicted class.
    """
    of_samples = (labels_N, predictions_N, labels_N[labels_N == predictions_N])
    held_K, predicted_K, right_K = (np.bincount(x, minlength=len(names)) for x in of_samples)
    return class_scores(names, held_K, predicted_K, right_K)


BINS = 15
"""Number of equal-width bins of the calibration error (Guo et al. 2017)."""


class Totals(Protocol):
    """The scores of some images."""

    @property
    def images_scored(self) -> int:
        """Number of images."""

    @property
    def accuracies(self) -> Mapping[str, float | None]:
        """The accuracy of each class, or attribute; None for a class without images."""

    def to_json(self) -> dict[str, Any]:
        """JSON values."""


@dataclass(frozen=True, kw_only=True)
class ClassTotals:
    """The scores of images that have one class each."""

    top1: float
    top5: float
    loss: float
    calibration_error: float
    images_scored: int
    per_class: Mapping[str, ClassScore]

    @property
    def accuracies(self) -> Mapping[str, float | None]:
        """The accuracy of each class, which is its recall."""
        return {name: each.recall for name, each in self.per_class.items()}

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        per_class = {
            name: {"accuracy": each.recall, "images": each.held} | each.to_json()
            for name, each in self.per_class.items()
        }
        return vars(self) | {"per_class": per_class}


class Counted(Protocol):
    """Sums over images, from which all scores are computed."""

    def add(self, logits_BK: Tensor, labels_B: Tensor, losses_B: Tensor) -> None:
        """Counts images; none may be padding of the batch."""

    def result(self, world: comm.World, names: Sequence[str]) -> Totals:
        """The scores over all processes."""


class CountedClasses:
    """Sums over images that have one class each.

    Args:
        classes: K.
        device: Device of the logits.
        probabilities: Maps logits to class probabilities [B, K]; the highest is the confidence.
    """

    def __init__(
        self, classes: int, device: torch.device, probabilities: Callable[[Tensor], Tensor]
    ) -> None:
        self._probabilities = probabilities
        self._totals_4 = torch.zeros(4, dtype=torch.float64, device=device)
        self._bins_S3 = torch.zeros(BINS, 3, dtype=torch.float64, device=device)
        self._classes_3K = torch.zeros(3, classes, dtype=torch.float64, device=device)

    def add(self, logits_BK: Tensor, labels_B: Tensor, losses_B: Tensor) -> None:
        """Counts images; none may be padding of the batch."""
        highest_B5 = logits_BK.topk(min(5, logits_BK.shape[-1]), dim=-1).indices
        hits_B5 = highest_B5 == labels_B.unsqueeze(-1)
        right_B = hits_B5[:, 0].double()
        ones_B = torch.ones_like(right_B)
        sums = (losses_B.double(), right_B, hits_B5.any(-1).double(), ones_B)
        self._totals_4 += torch.stack([each_B.sum() for each_B in sums])
        confidence_B = self._probabilities(logits_BK).amax(-1).double()
        bin_B = (confidence_B * BINS).ceil().long().sub(1).clamp(0, BINS - 1)
        self._bins_S3.index_add_(0, bin_B, torch.stack([confidence_B, right_B, ones_B], dim=-1))
        held_K, predicted_K, right_K = self._classes_3K
        held_K.index_add_(0, labels_B, ones_B)
        predicted_K.index_add_(0, highest_B5[:, 0], ones_B)
        right_K.index_add_(0, labels_B, right_B)

    def result(self, world: comm.World, names: Sequence[str]) -> ClassTotals:
        """The scores over all processes."""
        parts = [self._totals_4, self._bins_S3.flatten(), self._classes_3K.flatten()]
        summed = comm.sum_over_samples(torch.cat(parts), world).cpu()
        totals_4, bins, classes = torch.split(summed, [len(part) for part in parts])
        loss, right, among_five, count = totals_4.tolist()
        bins_S3 = bins.view(BINS, 3)
        gap_S = (bins_S3[:, 0] - bins_S3[:, 1]).abs()
        held_K, predicted_K, right_K = classes.view(3, -1).numpy()
        return ClassTotals(
            top1=right / count,
            top5=among_five / count,
            loss=loss / count,
            calibration_error=float(gap_S.sum()) / count,
            images_scored=int(count),
            per_class=class_scores(names, held_K, predicted_K, right_K),
        )


class CountedDomains:
    """Sums over the images of each domain.

    Args:
        domains_N: The number of each image's domain; None: there are no domains.
        counting: Makes the sums of one domain.
    """

    def __init__(
        self, domains_N: npt.NDArray[np.integer] | None, counting: Callable[[], Counted]
    ) -> None:
        numbers = [] if domains_N is None else np.unique(domains_N).tolist()
        self._domains_N = None if domains_N is None else torch.from_numpy(domains_N)
        self._counted: dict[int, Counted] = {number: counting() for number in numbers}

    def add(self, logits_BK: Tensor, labels_B: Tensor, losses_B: Tensor, numbers_B: Tensor) -> None:
        """Counts images; none may be padding of the batch.

        Args:
            logits_BK: The model's logits.
            labels_B: The classes, or attributes [B, K].
            losses_B: Loss of each image.
            numbers_B: Indices of these images among the N, on the CPU.
        """
        if self._domains_N is None:
            return
        domains_B = self._domains_N[numbers_B]
        for domain, counted in self._counted.items():
            inside = (domains_B == domain).nonzero().flatten().to(logits_BK.device)
            if len(inside):
                counted.add(logits_BK[inside], labels_B[inside], losses_B[inside])

    def results(self, world: comm.World, names: Sequence[str]) -> Iterator[tuple[int, Totals]]:
        """Yields the scores per domain over all processes, which have the same domains.

        Yields:
            The number of a domain, and its scores.
        """
        for domain, counted in self._counted.items():
            yield domain, counted.result(world, names)
