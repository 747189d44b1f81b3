"""Runs what is left of a study, one run after the other, each in processes of its own.

A run is `polyad train` and `polyad evaluate`. What is finished is skipped, what was interrupted
goes on from its newest checkpoint: the same command again is all that is needed. When all are
finished, what else the study wants to know is measured, from their checkpoints.
"""

import json
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from launch.child import STOPPED, polyad
from launch.records import last_loss, last_routing, median_rate, peak_memory, read_records
from launch.study.about import about
from launch.study.choice import Results, choose, grids, validation_score
from launch.study.data import model_of, prepared
from launch.study.folder import (
    RESULTS,
    check_data,
    check_folder,
    check_sources,
    locked,
    read_result,
    write_json,
    write_record,
)
from launch.study.measures import all_measures, forget, read_measures
from launch.study.progress import (
    finished_line,
    measure_line,
    nothing_left,
    plan_table,
    progress_line,
    trained_line,
)
from launch.study.results import over_tasks, summarize
from model.settings import ModelSettings
from parallel.checkpoint.commit import complete_checkpoints
from parallel.checkpoint.verification import newest_that_opens
from train.config.describe import describe
from train.config.plan import open_inputs, plan_run
from train.config.rules import validate
from train.errors import RunError, stopped
from train.loop.best import is_over
from train.state import TrainState
from train.study.reading import load_studies
from train.study.study import Run, Study


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
    plans = {name: _plan(study, _finished(study)) for name, study in studies.items()}
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
            plans[name] = _planned(study)
        found: dict[str, dict[str, Any]] = {}
        for name, study in studies.items():
            if name:
                _say(f"\n=== task {name}, {len(found) + 1} of {len(studies)}")
            write_record(study, fingerprints[name])
            found[name] = result = _train_and_compare(study, plans[name])
            if name:
                result = over_tasks(found, [*studies])
                write_json(Path(study.config.folder) / RESULTS, result)
        return result


def compare_finished(file: Path) -> dict[str, Any] | None:
    """Compares the runs of a study that are finished; nothing is started or written.

    Args:
        file: the study.

    Returns:
        As `study` gives it, of tasks that were begun; None where no run is finished.
    """
    found, waiting = {}, []
    for name, study in load_studies(file).items():
        if results := _finished(study):
            found[name] = _compare(study, _plan(study, results), results)
        else:
            waiting.append(name)
    if not found or "" in found:
        return found.get("")
    return over_tasks(found, [*found, *waiting])


def _finished(study: Study) -> Results:
    """The results that are there, of all points of the grid."""
    every = (
        Run(variant=variant, seed=seed, study=study)
        for seed in study.config.seeds
        for variant in study.variants.values()
    )
    return {_key(run): result for run in every if (result := read_result(run)) is not None}


def _planned(study: Study) -> dict[str, Any]:
    """Plans the study, and every run that is not finished, as far as it is known."""
    results = _finished(study)
    plan = _plan(study, results)
    for run in _unfinished(study, results):
        base = Path(study.config.base)
        if all((other.name, run.seed) in results for other in run.sources.values()):
            plan_run(base, run.overrides, 1)
        else:
            open_inputs(base, run.own_overrides, 1)
    return plan


def _train_and_compare(study: Study, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Runs what is left of one task."""
    results = _finished(study)
    _say("\n".join([plan_table(plan), *nothing_left(study, results)]))
    while left := _unfinished(study, results):
        run = left[0]
        _say("\n== " + progress_line(run, len(results) + 1, study.num_runs, _left(study, results)))
        results[_key(run)] = _finish(run)
        _say(finished_line(run, results[_key(run)], _beside(study, run, results)))
        _write_results(study, plan, results)
    _measure(study, plan, results)
    return _write_results(study, plan, results)


def _unfinished(study: Study, results: Results) -> list[Run]:
    """The runs that are known and not finished.

    Raises:
        ConfigError: a finished one began with another run than it would today.
    """
    runs = [*study.runs(choose(study, results))]
    for run in runs:
        if (found := results.get(_key(run))) is not None:
            check_sources(run, found)
    return [run for run in runs if _key(run) not in results]


def _beside(study: Study, run: Run, results: Results) -> Mapping[str, Any] | None:
    """The baseline's result with the same seed, at the point that is compared."""
    chosen = choose(study, results).get(study.config.baseline)
    return None if chosen is None else results.get((chosen.name, run.seed))


def _measure(study: Study, plan: Mapping[str, Any], results: Results) -> None:
    """Takes the measures of finished runs that are not there yet."""
    wanted = all_measures(study, choose(study, results))
    missing = [measure for measure in wanted if measure.read() is None]
    took: dict[str, list[float]] = {}
    for number, measure in enumerate(missing, start=1):
        left = _seconds_left(took, [m.kind for m in missing[number - 1 :]])
        _say("\n== " + measure_line(measure, number, len(missing), left))
        started = time.monotonic()
        written = measure.file.with_suffix(".evaluation")
        _polyad(measure.run, *measure.arguments, "--json", str(written))
        measure.keep(written)
        took.setdefault(measure.kind, []).append(time.monotonic() - started)
        _write_results(study, plan, results)


def _plan(study: Study, results: Results) -> dict[str, Any]:
    unit, chosen = study.task.unit.name, choose(study, results)
    variants, models = {}, _models(study)
    for name, variant in study.variants.items():
        config = variant.config.model_copy(update={"model": models[name]})
        described = describe(config, validate(config, 1))
        variants[name] = {
            key: described["model"][key]
            for key in ("parameters", "active_parameters", f"flops_per_{unit}")
        } | {"training": described["training"]}
    measures = all_measures(study, chosen)
    return {
        "study": str(study.file),
        "folder": str(study.folder),
        "baseline": study.config.baseline,
        "unit": unit,
        "scores": [score._asdict() for score in study.task.scores],
        "validation_score": study.task.validation_score,
        "higher_is_better": study.task.higher_is_better,
        "seeds": study.config.seeds,
        "swept_seeds": study.swept_seeds,
        "groups": {name: [v.name for v in points] for name, points in study.groups.items()},
        "from_runs": study.config.from_runs,
        "variants": variants,
        "num_runs": study.num_runs,
        "runs": [
            {
                "variant": run.variant.name,
                "seed": run.seed,
                "finished": run.result_file.exists(),
                "step": _step(run),
            }
            for run in study.runs(chosen)
        ],
        "measures": {
            "wanted": len(measures),
            "taken": sum(measure.read() is not None for measure in measures),
        },
    }


def _models(study: Study) -> dict[str, ModelSettings]:
    """The model of each variant, with what the data decides; once for all that open the same."""
    opened: dict[str, ModelSettings] = {}
    found = {}
    for name, variant in study.variants.items():
        key = repr(variant.config.for_task())
        if key not in opened:
            opened[key] = model_of(study, variant)
        found[name] = opened[key]
    return found


def _step(run: Run) -> int:
    """The step of a run's newest checkpoint; 0 if there is none."""
    found = complete_checkpoints(run.folder / "checkpoints")
    return int(found[-1].name.removeprefix("step-")) if found else 0


def _is_trained(run: Run) -> bool:
    """Whether all steps are done, and the validation after the last one was not cut short."""
    newest = newest_that_opens(run.folder / "checkpoints")
    config = run.variant.config
    if newest is None or newest.state.unfinished is not None:
        return False
    is_done = newest.training_step >= config.train.steps
    return is_done or is_over(
        TrainState.from_json(newest.state.model_dump()), config.evaluation.patience
    )


def _finish(run: Run) -> dict[str, Any]:
    """Trains a run to its end and evaluates it."""
    started, from_step = time.monotonic(), _step(run)
    if _is_trained(run):
        _say(trained_line(run))
    else:
        _polyad(run, "train", run.study.config.base, *run.overrides)
    scores = run.result_file.with_suffix(".evaluation")
    which = ["--split", run.study.config.split, *(["--best"] if run.variant.scores_best else [])]
    _polyad(run, "evaluate", str(run.folder), *which, "--json", str(scores))
    evaluation = json.loads(scores.read_text(encoding="utf-8"))
    scores_of, unit = run.study.task.scores, run.study.task.unit.name
    if evaluation[scores_of[0].name] is None:
        raise RunError(
            f"{run}: its {scores_of[0].title} on the {run.study.config.split} split is not finite"
        )
    records = read_records(run.folder)
    result = {
        "variant": run.variant.group,
        "point": run.variant.point,
        "seed": run.seed,
        "from_runs": run.source_names,
        "validation": validation_score(run.study, records),
        **{score.name: evaluation[score.name] for score in scores_of},
        f"{unit}s_scored": evaluation[f"{unit}s_scored"],
        "step": evaluation["step"],
        "training_loss": last_loss(records),
        f"{unit}s_per_second": median_rate(records, unit),
        "memory_bytes": peak_memory(records),
        "routing": last_routing(records),
        # Of the whole run, for the time that others will take.
        "seconds": time.monotonic() - started if from_step == 0 else None,
    }
    forget(run)
    write_json(run.result_file, result)
    scores.unlink()
    return result


def _polyad(run: Run, *arguments: str) -> None:
    """A command of a run in processes of its own.

    Raises:
        RunError: it failed, and has said why.
        Stopped: or KeyboardInterrupt: a signal asked it or this process to stop.
    """
    kept = "the same command goes on with this run"
    status = polyad(*arguments, results=False)  # a line of ours says them
    if status in STOPPED:
        raise stopped(status - 128, f"{run}: {kept}")
    if status:
        raise RunError(
            f"{run}: `polyad {arguments[0]}` ended with status {status}; {kept}, and all that are "
            f"finished are kept"
        )


def _left(study: Study, results: Results) -> float:
    """Seconds until the study is done, by the runs that are; NaN before the first one."""
    took: dict[str, list[float]] = {}
    for (name, _), result in results.items():
        if result["seconds"] is not None:
            took.setdefault(study.variants[name].group, []).append(result["seconds"])
    runs = {name: len(study.swept_seeds) * len(points) for name, points in study.groups.items()}
    rest = len(study.config.seeds) - len(study.swept_seeds)
    done = Counter(study.variants[name].group for name, _ in results)
    return _seconds_left(took, [n for n in runs for _ in range(runs[n] + rest - done[n])])


def _seconds_left(took: Mapping[str, Sequence[float]], names: Sequence[str]) -> float:
    """Of things by their names, by what those of the same name took; NaN if nothing is known."""
    if not took:
        return math.nan
    mean = {name: statistics.fmean(values) for name, values in took.items()}
    other = statistics.fmean(mean.values())
    return sum(mean.get(name, other) for name in names)


def _write_results(study: Study, plan: Mapping[str, Any], results: Results) -> dict[str, Any]:
    found = _compare(study, plan, results)
    write_json(study.folder / RESULTS, found)
    return found


def _compare(study: Study, plan: Mapping[str, Any], results: Results) -> dict[str, Any]:
    chosen = choose(study, results)
    done = [run for run in study.runs(chosen) if _key(run) in results]
    runs = [results[_key(run)] | read_measures(run) for run in done]
    found = summarize(plan, runs, {group: variant.point for group, variant in chosen.items()})
    found["grids"] = grids(study, results)
    found["split"] = study.config.split
    found["attack"] = study.config.attack and study.config.attack.model_dump()
    found["about"] = about(study, done)
    return found


def _key(run: Run) -> tuple[str, int]:
    return run.variant.name, run.seed


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
