"""The state of a study: finished runs, the best point of each grid, and the current comparison."""

import math
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from polyad.data.json_reader import read_json
from polyad.launch.study.folder import RESULTS, check_sources, read_result, write_json
from polyad.launch.study.measures import all_measures, read_measures
from polyad.launch.study.result import (
    About,
    Attack,
    Environment,
    RunResult,
    StudyPlan,
    StudyResult,
)
from polyad.launch.study.results import summarize
from polyad.train.errors import RunError
from polyad.train.records import Records
from polyad.train.study.config import as_written
from polyad.train.study.study import Run, Study, Variant

ENVIRONMENT = ("git_commit", "versions", "platform", "gpus")

Results = dict[tuple[str, int], RunResult]
"""Results of finished runs by variant and seed."""


def validation_score(run: Run, records: Records) -> float | None:
    """Returns the validation score of a run's scored checkpoint.

    Returns:
        The last one, or the best if the best checkpoint is scored; None if the run was never
        validated with a finite score.
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
    """Computes the mean validation score over the seeds of the sweep.

    Returns:
        The mean; None while a run is missing; a run without a score ranks last.
    """
    known = [results.get((variant.name, seed)) for seed in study.swept_seeds]
    scores = [found.validation for found in known if found is not None]
    if len(scores) < len(known):
        return None
    finite = [score for score in scores if score is not None]
    if len(finite) < len(scores):
        return -math.inf if study.task.higher_is_better else math.inf
    return statistics.fmean(finite)


def choose(study: Study, results: Results) -> dict[str, Variant]:
    """Returns the best point of each variant, the first in case of a tie.

    Returns:
        Points by variant name in the file; variants with unfinished sweeps are left out.

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
                    f"{study.file}: grid: no point of {group} has a finite validation score: "
                    f"choose other values, or remove {group}"
                )
            chosen[group] = variants[known.index(best)]
    return chosen


def grids(study: Study, results: Results) -> dict[str, dict[str, float | None]]:
    """The mean validation of each point of a grid by the point's name, of variants with a grid."""
    return {
        group: {each.point: mean_validation(study, each, results) for each in variants}
        for group, variants in study.groups.items()
        if len(variants) > 1
    }


def key(run: Run) -> tuple[str, int]:
    """The key of a run in results."""
    return run.variant.name, run.seed


def finished_runs(study: Study) -> Results:
    """Returns existing results, of all grid points.

    Raises:
        ConfigError: one is damaged.
    """
    every = (
        Run(variant=variant, seed=seed, study=study)
        for seed in study.config.seeds
        for variant in study.variants.values()
    )
    return {key(run): result for run in every if (result := read_result(run)) is not None}


def unfinished(study: Study, results: Results) -> list[Run]:
    """Returns the known unfinished runs, in order.

    Raises:
        ConfigError: a finished one started from a different run than it would today.
    """
    runs = [*study.runs(choose(study, results))]
    for run in runs:
        if (found := results.get(key(run))) is not None:
            check_sources(run, found)
    return [run for run in runs if key(run) not in results]


def can_begin(study: Study, results: Results) -> list[Run]:
    """Returns the unfinished runs with finished sources, in order.

    Raises:
        ConfigError: as `unfinished`.
    """
    return [
        run
        for run in unfinished(study, results)
        if all((source.name, run.seed) in results for source in run.sources.values())
    ]


def beside(study: Study, run: Run, results: Results) -> RunResult | None:
    """The baseline's result with the same seed, at its compared point."""
    chosen = choose(study, results).get(study.config.baseline)
    return None if chosen is None else results.get((chosen.name, run.seed))


def about(study: Study, runs: Sequence[Run]) -> About:
    """Facts about the study itself for a result."""
    config = study.config
    days = sorted(_day(run.result_file) for run in runs)
    not_shown = config.not_shown
    data = config.data.path if config.data else getattr(study.baseline.config.data, "path", None)
    return About(
        question=config.question,
        not_shown=[not_shown] if isinstance(not_shown, str) else not_shown or [],
        base=config.base,
        data=data if data is None else str(data),
        source=config.data.source if config.data else None,
        common=_written(config.common),
        variants={
            name: _written(keys)
            | {key: f"the run of {other}" for key, other in config.from_runs.get(name, {}).items()}
            for name, keys in config.variants.items()
        },
        grids={
            name: _written(config.grid | config.grids.get(name, {})) for name in config.variants
        },
        leaking=[name for name, points in study.groups.items() if points[0].leaks],
        days=[days[0], days[-1]] if days else [],
        environments=_environments(runs),
    )


def _written(keys: Mapping[str, Any]) -> dict[str, str]:
    return {key: as_written(value) for key, value in keys.items()}


def _day(file: Path) -> str:
    return datetime.fromtimestamp(file.stat().st_mtime, UTC).date().isoformat()


def _environments(runs: Sequence[Run]) -> list[Environment]:
    """Distinct environments of runs whose folders exist.

    Commit and versions are those of training, not of the comparison.
    """
    found: list[dict[str, Any]] = []
    counts: list[int] = []
    for run in runs:
        try:
            tree = read_json(run.folder / "environment.json")
            environment = {key: tree[key] for key in ENVIRONMENT}
            environment["uncommitted_changes"] = bool(tree["git_diff"])
        except (ValueError, KeyError, TypeError):
            continue  # additional facts, which are not part of the result
        if environment not in found:
            found.append(environment)
            counts.append(0)
        counts[found.index(environment)] += 1
    return [Environment(**each, runs=n) for each, n in zip(found, counts, strict=True)]


def write_results(study: Study, plan: StudyPlan, results: Results) -> StudyResult:
    """Compares finished runs, and updates results.json."""
    found = compare(study, plan, results)
    write_json(study.folder / RESULTS, found.to_json())
    return found


def compare(study: Study, plan: StudyPlan, results: Results) -> StudyResult:
    """Compares finished runs, without writing anything.

    Returns:
        The result of `summarize`, with grid points, the scored data, and facts about the study.
    """
    chosen = choose(study, results)
    done = [run for run in study.runs(chosen) if key(run) in results]
    runs = [results[key(run)].model_copy(update={"measured": read_measures(run)}) for run in done]
    found = summarize(plan, runs, {group: variant.point for group, variant in chosen.items()})
    measures, attack = all_measures(study, chosen), study.config.attack
    all_taken = all(each.read() is not None for each in measures)
    return found.model_copy(
        update={
            "finished": found.finished and all_taken,
            "grids": grids(study, results),
            "split": study.config.split,
            "attack": attack and Attack(**attack.model_dump()),
            "about": about(study, done),
        }
    )
