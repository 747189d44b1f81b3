"""Whether variants with more of a measure have a better score: rank correlations over variants.

Within a seed every variant saw the same batches, so ranks are compared there, and seeds are what
repeats the comparison: the mean over seeds has an interval, one correlation has none.
"""

import math
from collections.abc import Mapping, Sequence

from scipy.stats import spearmanr

from polyad.launch.study.result import Relation
from polyad.train.study.paired import interval

LEAST = 5
"""Variants that make a correlation of ranks: of four, even perfect order comes by chance."""


BySeed = Mapping[int, Mapping[str, Mapping[str, float]]]
"""By seed and variant the measures of a run, by name."""


def relations(measured: BySeed, score: str) -> dict[str, Relation]:
    """Correlates every measure with the score, within each seed.

    Args:
        measured: of the runs that are compared; the score is one of the measures.
        score: the one to look at.

    Returns:
        By the measure's name Spearman's rank correlation of each seed, their mean and its interval
        by the t distribution over seeds, as far as it is from -1 to 1. Only measures that at least
        `LEAST` variants have, and that are not the same for all. Seeds of which some of these
        variants are not finished are left out.
    """
    names = {name: None for known in measured.values() for each in known.values() for name in each}
    found = {name: _relation(measured, name, score) for name in names if name != score}
    return {name: relation for name, relation in found.items() if relation is not None}


def rank_correlation(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Spearman's; equal numbers share the mean of their ranks.

    Args:
        ours: one number of each variant.
        theirs: the other, in the same order.

    Returns:
        From -1 to 1; NaN where one of them is the same for all, or not finite.
    """
    alike = min(ours) == max(ours) or min(theirs) == max(theirs)
    return math.nan if alike else float(spearmanr(ours, theirs).statistic)


def _relation(measured: BySeed, name: str, score: str) -> Relation | None:
    """The correlation of one measure; None if too few variants have it."""
    having = {v for known in measured.values() for v, each in known.items() if name in each}
    if len(having) < LEAST:
        return None
    values = {}
    for seed, known in measured.items():
        pairs = [(known[v][name], known[v][score]) for v in known if name in known[v]]
        if len(pairs) == len(having):
            correlation = rank_correlation(*zip(*pairs, strict=True))
            if math.isfinite(correlation):
                values[seed] = correlation
    if not values:
        return None
    mean = interval(list(values.values()))
    return Relation(
        mean=mean.mean,
        deviation=mean.deviation,
        low=max(mean.low, -1.0),
        high=min(mean.high, 1.0),
        pairs=mean.pairs,
        variants=len(having),
        seeds=list(values),
        values=list(values.values()),
        excludes_zero=mean.excludes_zero,
    )
