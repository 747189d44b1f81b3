"""Runs what is left of a study, one run after the other, each in processes of its own.

A run is `polyad train` and `polyad evaluate`. What is finished is skipped, what was interrupted
goes on from its newest checkpoint: the same command again is all that is needed. When all are
finished, what else the study wants to know is measured, from their checkpoints.
"""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from launch.study.choice import Results, choose
from launch.study.data import prepared
from launch.study.finishing import finish, run_polyad
from launch.study.folder import RESULTS, check_data, check_folder, locked, write_json, write_record
from launch.study.measures import all_measures
from launch.study.plan import plan_of, planned
from launch.study.progress import (
    finished_line,
    measure_line,
    nothing_left,
    plan_table,
    progress_line,
    say,
)
from launch.study.results import over_tasks
from launch.study.state import beside, finished_runs, key, unfinished, write_results
from launch.study.times import seconds_left, time_left
from train.study.reading import load_studies
from train.study.study import Study


def describe_study(file: Path) -> dict[str, Any]:
    """What a study will train and what of it stands; nothing is written.

    Args:
        file: the study.

    Returns:
        JSON values: the variants' sizes and the state of every run; of a study with tasks those of
        each under its name.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong.
    """
    studies = load_studies(file)
    for study in studies.values():
        check_folder(study)
    plans = {name: plan_of(study, finished_runs(study)) for name, study in studies.items()}
    return plans.get("") or {"study": str(file), "tasks": plans}


def study(file: Path) -> dict[str, Any]:
    """Runs what is left of a study.

    Args:
        file: the study.

    Returns:
        The comparison, as `summarize` makes it, of tasks as `over_tasks`.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong. Nothing was started.
        RunError: a run failed; those that are finished stay.
        Stopped: or KeyboardInterrupt, as a signal asked; the run that was going on has ended.
    """
    studies = load_studies(file)
    for study in studies.values():
        check_folder(study)
    with ExitStack() as locks:
        for study in studies.values():
            locks.enter_context(locked(study))
        fingerprints = {name: prepared(study) for name, study in studies.items()}
        plans = {}
        for name, study in studies.items():
            check_data(study, fingerprints[name])
            plans[name] = planned(study)
        found: dict[str, dict[str, Any]] = {}
        for name, study in studies.items():
            if name:
                say(f"\n=== task {name}, {len(found) + 1} of {len(studies)}")
            write_record(study, fingerprints[name])
            found[name] = result = _train_and_compare(study, plans[name])
            if name:
                result = over_tasks(found, [*studies])
                write_json(Path(study.config.folder) / RESULTS, result)
        return result


def _train_and_compare(study: Study, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Runs what is left of one task."""
    results = finished_runs(study)
    say("\n".join([plan_table(plan), *nothing_left(study, results)]))
    while waiting := unfinished(study, results):
        run = waiting[0]
        say(
            "\n== "
            + progress_line(run, len(results) + 1, study.num_runs, time_left(study, results))
        )
        results[key(run)] = finish(run)
        say(finished_line(run, results[key(run)], beside(study, run, results)))
        write_results(study, plan, results)
    _measure(study, plan, results)
    return write_results(study, plan, results)


def _measure(study: Study, plan: Mapping[str, Any], results: Results) -> None:
    """Takes the measures of finished runs that are not there yet."""
    wanted = all_measures(study, choose(study, results))
    missing = [measure for measure in wanted if measure.read() is None]
    took: dict[str, list[float]] = {}
    for number, measure in enumerate(missing, start=1):
        left = seconds_left(took, [m.kind for m in missing[number - 1 :]])
        say("\n== " + measure_line(measure, number, len(missing), left))
        started = time.monotonic()
        written = measure.file.with_suffix(".evaluation")
        run_polyad(measure.run, *measure.arguments, "--json", str(written))
        measure.keep(written)
        took.setdefault(measure.kind, []).append(time.monotonic() - started)
        write_results(study, plan, results)
