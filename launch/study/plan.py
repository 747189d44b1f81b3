"""The plan of a study: the sizes of its variants, the state of every run, and time estimates.

The time of a run is estimated from finished runs of its variant, or of variants that differ only in
rates; that of a measure from others of its kind since the start of the study.
"""

import hashlib
import heapq
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from polyad.launch.study.folder import model_of
from polyad.launch.study.measures import all_measures
from polyad.launch.study.result import (
    MeasuresTaken,
    PlannedRun,
    Score,
    StudyPlan,
    VariantSize,
)
from polyad.launch.study.state import Results, choose, finished_runs, key, unfinished
from polyad.model.settings import ModelSettings
from polyad.parallel.checkpoint.manage import complete_checkpoints
from polyad.train.config.plan import open_plan, plan_run
from polyad.train.config.rules import validate
from polyad.train.config.text import below, flatten
from polyad.train.forecast.describe import describe
from polyad.train.study.study import Run, Study, Variant

FREE_OF_COST = (
    "seed", "run", "data", "log", "checkpoint", "optimizer", "schedule", "train.steps",
)  # fmt: skip
"""Keys or sections that do not affect the duration of a step."""


def planned(study: Study) -> StudyPlan:
    """Plans the study, and checks every unfinished run, as far as known.

    Args:
        study: a study with prepared data.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong.
    """
    results = finished_runs(study)
    plan = plan_of(study, results)
    for run in unfinished(study, results):
        base = Path(study.config.base)
        if all((other.name, run.seed) in results for other in run.sources.values()):
            plan_run(base, run.overrides, 1)
        else:
            open_plan(base, run.checked_overrides, 1)
    return plan


def plan_of(study: Study, results: Results) -> StudyPlan:
    """Returns the plan of a study and its progress.

    Args:
        study: a study, whose data need not be prepared.
        results: results of finished runs.
    """
    unit, chosen = study.task.unit.name, choose(study, results)
    variants, models = {}, _models(study)
    for name, variant in study.variants.items():
        config = variant.config.model_copy(update={"model": models[name]})
        described = describe(config, validate(config, 1))
        model = described["model"]
        variants[name] = VariantSize(
            parameters=model["parameters"],
            active_parameters=model["active_parameters"],
            flops=model[f"flops_per_{unit}"],
            training=described["training"],
        )
    measures = all_measures(study, chosen)
    return StudyPlan(
        study=str(study.file),
        folder=str(study.folder),
        baseline=study.config.baseline,
        unit=unit,
        scores=[Score(**score._asdict()) for score in study.task.scores],
        validation_score=study.task.validation_score,
        higher_is_better=study.task.higher_is_better,
        seeds=study.config.seeds,
        swept_seeds=study.swept_seeds,
        groups={name: [v.name for v in points] for name, points in study.groups.items()},
        from_runs={
            name: {str(key): other for key, other in keys.items()}
            for name, keys in study.config.from_runs.items()
        },
        variants=variants,
        num_runs=study.num_runs,
        runs=[
            PlannedRun(
                variant=run.variant.name,
                seed=run.seed,
                finished=run.result_file.exists(),
                step=newest_step(run),
            )
            for run in study.runs(chosen)
        ],
        measures=MeasuresTaken(
            wanted=len(measures), taken=sum(measure.read() is not None for measure in measures)
        ),
    )


def _models(study: Study) -> dict[str, ModelSettings]:
    """The model of each variant, completed from the data; opens equal data once."""
    opened: dict[str, ModelSettings] = {}
    found = {}
    for name, variant in study.variants.items():
        key = repr(variant.config.for_task())
        if key not in opened:
            opened[key] = model_of(study, variant)
        found[name] = opened[key]
    return found


def newest_step(run: Run) -> int:
    """The step of a run's newest checkpoint; 0 if there is none."""
    found = complete_checkpoints(run.folder / "checkpoints")
    return int(found[-1].name.removeprefix("step-")) if found else 0


class Times:
    """Known durations of a study's runs.

    Args:
        study: the study.
        jobs: number of concurrent runs; runs trained with the same number are preferred.
    """

    def __init__(self, study: Study, jobs: int) -> None:
        self.jobs = jobs
        self._costs = {name: _cost(variant) for name, variant in study.variants.items()}
        self._measures: dict[str, list[float]] = {}

    def of_run(self, variant: Variant, results: Results) -> float:
        """Seconds of a whole run; NaN if unknown."""
        taken = [
            (result.jobs, result.seconds)
            for (name, _), result in results.items()
            if result.seconds is not None and self._costs[name] == self._costs[variant.name]
        ]
        return _mean([took for jobs, took in taken if jobs == self.jobs] or [t for _, t in taken])

    def of_measure(self, kind: str) -> float:
        """Seconds of a measure; NaN if none of its kind was taken."""
        return _mean(self._measures.get(kind, []))

    def add_measure(self, kind: str, seconds: float) -> None:
        """Records the duration of a measure."""
        self._measures.setdefault(kind, []).append(seconds)


class Estimate(NamedTuple):
    """Estimated time for the rest of a study."""

    runs: int
    measures: int
    seconds: float
    """Seconds of the parts with known time."""
    unknown: tuple[str, ...]
    """Variants with unknown time, and `measures` if that of some is unknown."""


def estimate(study: Study, results: Results, times: Times) -> Estimate:
    """Estimates the time for the rest."""
    left = left_of(study, results, times)
    missing = [m for m in all_measures(study, choose(study, results)) if m.read() is None]
    measures = [times.of_measure(measure.kind) for measure in missing]
    unknown = dict.fromkeys(group for group, seconds in left if math.isnan(seconds))
    known = [seconds for _, seconds in left if not math.isnan(seconds)]
    known += [seconds for seconds in measures if not math.isnan(seconds)]
    return Estimate(
        runs=len(left),
        measures=len(missing),
        seconds=spread_over(times.jobs, known),
        unknown=(*unknown, *(["measures"] if any(map(math.isnan, measures)) else [])),
    )


def time_left(
    study: Study, results: Results, times: Times, going: Mapping[tuple[str, int], float]
) -> float:
    """Estimates the seconds until all runs are done; NaN if nothing is known.

    Runs of unknown duration count like others; `going` has the seconds since the start of running
    ones.
    """
    left = [seconds for _, seconds in left_of(study, results, times, going)]
    return spread_over(times.jobs, with_others(left))


def left_of(
    study: Study,
    results: Results,
    times: Times,
    going: Mapping[tuple[str, int], float] | None = None,
) -> list[tuple[str, float]]:
    """Returns the variants of all remaining runs, with the seconds of each, NaN if unknown.

    `going` has the seconds since the start of running ones.
    """
    since, left = going or {}, []
    for run in unfinished(study, results):
        if key(run) in since:
            seconds = times.of_run(run.variant, results)
            seconds -= min(seconds, since[key(run)])
        else:
            seconds = remaining(run, results, times)
        left.append((run.variant.group, seconds))
    runs = [*study.runs(choose(study, results))]
    for group, points in study.groups.items():  # points that are not chosen yet
        known = sum(run.variant.group == group for run in runs)
        count = study.num_runs_of(group) - known
        left += [(group, _mean([times.of_run(point, results) for point in points]))] * count
    return left


def remaining(run: Run, results: Results, times: Times) -> float:
    """Remaining seconds of a run that is not running; less if it has been started."""
    done = newest_step(run) / run.variant.config.train.steps
    return times.of_run(run.variant, results) * (1 - min(1.0, done))


def with_others(seconds: Sequence[float]) -> list[float]:
    """Replaces unknown times (NaN) by the mean of known ones."""
    other = _mean([each for each in seconds if not math.isnan(each)])
    return [other if math.isnan(each) else each for each in seconds]


def spread_over(jobs: int, seconds: Sequence[float]) -> float:
    """Total seconds of tasks if each is started by the first free job."""
    free_at = [0.0] * jobs
    for each in seconds:
        heapq.heapreplace(free_at, free_at[0] + each)
    return math.nan if any(map(math.isnan, seconds)) else max(free_at)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def _cost(variant: Variant) -> str:
    """A digest of the keys that affect the duration of a step."""
    config = variant.config
    flat = flatten(config.model_dump(mode="json"))
    paid = {name: value for name, value in flat.items() if not below(name, FREE_OF_COST)}
    paid["optimizer.kind"] = config.optimizer.kind
    if frozen := [group.match for group in config.optimizer.groups if group.freeze]:
        paid["optimizer.groups"] = frozen
    return hashlib.sha256(json.dumps(paid, sort_keys=True).encode()).hexdigest()[:16]
