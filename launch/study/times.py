"""How long what is left of a study takes."""

import heapq
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from launch.study.choice import Results
from train.study.study import Study


def time_left(
    study: Study, results: Results, going: Mapping[tuple[str, int], float], jobs: int
) -> float:
    """Seconds until the study is done, by the runs that are.

    Args:
        study: whose.
        results: of finished runs.
        going: runs that go on, with the seconds since they began.
        jobs: runs that are trained at a time.

    Returns:
        NaN before the first is finished.
    """
    took: dict[str, list[float]] = {}
    for (name, _), result in results.items():
        if result["seconds"] is not None:
            took.setdefault(study.variants[name].group, []).append(result["seconds"])
    runs = {name: len(study.swept_seeds) * len(points) for name, points in study.groups.items()}
    rest = len(study.config.seeds) - len(study.swept_seeds)
    begun = Counter(study.variants[name].group for name, _ in [*results, *going])
    groups = [study.variants[name].group for name, _ in going]
    since = [*going.values()]
    for name, count in runs.items():
        groups += [name] * (count + rest - begun[name])
    since += [0.0] * (len(groups) - len(since))
    seconds = expected(took, groups)
    return spread_over(jobs, [a - min(a, b) for a, b in zip(seconds, since, strict=True)])


def expected(took: Mapping[str, Sequence[float]], names: Sequence[str]) -> list[float]:
    """Seconds of each of some things, by what those of the same name took, or else by all.

    Args:
        took: seconds of those that are done.
        names: of those that are left.

    Returns:
        NaN for each if nothing is known.
    """
    if not took:
        return [math.nan] * len(names)
    mean = {name: statistics.fmean(values) for name, values in took.items()}
    other = statistics.fmean(mean.values())
    return [mean.get(name, other) for name in names]


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
