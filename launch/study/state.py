"""What of a study is finished, what is left, and the comparison as it stands."""

from collections.abc import Mapping
from typing import Any

from polyad.launch.study.about import about
from polyad.launch.study.choice import Results, choose, grids
from polyad.launch.study.folder import RESULTS, check_sources, read_result, write_json
from polyad.launch.study.measures import all_measures, read_measures
from polyad.launch.study.results import summarize
from polyad.train.study.study import Run, Study


def key(run: Run) -> tuple[str, int]:
    """What results have a run under."""
    return run.variant.name, run.seed


def finished_runs(study: Study) -> Results:
    """The results that are there, of all points of the grid.

    Args:
        study: whose.

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
    """The runs that are known and not finished, in their order.

    Args:
        study: whose.
        results: of finished runs.

    Raises:
        ConfigError: a finished one began with another run than it would today.
    """
    runs = [*study.runs(choose(study, results))]
    for run in runs:
        if (found := results.get(key(run))) is not None:
            check_sources(run, found)
    return [run for run in runs if key(run) not in results]


def can_begin(study: Study, results: Results) -> list[Run]:
    """The runs that are not finished and whose sources are, in their order.

    Args:
        study: whose.
        results: of finished runs.

    Raises:
        ConfigError: as `unfinished`.
    """
    return [
        run
        for run in unfinished(study, results)
        if all((source.name, run.seed) in results for source in run.sources.values())
    ]


def beside(study: Study, run: Run, results: Results) -> Mapping[str, Any] | None:
    """The baseline's result with the same seed, at the point that is compared.

    Args:
        study: whose.
        run: of the study.
        results: of finished runs.
    """
    chosen = choose(study, results).get(study.config.baseline)
    return None if chosen is None else results.get((chosen.name, run.seed))


def write_results(study: Study, plan: Mapping[str, Any], results: Results) -> dict[str, Any]:
    """Brings results.json up to date.

    Args:
        study: whose.
        plan: of the study.
        results: of finished runs.

    Returns:
        The comparison, as `compare` makes it.
    """
    found = compare(study, plan, results)
    write_json(study.folder / RESULTS, found)
    return found


def compare(study: Study, plan: Mapping[str, Any], results: Results) -> dict[str, Any]:
    """Compares finished runs; nothing is written.

    Args:
        study: whose.
        plan: of the study.
        results: of finished runs.

    Returns:
        As `summarize` makes it, with the points of grids, what was scored, and what is said of the
        study itself.
    """
    chosen = choose(study, results)
    done = [run for run in study.runs(chosen) if key(run) in results]
    runs = [
        results[key(run)] | read_measures(run) | ({"leaks": True} if run.variant.leaks else {})
        for run in done
    ]
    found = summarize(plan, runs, {group: variant.point for group, variant in chosen.items()})
    measures = all_measures(study, chosen)
    found["finished"] = found["finished"] and all(each.read() is not None for each in measures)
    found["grids"] = grids(study, results)
    found["split"] = study.config.split
    found["attack"] = study.config.attack and study.config.attack.model_dump()
    found["about"] = about(study, done)
    return found
