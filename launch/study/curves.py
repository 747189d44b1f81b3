"""Validation over training: each variant beside the baseline.

Runs of one seed see the same batches, so a difference at a step is one of a pair, as at the end.
"""

import statistics
from collections.abc import Mapping
from typing import Any

from polyad.train.study.paired import paired_difference, spread

Run = Mapping[str, Any]
Pair = tuple[float, float, float]
"""Units seen, one score, and the baseline's."""


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
