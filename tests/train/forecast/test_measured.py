"""The interval of a median: its ranks by the sign test, and how often it holds the median."""

import random
import statistics

import pytest

from polyad.train.forecast.measured import CONFIDENCE, interval


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, None), (4, None), (5, (0, 4)), (7, (0, 6)), (8, (1, 6)), (9, (1, 7)), (20, (5, 14))],
)
def test_the_interval_has_the_ranks_of_the_sign_test(count, expected):
    values = [float(value) for value in range(count)]
    random.Random(0).shuffle(values)
    assert interval(values) == expected


@pytest.mark.parametrize("count", [5, 9, 15])
def test_the_interval_holds_the_median_as_often_as_it_says(count):
    draw = random.Random(count)
    held = []
    for _ in range(4000):
        low, high = interval([draw.lognormvariate(0, 1) for _ in range(count)])
        held.append(low <= 1 <= high)  # the distribution's median
    assert CONFIDENCE - 0.01 < statistics.fmean(held) < 0.99
