"""How long what is left of a study takes."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from launch.study.choice import Results
from train.study.study import Study


def time_left(study: Study, results: Results) -> float:
    """Seconds until the study is done, by the runs that are; NaN before the first one.

    Args:
        study: whose.
        results: of finished runs.
    """
    took: dict[str, list[float]] = {}
    for (name, _), result in results.items():
        if result["seconds"] is not None:
            took.setdefault(study.variants[name].group, []).append(result["seconds"])
    runs = {name: len(study.swept_seeds) * len(points) for name, points in study.groups.items()}
    rest = len(study.config.seeds) - len(study.swept_seeds)
    done = Counter(study.variants[name].group for name, _ in results)
    return seconds_left(took, [n for n in runs for _ in range(runs[n] + rest - done[n])])


def seconds_left(took: Mapping[str, Sequence[float]], names: Sequence[str]) -> float:
    """Of things by their names, by what those of the same name took.

    Args:
        took: seconds of those that are done.
        names: of those that are left.

    Returns:
        NaN if nothing is known.
    """
    if not took:
        return math.nan
    mean = {name: statistics.fmean(values) for name, values in took.items()}
    other = statistics.fmean(mean.values())
    return sum(mean.get(name, other) for name in names)
