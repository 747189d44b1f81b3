"""Scores of held-out labelled samples, for a split and for single classes.

Benchmark metrics are computed by scikit-learn and scipy.

Shapes: N scored samples, S bins of confidence.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from polyad.data.sequences.config import Metric

Numbers = npt.NDArray[np.generic]


def metric_of(metric: Metric, labels_N: Numbers, predictions_N: Numbers) -> float:
    """Computes a metric as the benchmarks of GLUE do, by scikit-learn and scipy.

    Args:
        metric: `accuracy`, also of choices; `f1`, that of the second class (MRPC and QQP), 0
            without true positives; `macro_f1`, the mean over the classes that occur; `matthews`,
            0 where all predictions are one class (CoLA); `pearson` and `spearman`, 0 where they are
            undefined, as for constant predictions.
        labels_N: Number of each sample's class, or a number.
        predictions_N: The predicted ones.
    """
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    if metric in ("pearson", "spearman"):
        correlate = pearsonr if metric == "pearson" else spearmanr
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # constant numbers have no correlation
            value = correlate(labels_N, predictions_N)[0] if len(labels_N) > 1 else 0.0
        return 0.0 if np.isnan(value) else float(value)
    if metric == "accuracy":
        return float(accuracy_score(labels_N, predictions_N))
    if metric == "matthews":
        return float(matthews_corrcoef(labels_N, predictions_N))
    if metric == "f1":
        return float(f1_score(labels_N == 1, predictions_N == 1, zero_division=0))
    return float(f1_score(labels_N, predictions_N, average="macro", zero_division=0))


TITLES: Mapping[Metric, str] = {
    "accuracy": "accuracy",
    "f1": "F1",
    "macro_f1": "macro F1",
    "matthews": "Matthews",
    "pearson": "Pearson",
    "spearman": "Spearman",
}


def class_scores(
    names: Sequence[str], labels_N: Numbers, predictions_N: Numbers
) -> dict[str, dict[str, Any]]:
    """Computes scores of each class against the others.

    Args:
        names: Names of the classes.
        labels_N: Number of each sample's class.
        predictions_N: Number of its predicted class.

    Returns:
        By class name `precision`, `recall` and `f1`, None where one is 0 / 0, and the number of
        `samples` of the class.
    """
    from sklearn.metrics import precision_recall_fscore_support

    *shares, samples_K = precision_recall_fscore_support(
        labels_N, predictions_N, labels=range(len(names)), zero_division=np.nan
    )
    scores = {}
    for name, samples, *own in zip(names, samples_K, *shares, strict=True):
        numbers = [None if np.isnan(share) else float(share) for share in own]
        scores[name] = {
            "samples": int(samples),
            **dict(zip(("precision", "recall", "f1"), numbers, strict=True)),
        }
    return scores


BINS = 15
"""Number of equal-width bins of the calibration error (Guo et al. 2017)."""


def calibration_error(confidence_N: Numbers, right_N: Numbers) -> float:
    """The expected calibration error: the mean gap of a bin's confidence and its accuracy.

    Args:
        confidence_N: The highest probability of each sample, fp64.
        right_N: Whether its prediction is right.
    """
    bin_N = (np.ceil(confidence_N * BINS).astype(int) - 1).clip(0, BINS - 1)
    gap_S = np.bincount(bin_N, weights=confidence_N - right_N.astype(float), minlength=BINS)
    return float(np.abs(gap_S).sum()) / len(confidence_N)
