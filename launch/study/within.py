"""A study within a time: what is worth training for, what of it fits, and what is left.

`launch/study/budget.py` chooses; here the study's runs, results and times become what it takes.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from polyad.launch.study.budget import Goal, RunKey, Standing, fitting, standing
from polyad.launch.study.choice import Results, choose
from polyad.launch.study.measures import Measure, all_measures, measures_of
from polyad.launch.study.progress import counted, spoken
from polyad.launch.study.state import finished_runs, key
from polyad.launch.study.times import Times, estimate, remaining, spread_over
from polyad.train.study.study import Run, Study

Going = Mapping[RunKey, float]
"""Runs that go on, with the seconds since they began."""


@dataclass(frozen=True, kw_only=True)
class Within:
    """What one task of a study may take."""

    study: Study
    times: Times
    until: float
    """When all of it is to be done, in seconds of the monotonic clock."""
    since: float = -math.inf
    """When it begins, if that is to come."""

    def chosen(self, results: Results, going: Going | None = None) -> list[Run]:
        """The runs that fit into the time that is left, and are not begun, in their order.

        Args:
            results: of finished runs.
            going: runs that go on.
        """
        runs = _known_runs(self.study, results)
        known = {name: _standing(self.study, name, results) for name in self.study.groups}
        waiting = {k: run for k, run in runs.items() if k not in results and k not in (going or {})}
        kept = fitting(
            [*_goals(self.study, results)],
            known,
            {k: self._seconds(run, results) for k, run in waiting.items()},
            self.until - max(time.monotonic(), self.since),
            self.times.jobs,
            self._taken(results, going or {}),
        )
        return [runs[each] for each in kept]

    def seconds(self, runs: Sequence[Run], results: Results) -> float:
        """Seconds of some runs with their measures, and of the measures that are missing."""
        each = [*self._taken(results, {}), *(self._seconds(run, results) for run in runs)]
        return spread_over(self.times.jobs, each)

    def has_time_for(self, measure: Measure) -> bool:
        """Whether a measure fits into the time that is left; one of unknown length does."""
        seconds = self.times.of_measure(measure.kind)
        return time.monotonic() + (0.0 if math.isnan(seconds) else seconds) <= self.until

    def _seconds(self, run: Run, results: Results) -> float:
        return remaining(run, results, self.times) + self._known(measures_of(run))

    def _taken(self, results: Results, going: Going) -> list[float]:
        """What is to come of runs that go on, and measures of runs that are finished."""
        variants = self.study.variants
        found = []
        for (name, _), since in going.items():
            seconds = self.times.of_run(variants[name], results)
            found.append(0.0 if math.isnan(seconds) else max(0.0, seconds - since))
        missing = all_measures(self.study, choose(self.study, results))
        finished = [m for m in missing if key(m.run) in results and m.read() is None]
        return [*found, *(self._known([measure]) for measure in finished)]

    def _known(self, measures: Iterator[Measure] | list[Measure]) -> float:
        """Seconds of measures, without those of which nothing is known."""
        each = [self.times.of_measure(measure.kind) for measure in measures]
        return math.fsum(seconds for seconds in each if not math.isnan(seconds))


def shares(
    studies: Mapping[str, Study],
    results: Mapping[str, Results],
    times: Mapping[str, Times],
    until: float,
) -> dict[str, Within]:
    """Divides a time among tasks that are trained one after the other, by what is left of each.

    Args:
        studies: by the names of tasks: those that are not finished.
        results: of finished runs, of each.
        times: what is known, of each.
        until: when all is to be done, in seconds of the monotonic clock.
    """
    left = {n: estimate(study, results[n], times[n]).seconds for n, study in studies.items()}
    now, whole = time.monotonic(), math.fsum(left.values())
    found, passed, begin = {}, 0.0, now
    for name, study in studies.items():
        passed += left[name]
        end = now + (until - now) * (passed / whole if whole else 1.0)
        found[name] = Within(study=study, times=times[name], until=end, since=begin)
        begin = end
    return found


def _known_runs(study: Study, results: Results) -> dict[RunKey, Run]:
    return {key(run): run for run in study.runs(choose(study, results))}


def _goals(study: Study, results: Results) -> Iterator[Goal]:
    """What is worth training for: seed by seed, and in the order of the file."""
    chosen, runs, base = choose(study, results), _known_runs(study, results), study.config.baseline
    for group in (base, *(name for name in study.groups if name != base)):
        if group not in chosen or len(study.groups) == 1:
            for each, run in runs.items():
                if run.variant.group == group:
                    yield Goal(_with_sources(each, runs))
    for seed in study.config.seeds:
        for group in study.groups:
            if group == base or not {group, base} <= chosen.keys():
                continue
            pair = [(chosen[name].name, seed) for name in (base, group)]
            if all(each in runs for each in pair) and not all(each in results for each in pair):
                needed = (need for each in pair for need in _with_sources(each, runs))
                yield Goal(tuple(dict.fromkeys(needed)), group)


def _with_sources(one: RunKey, runs: Mapping[RunKey, Run]) -> tuple[RunKey, ...]:
    """A run after those that it begins with or learns from, and theirs."""
    before: list[RunKey] = []
    for source in runs[one].sources.values():
        before += _with_sources((source.name, one[1]), runs)
    return (*before, one)


def _standing(study: Study, group: str, results: Results) -> Standing:
    """What pairs say of a variant, by the score that variants are compared by."""
    chosen, score = choose(study, results), study.task.scores[0].name
    names = [chosen[name].name for name in (group, study.config.baseline) if name in chosen]
    if len(names) < 2:
        return Standing(0)
    seeds = [s for s in study.config.seeds if all((name, s) in results for name in names)]
    return standing(*([results[name, seed][score] for seed in seeds] for name in names))


def choice_lines(tasks: Mapping[str, Within], results: Mapping[str, Results], budget: float) -> str:
    """Which runs fit, how long they take, and what is left out.

    Args:
        tasks: with their shares of the time.
        results: of finished runs, of each.
        budget: seconds of all.
    """
    lines, whole, fit, left = [], 0.0, 0, 0
    for name, within in tasks.items():
        runs, known = within.chosen(results[name]), _known_runs(within.study, results[name])
        rest = [each for each in known if each not in results[name] and each not in map(key, runs)]
        later = within.study.num_runs - len(known)
        fit, left = fit + len(runs), left + len(rest) + later
        whole += within.seconds(runs, results[name])
        task = f"{name}: " if name else ""
        if runs:
            lines.append(f"{task}to train: {_by_variant([key(run) for run in runs])}")
        if rest or later:
            after = f"{later} at points of grids that are not chosen yet" if later else ""
            words = [each for each in (_by_variant(rest), after) if each]
            lines.append(f"{task}left for another day: {'; '.join(words)}")
    if not fit and not left:
        return "all runs are finished"
    jobs = next(iter(tasks.values())).times.jobs
    head = (
        f"{fit} of {fit + left} runs fit into {spoken(budget)}, and take about {spoken(whole)} "
        f"with {counted(jobs, 'job')}; it is decided anew after each"
    )
    return "\n".join([head, *lines])


def left_line(studies: Iterable[Study]) -> str:
    """What is left when the time is over; empty if nothing is.

    Args:
        studies: all tasks.
    """
    runs = measures = 0
    for study in studies:
        results = finished_runs(study)
        runs += study.num_runs - sum(each in results for each in _known_runs(study, results))
        missing = all_measures(study, choose(study, results))
        measures += sum(m.read() is None for m in missing if key(m.run) in results)
    parts = [counted(runs, "run")] if runs else []
    parts += [counted(measures, "measure")] if measures else []
    left = " and ".join(parts)
    return left and f"\n{left} left for another day: the same command goes on"


def _by_variant(runs: Iterable[RunKey]) -> str:
    """Runs by their variants, in the order in which these come first."""
    seeds: dict[str, list[str]] = {}
    for name, seed in runs:
        seeds.setdefault(name, []).append(f"{seed}")
    return "; ".join(
        f"{name}, seed{'s' * (len(each) > 1)} {', '.join(each)}" for name, each in seeds.items()
    )
