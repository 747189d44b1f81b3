"""Validation over training: each variant beside the baseline, and whether the difference closes.

Runs of one seed see the same batches, so a difference at a step is one of a pair, as at the end.

`closing` asks whether a difference d goes to zero, by a straight line in the logarithm of the
units u seen, for each seed by least squares: d = a + b ln u. Losses fall about as evenly in ln u
as they do in anything that needs no more than two numbers. The line is fitted on what comes after
the first quarter of training, its last two doublings: before that the learning rate rises, losses
fall steeply, and differences tell of the start.

What the extrapolation is worth: it says where to look with a longer study, and no more. The
interval has in it what seeds differ by, and nothing of whether the line goes on straight; a
difference that levels off, or comes back, looks the same until then. Where the learning rate falls
to the end, a longer training has another one at the same step, so its differences there may be
others, too. Beyond some times the training that was seen it says next to nothing.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from polyad.train.study.paired import confidence_factor, interval, paired_difference, spread

FEWEST_STEPS, FEWEST_SEEDS = 4, 2
"""With which a difference is fitted."""
LEFT_OUT = 0.25
"""Share of training, from its start, that is not fitted."""

Run = Mapping[str, Any]
Pair = tuple[float, float, float]
"""Units seen, one score, and the baseline's."""


class Line(NamedTuple):
    """A straight line through a seed's differences."""

    at_end: float
    """Its height where training ends."""
    slope: float
    """Its change for each 1 of ln(units)."""


def curve(
    runs: Mapping[int, Run], baseline: Mapping[int, Run] | None, units: str
) -> list[dict[str, Any]]:
    """A variant's validations, step by step, beside the baseline's of the same seed.

    Args:
        runs: by seed, with `validations`.
        baseline: the same of the baseline, whose steps alone count; None: this is the baseline.
        units: what training is counted in, as `tokens`.

    Returns:
        JSON values, of each step: the units seen (the mean over seeds), the score's mean and spread
        over seeds, and the difference over pairs, None for the baseline. Nothing of runs that were
        validated at their end alone.
    """
    pairs = _pairs(runs, runs if baseline is None else baseline, units)
    steps = sorted({step for of_seed in pairs.values() for step in of_seed})
    found = []
    for step in steps if len(steps) > 1 else ():
        known = {seed: of_seed[step] for seed, of_seed in pairs.items() if step in of_seed}
        seen, ours, theirs = zip(*known.values(), strict=True)
        difference = paired_difference(ours, theirs)
        beside = difference._asdict() | {
            "seeds": list(known),
            "differences": [one - other for one, other in zip(ours, theirs, strict=True)],
            "excludes_zero": difference.excludes_zero,
        }
        found.append(
            {
                "step": step,
                units: round(statistics.fmean(seen)),
                "score": spread(ours)._asdict(),
                "difference": None if baseline is None else beside,
            }
        )
    return found


def closing(
    runs: Mapping[int, Run], baseline: Mapping[int, Run], units: str
) -> dict[str, Any] | None:
    """Whether the difference to the baseline goes to zero, and where; see the head of this file.

    Args:
        runs: by seed, with `validations`.
        baseline: the same of the baseline.
        units: what training is counted in.

    Returns:
        JSON values: the seeds, the units from and to which lines were fitted, `slope` for each 1 of
        ln(units) and `at_end`, the line where training ends, each with its interval over seeds; and
        `crossing`, the units at which the mean line is zero, with an interval. That is None unless
        the interval of `at_end` leaves 0 out and that of the slope points to 0 as a whole. None in
        all with fewer than `FEWEST_SEEDS` seeds with `FEWEST_STEPS` steps.
    """
    pairs = _pairs(runs, baseline, units)
    end = max((pair[0] for of_seed in pairs.values() for pair in of_seed.values()), default=0.0)
    late = {
        seed: [pair for pair in of_seed.values() if pair[0] > LEFT_OUT * end]
        for seed, of_seed in pairs.items()
    }
    late = {seed: each for seed, each in late.items() if len(each) >= FEWEST_STEPS}
    if len(late) < FEWEST_SEEDS:
        return None
    lines = [_line(each, end) for each in late.values()]
    slopes, ends = [line.slope for line in lines], [line.at_end for line in lines]
    slope, at_end = interval(slopes), interval(ends)
    closes = slope.high < 0 < at_end.low or at_end.high < 0 < slope.low
    return {
        "seeds": list(late),
        f"from_{units}": round(min(pair[0] for each in late.values() for pair in each)),
        f"to_{units}": round(end),
        "slope": slope._asdict() | {"slopes": slopes, "excludes_zero": slope.excludes_zero},
        "at_end": at_end._asdict() | {"excludes_zero": at_end.excludes_zero},
        "crossing": _crossing(lines, end) if closes else None,
    }


def _pairs(
    runs: Mapping[int, Run], baseline: Mapping[int, Run], units: str
) -> dict[int, dict[int, Pair]]:
    """By seed and step, of what both have."""
    found = {}
    for seed in runs:
        ours, theirs = (
            {each["step"]: each for each in of.get(seed, {}).get("validations", ())}
            for of in (runs, baseline)
        )
        found[seed] = {
            step: (each[units], each["score"], theirs[step]["score"])
            for step, each in ours.items()
            if step in theirs
        }
    return found


def _line(pairs: Sequence[Pair], end: float) -> Line:
    """By least squares, over the logarithm of the units."""
    logs = [math.log(seen / end) for seen, _, _ in pairs]
    differences = [ours - theirs for _, ours, theirs in pairs]
    slope, at_end = statistics.linear_regression(logs, differences)
    return Line(at_end, slope)


def _crossing(lines: Sequence[Line], end: float) -> dict[str, float]:
    """Where the mean line is zero: Fieller's interval of a ratio of two means.

    At any x = ln(units / end), the seeds' lines have heights a + b x, whose mean has an interval by
    the t distribution. The interval here is of all x at which that has 0 inside: between the roots
    of (A + B x)^2 = t^2 (s_aa + 2 s_ab x + s_bb x^2) / n, with means A and B and (co)variances s.
    It ends because the interval of B leaves 0 out, and lies behind the end of training because the
    interval of A does.
    """
    heights, slopes = [line.at_end for line in lines], [line.slope for line in lines]
    a, b = statistics.fmean(heights), statistics.fmean(slopes)
    factor = confidence_factor(len(lines)) ** 2
    square = b * b - factor * statistics.variance(slopes)
    half = a * b - factor * statistics.covariance(heights, slopes)
    constant = a * a - factor * statistics.variance(heights)
    root = math.sqrt(max(half * half - square * constant, 0.0))
    places = (-a / b, (-half - root) / square, (-half + root) / square)
    return dict(zip(("units", "low", "high"), (_units(x, end) for x in places), strict=True))


def _units(log: float, end: float) -> float:
    """What a distance to the end of training is in units; infinity where no number is so large."""
    return end * math.exp(log) if log < 600 else math.inf
