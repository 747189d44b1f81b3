"""Which point of its grid each variant of a study is compared with: the best on validation."""

import math
import statistics
from typing import Any

from polyad.train.errors import RunError
from polyad.train.records import Records
from polyad.train.study.study import Run, Study, Variant

Results = dict[tuple[str, int], dict[str, Any]]
"""Of finished runs, by variant and seed."""


def validation_score(run: Run, records: Records) -> float | None:
    """The validation of the checkpoint of a run that is scored.

    Args:
        run: of the study.
        records: its own.

    Returns:
        The last one, or the best where the best checkpoint is scored; None where the run was never
        validated, or to no finite score.
    """
    task = run.study.task
    name = task.validation_score
    found = [record[name] for record in records if record.get(name) is not None]
    if not found:
        return None
    if not run.variant.scores_best:
        return float(found[-1])
    return float(max(found) if task.higher_is_better else min(found))


def mean_validation(study: Study, variant: Variant, results: Results) -> float | None:
    """The mean score on the validation split over the seeds of the sweep.

    Args:
        study: whose.
        variant: one point.
        results: of finished runs.

    Returns:
        None while a run is missing; a run without a score is worse than any.
    """
    known = [results.get((variant.name, seed)) for seed in study.swept_seeds]
    scores = [found["validation"] for found in known if found is not None]
    if len(scores) < len(known):
        return None
    if None in scores:
        return -math.inf if study.task.higher_is_better else math.inf
    return statistics.fmean(scores)


def choose(study: Study, results: Results) -> dict[str, Variant]:
    """The best point of each variant, the first of equal ones.

    Args:
        study: whose.
        results: of finished runs.

    Returns:
        By the names of variants in the file; those whose sweep is not finished are left out.

    Raises:
        RunError: every point of a grid diverged.
    """
    chosen = {}
    for group, variants in study.groups.items():
        if len(variants) == 1:
            chosen[group] = variants[0]
            continue
        scores = [mean_validation(study, variant, results) for variant in variants]
        known = [score for score in scores if score is not None]
        if len(known) == len(variants):
            best = max(known) if study.task.higher_is_better else min(known)
            if math.isinf(best):
                raise RunError(
                    f"{study.file}: grid: no point of {group} has a finite validation: take other "
                    f"values, or take {group} out"
                )
            chosen[group] = variants[known.index(best)]
    return chosen


def grids(study: Study, results: Results) -> dict[str, dict[str, float | None]]:
    """Of each variant with a grid the mean validation of each point by the point's name."""
    return {
        group: {each.point: mean_validation(study, each, results) for each in variants}
        for group, variants in study.groups.items()
        if len(variants) > 1
    }
