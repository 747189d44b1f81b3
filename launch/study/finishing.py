"""One run of a study: trained to its end, scored, and its result written."""

import json
import time
from typing import Any

from launch.child import STOPPED, polyad
from launch.records import last_loss, last_routing, median_rate, peak_memory, read_records
from launch.study.choice import validation_score
from launch.study.folder import write_json
from launch.study.measures import forget
from launch.study.plan import newest_step
from launch.study.progress import say, trained_line
from parallel.checkpoint.verification import newest_that_opens
from train.errors import RunError, stopped
from train.loop.best import is_over
from train.state import TrainState
from train.study.study import Run


def finish(run: Run) -> dict[str, Any]:
    """Trains a run to its end and evaluates it.

    Args:
        run: whatever of it is done.

    Returns:
        Its result, which is written.

    Raises:
        RunError: it failed, or its score is not finite.
        Stopped: or KeyboardInterrupt, as a signal asked.
    """
    started, from_step = time.monotonic(), newest_step(run)
    if _is_trained(run):
        say(trained_line(run))
    else:
        run_polyad(run, "train", run.study.config.base, *run.overrides)
    scores = run.result_file.with_suffix(".evaluation")
    which = ["--split", run.study.config.split, *(["--best"] if run.variant.scores_best else [])]
    run_polyad(run, "evaluate", str(run.folder), *which, "--json", str(scores))
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


def run_polyad(run: Run, *arguments: str) -> None:
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
