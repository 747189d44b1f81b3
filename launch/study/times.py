"""How long the runs of a study take, and what is left of it.

The time of a run is that of finished runs of its variant, or else what a trial of a few steps says:
`launch/study/trial.py`. Variants that differ in rates alone have the same. What trials and measures
took is kept in times.json of the study's folder, and so is taken once.
"""

import hashlib
import heapq
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from polyad.data.json_reader import read_json
from polyad.launch.study.choice import Results, choose
from polyad.launch.study.folder import write_json
from polyad.launch.study.measures import all_measures
from polyad.launch.study.plan import newest_step
from polyad.launch.study.state import key, unfinished
from polyad.train.config.text import flatten
from polyad.train.study.study import Run, Study, Variant, below

TIMES = "times.json"
FREE_OF_COST = (
    "seed", "run", "data", "log", "checkpoint", "optimizer", "schedule", "train.steps",
)  # fmt: skip
"""Keys, or whole sections, that a step takes as long with whatever they say."""


class Times:
    """What is known of how long the runs of a study take.

    Args:
        study: whose.
        jobs: runs that are trained at a time; what was taken with another number is not this one's.
    """

    def __init__(self, study: Study, jobs: int) -> None:
        self._file = study.folder / TIMES
        self.jobs = jobs
        self._kept = _read(self._file)
        self.costs = {name: _cost(variant) for name, variant in study.variants.items()}
        """By the names of variants; those with the same take equally long."""

    def of_run(self, variant: Variant, results: Results) -> float:
        """Seconds of a whole run; NaN if nothing is known.

        Args:
            variant: of the study.
            results: of finished runs.
        """
        trial = self.trial(variant)
        if trial is not None and self.is_by_trial(variant, results):
            return run_seconds(trial, variant)
        own = self._taken(variant, results)
        return _mean([took for jobs, took in own if jobs == self.jobs] or [t for _, t in own])

    def is_by_trial(self, variant: Variant, results: Results) -> bool:
        """Whether a trial says how long it takes, and no finished run with as many jobs."""
        return not self._is_known(variant, results) and self.trial(variant) is not None

    def needs_trial(self, variant: Variant, results: Results) -> bool:
        """Whether neither a finished run with as many jobs nor a trial says how long it takes."""
        return not self._is_known(variant, results) and self.trial(variant) is None

    def _is_known(self, variant: Variant, results: Results) -> bool:
        return any(jobs == self.jobs for jobs, _ in self._taken(variant, results))

    def trial(self, variant: Variant) -> dict[str, Any] | None:
        """What a trial of a variant, or of one that costs the same, has measured."""
        wanted = {"cost": self.costs[variant.name], "jobs": self.jobs}
        for trial in self._kept["trials"]:
            if trial.items() >= wanted.items():
                return dict(trial)
        return None

    def of_measure(self, kind: str) -> float:
        """Seconds of a measure of finished runs; NaN if none of its kind was taken."""
        wanted = {"kind": kind, "jobs": self.jobs}
        return _mean([m["seconds"] for m in self._kept["measures"] if m.items() >= wanted.items()])

    def keep_trial(self, variant: Variant, trial: Mapping[str, Any]) -> None:
        """Keeps what a trial has measured."""
        about = {"variant": variant.name, "cost": self.costs[variant.name], "jobs": self.jobs}
        self._kept["trials"].append(about | dict(trial))
        write_json(self._file, self._kept)

    def keep_measure(self, kind: str, seconds: float) -> None:
        """Keeps what a measure took."""
        about = {"kind": kind, "jobs": self.jobs, "seconds": seconds}
        self._kept["measures"].append(about)
        write_json(self._file, self._kept)

    def _taken(self, variant: Variant, results: Results) -> list[tuple[int, float]]:
        """Jobs and seconds of finished runs that cost as much."""
        return [
            (result.get("jobs", 1), result["seconds"])
            for (name, _), result in results.items()
            if result["seconds"] is not None and self.costs[name] == self.costs[variant.name]
        ]


def run_seconds(trial: Mapping[str, Any], variant: Variant) -> float:
    """Seconds of a run by what a trial measured: training with its validations, and the evaluation.

    Args:
        trial: of the variant.
        variant: whose steps count.
    """
    config = variant.config
    steps, every = config.train.steps, config.evaluation.every
    validations = math.ceil(steps / every) if every else 1
    passes = validations * trial["validation_passes"] + trial["scoring_passes"]
    return float(
        2 * trial["start_seconds"] + steps * trial["step_seconds"] + passes * trial["pass_seconds"]
    )


class Estimate(NamedTuple):
    """How long what is left of a study takes."""

    runs: int
    measures: int
    seconds: float
    """Of all whose time is known."""
    ways: frozenset[str]
    """How the times are known: `trials`, `runs`."""
    unknown: tuple[str, ...]
    """Variants of which no time is known, and `measures` if none is known of some."""


def estimate(study: Study, results: Results, times: Times) -> Estimate:
    """How long what is left takes.

    Args:
        study: whose.
        results: of finished runs.
        times: what is known.
    """
    left = left_of(study, results, times)
    groups = {group for group, _ in left}
    variants = [v for group in groups for v in study.groups[group]]
    by_trial = [v for v in variants if times.is_by_trial(v, results)]
    ways = {"trials": bool(by_trial), "runs": len(by_trial) < len(variants) and bool(results)}
    missing = [m for m in all_measures(study, choose(study, results)) if m.read() is None]
    measures = [times.of_measure(measure.kind) for measure in missing]
    unknown = dict.fromkeys(group for group, seconds in left if math.isnan(seconds))
    known = [seconds for _, seconds in left if not math.isnan(seconds)]
    known += [seconds for seconds in measures if not math.isnan(seconds)]
    return Estimate(
        runs=len(left),
        measures=len(missing),
        seconds=spread_over(times.jobs, known),
        ways=frozenset(way for way, used in ways.items() if used),
        unknown=(*unknown, *(["measures"] if any(map(math.isnan, measures)) else [])),
    )


def time_left(
    study: Study, results: Results, times: Times, going: Mapping[tuple[str, int], float]
) -> float:
    """Seconds until all runs are done; one of which nothing is known takes as long as others.

    Args:
        study: whose.
        results: of finished runs.
        times: what is known.
        going: runs that go on, with the seconds since they began.

    Returns:
        NaN if nothing is known.
    """
    left = [seconds for _, seconds in left_of(study, results, times, going)]
    return spread_over(times.jobs, with_others(left))


def left_of(
    study: Study,
    results: Results,
    times: Times,
    going: Mapping[tuple[str, int], float] | None = None,
) -> list[tuple[str, float]]:
    """The names of the variants of all runs that are left, and the seconds of each, NaN or known.

    Args:
        study: whose.
        results: of finished runs.
        times: what is known.
        going: runs that go on, with the seconds since they began.
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
    for group, points in study.groups.items():  # at points that are not chosen yet
        known = sum(run.variant.group == group for run in runs)
        count = study.num_runs_of(group) - known
        left += [(group, _mean([times.of_run(point, results) for point in points]))] * count
    return left


def remaining(run: Run, results: Results, times: Times) -> float:
    """Seconds that a run takes which does not go on; less of one that has begun.

    Args:
        run: that is not finished.
        results: of finished runs.
        times: what is known.
    """
    done = newest_step(run) / run.variant.config.train.steps
    return times.of_run(run.variant, results) * (1 - min(1.0, done))


def with_others(seconds: Sequence[float]) -> list[float]:
    """Seconds of which those that are not known are the mean of those that are.

    Args:
        seconds: some of them NaN, or all, which stay so.
    """
    other = _mean([each for each in seconds if not math.isnan(each)])
    return [other if math.isnan(each) else each for each in seconds]


def spread_over(jobs: int, seconds: Sequence[float]) -> float:
    """Seconds that works take in all, where each is begun by the job that is free first.

    Args:
        jobs: works at a time.
        seconds: of each, in their order.
    """
    free_at = [0.0] * jobs
    for each in seconds:
        heapq.heapreplace(free_at, free_at[0] + each)
    return math.nan if any(map(math.isnan, seconds)) else max(free_at)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def _cost(variant: Variant) -> str:
    """A digest of the keys that decide how long a step takes."""
    config = variant.config
    flat = flatten(config.model_dump(mode="json"))
    paid = {name: value for name, value in flat.items() if not below(name, FREE_OF_COST)}
    paid["optimizer.kind"] = config.optimizer.kind
    if frozen := [group.match for group in config.optimizer.groups if group.freeze]:
        paid["optimizer.groups"] = frozen
    return hashlib.sha256(json.dumps(paid, sort_keys=True).encode()).hexdigest()[:16]


def _read(file: Path) -> dict[str, Any]:
    """What is kept; nothing where the file is damaged, which costs a trial and no run."""
    try:
        tree = read_json(file)
        return {name: [dict(each) for each in tree[name]] for name in ("trials", "measures")}
    except (ValueError, KeyError, TypeError):
        return {"trials": [], "measures": []}
