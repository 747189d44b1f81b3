"""Runs what is left of a study, one run after the other or several at a time, each in processes of
its own.

A run is `polyad train` and `polyad evaluate`. What is finished is skipped, what was interrupted
goes on from its newest checkpoint: the same command again is all that is needed. When all are
finished, what else the study wants to know is measured, from their checkpoints.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from polyad.launch.output import say
from polyad.launch.study.data import prepared
from polyad.launch.study.finishing import finishing, measuring
from polyad.launch.study.folder import (
    RESULTS,
    check_data,
    check_folder,
    held,
    write_json,
    write_record,
)
from polyad.launch.study.jobs import Jobs
from polyad.launch.study.measures import Measure, all_measures
from polyad.launch.study.plan import (
    Times,
    estimate,
    left_of,
    plan_of,
    planned,
    spread_over,
    time_left,
    with_others,
)
from polyad.launch.study.progress import (
    estimate_line,
    finished_line,
    measure_line,
    nothing_left,
    plan_table,
    progress_line,
)
from polyad.launch.study.result import Result, StudyPlan, StudyPlans, StudyResult
from polyad.launch.study.results import over_tasks
from polyad.launch.study.state import (
    Results,
    beside,
    can_begin,
    choose,
    compare,
    finished_runs,
    key,
    write_results,
)
from polyad.train.study.reading import load_studies
from polyad.train.study.study import Run, Study


def describe_study(file: Path, jobs: int = 1) -> StudyPlans:
    """What a study will train and what of it stands; nothing is written.

    Args:
        file: the study.
        jobs: runs that would be trained at a time.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong.
    """
    studies = load_studies(file)
    for study in studies.values():
        check_folder(study)
    results = {name: finished_runs(study) for name, study in studies.items()}
    plans = {name: plan_of(study, results[name]) for name, study in studies.items()}
    found = [estimate(s, results[n], Times(s, jobs)) for n, s in studies.items()]
    seconds = sum(each.seconds for each in found)
    return StudyPlans(
        study=str(file),
        plans=plans,
        seconds_left=seconds or None,
        time=estimate_line(found, jobs),
    )


def study(file: Path, jobs: int = 1) -> Result:
    """Runs what is left of a study.

    Args:
        file: the study.
        jobs: runs that are trained at a time.

    Returns:
        The comparison.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong. Nothing was started.
        RunError: a run failed; those that are finished stay.
        Stopped: or KeyboardInterrupt, as a signal asked; the runs that were going on have ended.
    """
    studies = load_studies(file)
    for study in studies.values():
        check_folder(study)
    with ExitStack() as locks:
        plans = _ready(studies, locks)
        times = {name: Times(study, jobs) for name, study in studies.items()}
        results = {name: finished_runs(study) for name, study in studies.items()}
        estimates = [estimate(s, results[n], times[n]) for n, s in studies.items()]
        if line := estimate_line(estimates, jobs):
            say(line)
        found: dict[str, StudyResult] = {}
        result: Result | None = None
        for number, (name, study) in enumerate(studies.items(), start=1):
            if name:
                say(f"\n=== task {name}, {number} of {len(studies)}")
            result = found[name] = _train_and_compare(study, plans[name], times[name])
            if name:
                result = over_tasks(found, [*studies])
                write_json(Path(study.config.folder) / RESULTS, result.to_json())
        assert result is not None
        return result


def compare_finished(file: Path, baseline: str | None = None) -> Result | None:
    """Compares the runs of a study that are finished; nothing is started or written.

    Args:
        file: the study.
        baseline: the variant that others are compared with; None: the file's.

    Returns:
        As `study` gives it, of tasks that were begun, with the `baseline` that was asked for as
        `beside`; None where no run is finished.
    """
    found: dict[str, StudyResult] = {}
    waiting: list[str] = []
    for name, study in load_studies(file, baseline).items():
        check_folder(study)
        if results := finished_runs(study):
            found[name] = compare(study, plan_of(study, results), results)
        else:
            waiting.append(name)
    if not found:
        return None
    result = found[""] if "" in found else over_tasks(found, [*found, *waiting])
    return result.model_copy(update={"beside": baseline})


def _ready(studies: Mapping[str, Study], locks: ExitStack) -> dict[str, StudyPlan]:
    """Locks the folders of all tasks, prepares their data and checks their runs; their plans."""
    for study in studies.values():
        locks.enter_context(held(study))
    fingerprints = {name: prepared(study) for name, study in studies.items()}
    plans = {}
    for name, study in studies.items():
        check_data(study, fingerprints[name])
        plans[name] = planned(study)
    for name, study in studies.items():
        write_record(study, fingerprints[name])
    return plans


def _train_and_compare(study: Study, plan: StudyPlan, times: Times) -> StudyResult:
    """Runs what is left of one task."""
    results = finished_runs(study)
    say("\n".join([plan_table(plan), *nothing_left(study, results)]))
    _train(study, plan, results, times)
    _measure(study, plan, results, times)
    return write_results(study, plan, results)


def _train(study: Study, plan: StudyPlan, results: Results, times: Times) -> None:
    """Trains what is left, up to so many runs at a time."""
    with Jobs[Run](times.jobs) as works:
        while True:
            while works.has_room:
                going = {key(run): seconds for run, seconds in works.going}
                ready = (run for run in can_begin(study, results) if key(run) not in going)
                if (run := next(ready, None)) is None:
                    break
                left = time_left(study, results, times, going)
                number = study.num_runs - len(left_of(study, results, times)) + len(going) + 1
                say("\n== " + progress_line(run, number, study.num_runs, left))
                works.begin(run, str(run), finishing(run, times.jobs))
            if not works.going:
                return
            run, result = works.wait()
            results[key(run)] = result
            say(finished_line(run, result, beside(study, run, results)))
            write_results(study, plan, results)


def _measure(study: Study, plan: StudyPlan, results: Results, times: Times) -> None:
    """Takes the measures of finished runs that are not there yet, up to so many at a time."""
    wanted = all_measures(study, choose(study, results))
    missing = [m for m in wanted if key(m.run) in results and m.read() is None]
    count = len(missing)
    with Jobs[Measure](times.jobs) as works:
        while missing or works.going:
            if missing and works.has_room:
                seconds = [times.of_measure(each.kind) for each in missing]
                left, number = spread_over(times.jobs, with_others(seconds)), count - len(missing)
                measure = missing.pop(0)
                say("\n== " + measure_line(measure, number + 1, count, left))
                works.begin(measure, str(measure.run), measuring(measure))
                continue
            measure, done = works.wait()
            times.add_measure(measure.kind, done["seconds"])
            write_results(study, plan, results)
