"""Which runs of a study fit into a given time, the most informative first.

What is worth training for is a goal: the runs that a grid needs before anything can be compared, or
a pair, a variant's run and the baseline's with the same seed. Nothing here reads a file or a clock.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from polyad.launch.study.times import spread_over
from polyad.train.study.paired import paired_difference

RunKey = tuple[str, int]
"""Name of a variant, at its point of the grid, and seed."""


class Goal(NamedTuple):
    """Something that is worth training for."""

    runs: tuple[RunKey, ...]
    """All that it needs, each after those that it begins with; some may be finished."""
    variant: str = ""
    """Whose pair it is, as the study's file calls it; empty: it is a grid's, or the baseline's."""


class Standing(NamedTuple):
    """What is known of a variant beside the baseline."""

    pairs: int
    nearness: float = 0.0
    """|mean| / half width of the interval: above 1 it excludes 0, and the variant is decided."""


def standing(values: Sequence[float], baseline: Sequence[float]) -> Standing:
    """What pairs say of a variant.

    Args:
        values: scores of the variant, by pair.
        baseline: of the baseline, in the same order.
    """
    if len(values) < 2:
        return Standing(len(values))
    found = paired_difference(values, baseline)
    half = (found.high - found.low) / 2
    if not half:  # all pairs differ by the same
        return Standing(found.pairs, math.inf if found.mean else 0.0)
    return Standing(found.pairs, abs(found.mean) / half)


def rank(known: Standing) -> tuple[float, ...]:
    """How informative one more pair of a variant is: the lowest the most.

    With no pair nothing is known, with one there is no interval. From two pairs on those that are
    not decided come before those that are, the nearest to it first.

    Args:
        known: of the variant.
    """
    if known.pairs < 2:
        return (known.pairs,)
    return (2, known.nearness > 1, -known.nearness)


def fitting(
    goals: Sequence[Goal],
    known: Mapping[str, Standing],
    seconds: Mapping[RunKey, float],
    budget: float,
    jobs: int = 1,
    going: Sequence[float] = (),
) -> list[RunKey]:
    """Chooses runs that fit into a time, and their order.

    A goal that does not fit into what is left of it is passed over for the next one that does.

    Args:
        goals: in the order of the study; those of a grid are taken before all pairs.
        known: of each variant with pairs among the goals.
        seconds: that each run takes which is not finished; NaN, which never fits, if that is not
            known. A run that is not here is finished or goes on.
        budget: seconds.
        jobs: runs that are trained at a time.
        going: seconds until runs end that go on.

    Returns:
        The runs, each after those that it begins with.
    """
    left, now, chosen = [*goals], dict(known), list[RunKey]()
    while left:
        best = min(left, key=lambda goal: rank(now[goal.variant]) if goal.variant else (-1,))
        left.remove(best)
        new = [run for run in best.runs if run in seconds and run not in chosen]
        times = [*going, *(seconds[run] for run in (*chosen, *new))]
        if new and not spread_over(jobs, times) <= budget:  # NaN neither
            continue
        chosen += new
        if best.variant:
            now[best.variant] = now[best.variant]._replace(pairs=now[best.variant].pairs + 1)
    return chosen
