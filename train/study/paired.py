"""Comparison of training variants over seeds: means, spread, and paired differences.

Two runs with the same seed read the same batches, and start from the same weights where they share
parameters. The seed's effect on both cancels in their difference, whose spread is what matters.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

CONFIDENCE = 0.95
"""Confidence level: the share of such studies whose interval contains the true mean."""


class Spread(NamedTuple):
    """Mean and spread of a number over several runs."""

    mean: float
    deviation: float
    """Sample standard deviation (n - 1); NaN for a single run."""
    runs: int


class Difference(NamedTuple):
    """The difference between two variants over pairs of runs."""

    mean: float
    deviation: float
    """Sample standard deviation of the pairs' differences; NaN for a single pair."""
    low: float
    """Lower end of the mean's interval; NaN for a single pair."""
    high: float
    pairs: int

    @property
    def excludes_zero(self) -> bool:
        """Whether 0 is outside the interval; False for a single pair, which has no interval."""
        return self.low > 0 or self.high < 0


def spread(values: Sequence[float]) -> Spread:
    """Computes mean and sample standard deviation.

    Args:
        values: finite numbers; if there are none, the mean is NaN.
    """
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return Spread(statistics.fmean(values) if values else math.nan, deviation, len(values))


def paired_difference(values: Sequence[float], baseline: Sequence[float]) -> Difference:
    """Computes the mean difference of pairs and its confidence interval (Student's t).

    Args:
        values: values of one variant, by pair.
        baseline: those of the other, in the same order.

    Returns:
        values - baseline: mean +- t(n - 1) x deviation / sqrt(n) at `CONFIDENCE`, which assumes
        that the differences are normally distributed.
    """
    return interval([a - b for a, b in zip(values, baseline, strict=True)])


def interval(differences: Sequence[float]) -> Difference:
    """Computes the mean of one number per seed or pair, and its interval; see `paired_difference`.

    Args:
        differences: at least one.
    """
    mean, deviation, count = spread(differences)
    if count == 1:
        return Difference(mean, math.nan, math.nan, math.nan, 1)
    half = t_quantile(0.5 + CONFIDENCE / 2, count - 1) / math.sqrt(count) * deviation
    return Difference(mean, deviation, mean - half, mean + half, count)


def t_quantile(probability: float, degrees: int) -> float:
    """The quantile of Student's t distribution.

    Args:
        probability: above 0.5, below 1.
        degrees: degrees of freedom, at least 1.
    """
    low, high = 0.0, 1.0
    while _t_below(high, degrees) < probability:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if _t_below(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return high


def _t_below(t: float, degrees: int) -> float:
    """P(T < t), t >= 0: the finite sums of Abramowitz and Stegun 1964, 26.7.3 and 26.7.4.

    With theta = atan(t / sqrt(n)), the probability within +- t is, for even n, sin(theta) times
    1 + 1/2 cos^2 + (1 3)/(2 4) cos^4 + ... up to cos^(n-2); for odd n, 2/pi times theta +
    sin(theta) times cos + 2/3 cos^3 + ... up to cos^(n-2).
    """
    theta = math.atan(t / math.sqrt(degrees))
    odd = degrees % 2
    term, total = (math.cos(theta) if odd else 1.0), 0.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= math.cos(theta) ** 2 * (power + 1) / (power + 2)
    within = math.sin(theta) * total
    if odd:
        within = (theta + within) * 2 / math.pi
    return 0.5 + within / 2
