"""Runs the rest of a study, sequentially or several runs at a time, in child processes.

A run is `polyad train` and `polyad evaluate`. Finished runs are skipped, and interrupted ones
continue from their newest checkpoint, so the same command resumes a study. When all runs are
finished, further measures are taken from their checkpoints.
"""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from polyad.data.json_reader import read_json
from polyad.launch.output import say
from polyad.launch.study.folder import (
    RESULTS,
    check_data,
    check_folder,
    held,
    prepared,
    write_json,
    write_record,
)
from polyad.launch.study.jobs import CommandFailed, Jobs, Work
from polyad.launch.study.measures import Measure, all_measures, forget
from polyad.launch.study.plan import (
    Times,
    estimate,
    left_of,
    newest_step,
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
    trained_line,
)
from polyad.launch.study.result import Result, RunResult, StudyPlan, StudyPlans, StudyResult
from polyad.launch.study.results import over_tasks
from polyad.launch.study.state import (
    Results,
    beside,
    can_begin,
    choose,
    compare,
    finished_runs,
    key,
    validation_score,
    write_results,
)
from polyad.parallel.checkpoint.load import newest_that_opens
from polyad.train.errors import RunError
from polyad.train.records import (
    METRICS_FILE,
    last_loss,
    last_routing,
    median_rate,
    peak_memory,
    read_records,
    records_of,
)
from polyad.train.state import TrainState
from polyad.train.study.reading import load_studies
from polyad.train.study.study import Run, Study


def describe_study(file: Path, jobs: int = 1) -> StudyPlans:
    """Returns the plan of a study and its progress, without writing anything.

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
    """Runs the rest of a study.

    Args:
        file: the study.
        jobs: number of concurrent runs.

    Returns:
        The comparison.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong. Nothing was started.
        RunError: a run failed; finished ones are kept.
        Stopped: or KeyboardInterrupt, by a signal; running runs have ended.
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
    """Compares a study's finished runs, without starting or writing anything.

    Args:
        file: the study.
        baseline: the variant with which others are compared; None: the file's.

    Returns:
        A result as from `study`, for started tasks, with the requested `baseline` as `beside`; None
        if no run is finished.
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
    """Locks the folders of all tasks, prepares their data and checks their runs; returns plans."""
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
    """Runs the rest of one task."""
    results = finished_runs(study)
    say("\n".join([plan_table(plan), *nothing_left(study, results)]))
    _train(study, plan, results, times)
    _measure(study, plan, results, times)
    return write_results(study, plan, results)


def _train(study: Study, plan: StudyPlan, results: Results, times: Times) -> None:
    """Trains the remaining runs, several at a time."""
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
    """Takes the missing measures of finished runs, several at a time."""
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


def finishing(run: Run, jobs: int) -> Work:
    """Trains a run to its end and evaluates it.

    Args:
        run: the run, at any stage.
        jobs: number of concurrent runs.

    Yields:
        `polyad` commands.

    Returns:
        Its result, after writing it. Values that are not finite are None, and so is every score of
        a grid point that diverged, which ranks it last.

    Raises:
        RunError: its first score is not finite, and no other point is tried with its seed.
        CommandFailed: training failed for another reason, or diverged and no other point is tried.
    """
    started, from_step = time.monotonic(), newest_step(run)
    if _is_trained(run):
        say(trained_line(run, from_step))
    else:
        try:
            yield "train", run.study.config.base, *run.overrides
        except CommandFailed as failed:
            if not (failed.status == 1 and run.is_swept and _has_diverged(run)):
                raise
            return _keep(run, _result(run, None, None, jobs))
    scores = run.result_file.with_suffix(".evaluation")
    which = ["--split", run.study.config.split, *(["--best"] if run.variant.scores_best else [])]
    yield "evaluate", str(run.folder), *which, "--json", str(scores)
    # Duration of the whole run, to estimate that of others.
    seconds = time.monotonic() - started if from_step == 0 else None
    evaluation = read_json(scores)
    result = _keep(run, _result(run, evaluation, seconds, jobs))
    scores.unlink()
    return result


def _keep(run: Run, result: RunResult) -> RunResult:
    """Writes a result, and removes measures of an earlier one."""
    forget(run)
    write_json(run.result_file, result.to_json(run.study.task.unit.name))
    return result


def measuring(measure: Measure) -> Work:
    """Takes a measure of a finished run.

    Yields:
        The `polyad` command.

    Returns:
        Its duration as `seconds`.

    Raises:
        RunError: a loss is not finite.
    """
    started = time.monotonic()
    written = measure.file.with_suffix(".evaluation")
    yield *measure.arguments, "--json", str(written)
    measure.keep(written)
    return {"seconds": time.monotonic() - started}


def _has_diverged(run: Run) -> bool:
    """Whether a run ended because its last steps, or its last validation, were not finite."""
    if not (run.folder / METRICS_FILE).exists():
        return False
    most = run.variant.config.train.max_skipped_steps
    last = list(records_of(run.folder / METRICS_FILE))[-most:]
    scores = ("validation_loss", run.study.task.validation_score)
    if last and any(last[-1].get(name, 0.0) is None for name in scores):
        return True
    not_finite = [
        each.get("skipped") and None in (each.get("loss"), each.get("grad_norm")) for each in last
    ]
    return len(last) == most and all(not_finite)


def _result(
    run: Run, evaluation: Mapping[str, Any] | None, seconds: float | None, jobs: int
) -> RunResult:
    """Makes a result from an evaluation; None: the run diverged."""
    scores_of, unit = run.study.task.scores, run.study.task.unit.name
    records = read_records(run.folder)
    if evaluation is None:
        names = (*(score.name for score in scores_of), f"{unit}s_scored")
        none: dict[str, Any] = dict.fromkeys(names)
        evaluation = none | {"step": records[-1]["step"]}
    elif evaluation[scores_of[0].name] is None and not run.is_swept:
        raise RunError(
            f"{run}: its {scores_of[0].title} on the {run.study.config.split} split is not finite"
        )
    validation = None if evaluation[scores_of[0].name] is None else validation_score(run, records)
    return RunResult(
        variant=run.variant.group,
        point=run.variant.point,
        seed=run.seed,
        from_runs=run.source_names,
        validation=validation,
        scores={score.name: evaluation[score.name] for score in scores_of},
        scored=evaluation[f"{unit}s_scored"],
        step=evaluation["step"],
        training_loss=last_loss(records),
        rate=median_rate(records, unit),
        memory_bytes=peak_memory(records),
        routing={**last_routing(records)},
        seconds=seconds,
        jobs=jobs,
    )


def _is_trained(run: Run) -> bool:
    """Whether all steps are done, including the validation after the last one."""
    newest = newest_that_opens(run.folder / "checkpoints")
    config = run.variant.config
    if newest is None or newest.state.unfinished is not None:
        return False
    is_done = newest.training_step >= config.train.steps
    state = TrainState.from_json(newest.state.model_dump())
    return is_done or state.is_over(config.evaluation.patience)
