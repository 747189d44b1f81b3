"""Scores as benchmarks define them, by scikit-learn and scipy; and those of single classes.

Shapes: N samples, K classes.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from polyad.data.sequences.config import Metric

Numbers = npt.NDArray[np.generic]


def accuracy(labels_N: Numbers, predictions_N: Numbers) -> float:
    """Share of the samples whose class, or choice, is right."""
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(labels_N, predictions_N))


def f1(labels_N: Numbers, predictions_N: Numbers) -> float:
    """F1 of the second class, as GLUE scores MRPC and QQP; 0 where nothing is found."""
    from sklearn.metrics import f1_score

    return float(f1_score(labels_N == 1, predictions_N == 1, zero_division=0))


def macro_f1(labels_N: Numbers, predictions_N: Numbers) -> float:
    """The mean over classes of the F1 of each, among those that labels or predictions have."""
    from sklearn.metrics import f1_score

    return float(f1_score(labels_N, predictions_N, average="macro", zero_division=0))


def matthews(labels_N: Numbers, predictions_N: Numbers) -> float:
    """Matthews' correlation, as GLUE scores CoLA; 0 where all predictions are one class."""
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(labels_N, predictions_N))


def pearson(labels_N: Numbers, predictions_N: Numbers) -> float:
    """Pearson's correlation; 0 where it is not defined, as of equal predictions."""
    from scipy.stats import pearsonr

    return _correlation(pearsonr, labels_N, predictions_N)


def spearman(labels_N: Numbers, predictions_N: Numbers) -> float:
    """Spearman's correlation of ranks; 0 where it is not defined."""
    from scipy.stats import spearmanr

    return _correlation(spearmanr, labels_N, predictions_N)


def _correlation(
    correlate: Callable[..., tuple[float, float]], labels_N: Numbers, predictions_N: Numbers
) -> float:
    if len(labels_N) < 2:
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of equal numbers, for which there is no correlation
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
    """How well one class is told from the others; None where the share is of nothing."""

    predicted: int
    """Samples that are predicted to be of it."""
    right: int
    """Those of them that are."""
    precision: float | None
    """right / predicted."""
    recall: float | None
    """right / samples of the class."""
    f1: float | None
    """The harmonic mean of both."""


def class_scores(
    names: Sequence[str], held_K: Numbers, predicted_K: Numbers, right_K: Numbers
) -> dict[str, ClassScore]:
    """Scores of single classes, from counts, which processes can add up.

    Args:
        names: Of the classes.
        held_K: Samples of each class.
        predicted_K: Samples that are predicted to be of it.
        right_K: Those that are of it and predicted to be.

    Returns:
        By name, as scikit-learn's `precision_recall_fscore_support` has them.
    """
    counts = (np.asarray(each_K).tolist() for each_K in (held_K, predicted_K, right_K))
    return {
        name: ClassScore(
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
    """Scores of single classes, from the number of each sample's class and of its prediction.

    Args:
        names: Of the classes.
        labels_N: The right classes.
        predictions_N: Predicted ones.
    """
    of_samples = (labels_N, predictions_N, labels_N[labels_N == predictions_N])
    held_K, predicted_K, right_K = (np.bincount(x, minlength=len(names)) for x in of_samples)
    return class_scores(names, held_K, predicted_K, right_K)
