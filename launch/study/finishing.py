"""What is done with one run of a study: it is trained to its end, scored, and measured."""

import time
from collections.abc import Mapping
from typing import Any

from polyad.data.json_reader import read_json
from polyad.launch.output import say
from polyad.launch.study.folder import write_json
from polyad.launch.study.jobs import CommandFailed, Work
from polyad.launch.study.measures import Measure, forget
from polyad.launch.study.plan import newest_step
from polyad.launch.study.progress import trained_line
from polyad.launch.study.result import RunResult
from polyad.launch.study.state import validation_score
from polyad.parallel.checkpoint.finding import newest_that_opens
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
from polyad.train.study.study import Run


def finishing(run: Run, jobs: int) -> Work:
    """Trains a run to its end and evaluates it.

    Args:
        run: whatever of it is done.
        jobs: how many runs are trained at a time.

    Yields:
        Commands of `polyad`.

    Returns:
        Its result, which is written; what of it is not finite is None, of a point of a grid that
        diverged every score: others are better.

    Raises:
        RunError: its first score is not finite, and no other point is tried with its seed.
        CommandFailed: training failed otherwise, or diverged where no other point is tried.
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
    # Of the whole run, for the time that others will take.
    seconds = time.monotonic() - started if from_step == 0 else None
    evaluation = read_json(scores)
    result = _keep(run, _result(run, evaluation, seconds, jobs))
    scores.unlink()
    return result


def _keep(run: Run, result: RunResult) -> RunResult:
    """Writes a result; what was measured of an earlier one is no longer true."""
    forget(run)
    write_json(run.result_file, result.to_json(run.study.task.unit.name))
    return result


def measuring(measure: Measure) -> Work:
    """Takes a measure of a finished run.

    Args:
        measure: that is not there yet.

    Yields:
        The command of `polyad`.

    Returns:
        `seconds` that it took.

    Raises:
        RunError: a loss is not finite.
    """
    started = time.monotonic()
    written = measure.file.with_suffix(".evaluation")
    yield *measure.arguments, "--json", str(written)
    measure.keep(written)
    return {"seconds": time.monotonic() - started}


def _has_diverged(run: Run) -> bool:
    """Whether a run ended since its last steps, or its last validation, were not finite."""
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
    """The result by what was evaluated; None: the run diverged."""
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
    """Whether all steps are done, and the validation after the last one was not cut short."""
    newest = newest_that_opens(run.folder / "checkpoints")
    config = run.variant.config
    if newest is None or newest.state.unfinished is not None:
        return False
    is_done = newest.training_step >= config.train.steps
    state = TrainState.from_json(newest.state.model_dump())
    return is_done or state.is_over(config.evaluation.patience)
