"""Tests of scores by hand-worked numbers, and beside scikit-learn."""

import numpy as np
import pytest

from polyad.train.tasks.labelled import calibration_error, class_scores, metric_of

LABELS = np.array([1, 1, 1, 0, 0, 0, 0, 0])
FOUND = np.array([1, 1, 0, 1, 0, 0, 0, 0])
# True positives 2, false positives 1, false negatives 1, true negatives 4.


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("accuracy", 6 / 8),
        ("f1", 2 * 2 / (2 * 2 + 1 + 1)),
        ("macro_f1", (4 / 6 + 8 / 10) / 2),
        ("matthews", (2 * 4 - 1 * 1) / (3 * 3 * 5 * 5) ** 0.5),
    ],
)
def test_of_classes(name, expected):
    assert metric_of(name, LABELS, FOUND) == pytest.approx(expected)


def test_of_numbers():
    labels, found = np.array([0.0, 1.0, 2.0, 3.0]), np.array([0.0, 1.0, 4.0, 3.0])
    # Deviations -1.5, -0.5, 0.5, 1.5 and -2, -1, 2, 1: their products sum to 6.
    assert metric_of("pearson", labels, found) == pytest.approx(6 / (5 * 10) ** 0.5)
    # Ranks 0, 1, 2, 3 and 0, 1, 3, 2: 1 - 6 (0 + 0 + 1 + 1) / (4 x 15).
    assert metric_of("spearman", labels, found) == pytest.approx(0.8)


def test_what_is_not_defined_counts_as_zero():
    same = np.zeros(4)
    assert metric_of("pearson", np.arange(4.0), same) == 0
    assert metric_of("spearman", np.arange(4.0), same) == 0
    assert metric_of("matthews", LABELS, np.zeros(8, int)) == 0
    assert metric_of("f1", LABELS, np.zeros(8, int)) == 0
    assert metric_of("pearson", np.ones(1), np.ones(1)) == 0


def test_scores_of_classes_by_hand():
    labels, predictions = np.array([0, 0, 0, 1, 1, 2]), np.array([0, 0, 1, 1, 4, 1])
    scores = class_scores(["a", "b", "c", "d", "e"], labels, predictions)
    assert scores == {
        "a": {"samples": 3, "precision": 1.0, "recall": pytest.approx(2 / 3), "f1": 0.8},
        "b": {"samples": 2, "precision": pytest.approx(1 / 3), "recall": 0.5, "f1": 0.4},
        "c": {"samples": 1, "precision": None, "recall": 0.0, "f1": 0.0},
        "d": {"samples": 0, "precision": None, "recall": None, "f1": None},
        "e": {"samples": 0, "precision": 0.0, "recall": None, "f1": 0.0},
    }


def test_calibration_by_hand():
    # Confidences 3/4 of a right answer and 9/10 of a wrong one: (1/4 + 9/10) / 2.
    assert calibration_error(np.array([0.75, 0.9]), np.array([True, False])) == pytest.approx(0.575)
