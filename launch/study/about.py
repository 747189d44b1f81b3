"""What a study's result says of the study itself: its question, its variants, what trained it.

Commit and versions are those with which runs were trained, of which each run's folder has a record,
and not those with which they were compared.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from polyad.data.json_reader import read_json
from polyad.train.study.grid import as_written
from polyad.train.study.study import Run, Study

ENVIRONMENT = ("git_commit", "versions", "platform", "gpus")


def about(study: Study, runs: Sequence[Run]) -> dict[str, Any]:
    """Describes a study.

    Args:
        study: of the result.
        runs: those that are finished.

    Returns:
        JSON values: `question` and the paragraphs of `not_shown`; the base and its `data`; dotted
        keys with their values as in the file, of `common`, of each of `variants` and of `grids`;
        `leaking`, variants whose tokens see later ones; the days of the first and the last finished
        run; and `environments`, each with the number of runs that it trained.
    """
    config = study.config
    days = sorted(_day(run.result_file) for run in runs)
    not_shown = config.not_shown
    data = config.data.path if config.data else getattr(study.baseline.config.data, "path", None)
    return {
        "question": config.question,
        "not_shown": [not_shown] if isinstance(not_shown, str) else not_shown or [],
        "base": config.base,
        "data": data if data is None else str(data),
        "source": config.data and config.data.source,
        "common": _written(config.common),
        "variants": {
            name: _written(keys)
            | {key: f"the run of {other}" for key, other in config.from_runs.get(name, {}).items()}
            for name, keys in config.variants.items()
        },
        "grids": {
            name: _written(config.grid | config.grids.get(name, {})) for name in config.variants
        },
        "leaking": [name for name, points in study.groups.items() if points[0].leaks],
        "days": [days[0], days[-1]] if days else [],
        "environments": _environments(runs),
    }


def _written(keys: Mapping[str, Any]) -> dict[str, str]:
    return {key: as_written(value) for key, value in keys.items()}


def _day(file: Path) -> str:
    return datetime.fromtimestamp(file.stat().st_mtime, UTC).date().isoformat()


def _environments(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Those that differ, in the order of runs; of runs whose folder is there."""
    found: list[dict[str, Any]] = []
    counts: list[int] = []
    for run in runs:
        try:
            tree = read_json(run.folder / "environment.json")
            environment = {key: tree[key] for key in ENVIRONMENT}
            environment["uncommitted_changes"] = bool(tree["git_diff"])
        except (ValueError, KeyError, TypeError):
            continue  # what is known of a run, and no part of its result
        if environment not in found:
            found.append(environment)
            counts.append(0)
        counts[found.index(environment)] += 1
    return [each | {"runs": count} for each, count in zip(found, counts, strict=True)]
