"""Scores as benchmarks define them, by scikit-learn and scipy.

Shapes: N samples.
"""

import warnings
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from data.sequences.schemas import Metric

Numbers = npt.NDArray[np.generic]


def accuracy(labels_N: Numbers, predictions_N: Numbers) -> float:
    """Share of the samples whose class, or choice, is right."""
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(labels_N, predictions_N))


def f1(labels_N: Numbers, predictions_N: Numbers) -> float:
    """F1 of class 1, as GLUE scores MRPC and QQP; 0 where nothing is found."""
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
