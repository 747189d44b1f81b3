"""The first line of a start: where the run stands, what it goes on from, and what is left."""

import os
import sys
from pathlib import Path

from polyad.parallel.checkpoint.reading import Checkpoint
from polyad.parallel.weights import Weights
from polyad.train.config.adaptation import begins_anew, counts, in_words, model_of
from polyad.train.config.plan import Plan
from polyad.train.config.rate import change_of_rate, warm_up_note
from polyad.train.config.run import parse_config
from polyad.train.state import TrainState
from polyad.train.tasks.images import ImageClassification
from polyad.train.tasks.preprocessing import normalization_of


def nothing_is_left(plan: Plan, state: TrainState) -> bool:
    """Whether the run is finished: all steps done, or it ended early, and the last validation.

    Args:
        plan: the run's.
        state: where it stands.
    """
    if state.unfinished is not None:
        return False
    return state.step == plan.config.train.steps or state.is_over(plan.config.evaluation.patience)


def first_line(plan: Plan, state: TrainState) -> str:
    """The line that a start prints before it builds anything.

    Args:
        plan: the run's, with the checkpoint that it goes on from, if there is one.
        state: where it stands.
    """
    steps, folder = plan.config.train.steps, Path(plan.config.run.folder)
    if plan.resume is None:
        return f"begins anew: {steps:,} steps to do, in {folder}{_weights(plan)}"
    place, left = plan.resume.folder, steps - state.step
    if nothing_is_left(plan, state) and left:
        reason = state.why_it_is_over(plan.config.evaluation.patience)
        line = f"nothing is left to do: {reason}; the last checkpoint is {place}"
    elif nothing_is_left(plan, state):
        line = (
            f"nothing is left to do: all {steps:,} steps are done; the last checkpoint is {place}"
        )
    elif left:
        line = f"goes on from step {state.step:,} of {steps:,} ({left:,} left), from {place}"
    else:
        line = f"goes on after step {state.step:,}, the last, with its validation, from {place}"
    start = plan.config.checkpoint.init_from
    unused = ""
    if start and plan.config.adapt.lora is None:
        unused = f"; checkpoint.init_from: {start} is for a new run, and not used"
    rate = "" if nothing_is_left(plan, state) else _rate(plan, state)
    return line + rate + _average(plan) + _best(plan, state) + _teacher(plan) + unused


def say_first_line(plan: Plan, state: TrainState) -> None:
    """Prints the first line, and what is odd about it; called by the main process alone."""
    print(first_line(plan, state), file=sys.stderr, flush=True)
    count = counts(model_of(plan.config))
    if count["frozen"] and not nothing_is_left(plan, state):
        print(in_words(count), file=sys.stderr, flush=True)
    if note := warm_up_note(plan.config):
        print(f"polyad: warning: {note}", file=sys.stderr, flush=True)
    notes = list(plan.task.notes)
    if not plan.task.has_validation:
        notes.append(f"there is no validation split to score; {plan.task.to_validate}")
    for note in notes:
        print(f"polyad: {note}", file=sys.stderr, flush=True)
    of_node = os.environ.get("LOCAL_WORLD_SIZE", "")
    if of_node.isdecimal() and (crossing := plan.dims.crossing(int(of_node))):
        print(f"polyad: warning: {crossing}", file=sys.stderr, flush=True)


def _rate(plan: Plan, state: TrainState) -> str:
    assert plan.resume is not None
    before = parse_config(plan.resume.config_yaml, origin=str(plan.resume.folder))
    note = change_of_rate(before, plan.config, state.step)
    return f"; {note}" if note else ""


def _best(plan: Plan, state: TrainState) -> str:
    assert plan.resume is not None
    if plan.resume.state.best_score is None or state.best_score is not None:
        return ""
    return "; the best validation is looked for from there on"


def _teacher(plan: Plan) -> str:
    assert plan.resume is not None
    before = plan.resume.state.teacher_step
    if plan.teacher is None or before is None or plan.teacher.step == before:
        return ""
    return (
        f"; the teacher is another one than before: step {plan.teacher.step:,}, not {before:,}, of "
        f"{plan.config.distill.teacher}"
    )


def _average(plan: Plan) -> str:
    if plan.config.train.ema is None or plan.resume is None or plan.resume.has_average:
        return ""
    return "; the moving average of the weights (train.ema) begins there with the weights"


def _weights(plan: Plan) -> str:
    if plan.init is None:
        return ""
    note = getattr(plan.init, "note", None)
    new = f"; {note}" if note else ""
    new += _pixels(plan, plan.init)
    if anew := begins_anew(plan.task, plan.init, plan.config.model):
        more = f" and {len(anew) - 3} more" if len(anew) > 3 else ""
        new += f"; new from the seed: {', '.join(f'{prefix}*' for prefix in anew[:3])}{more}"
    if isinstance(plan.init, Checkpoint):
        step = plan.init.training_step
        return f", with the weights of step {step:,}, {plan.init.folder}{new}"
    return f", with the weights of {plan.config.checkpoint.init_from}{new}"


def _pixels(plan: Plan, weights: Weights) -> str:
    """Says where pixels are normalized otherwise than those that weights were trained with."""
    task = plan.task
    if not isinstance(task, ImageClassification):
        return ""
    theirs, ours = normalization_of(weights, task.model.image_size), task.settings.normalization
    if theirs in (None, ours):
        return ""
    return f"; data.normalization: {ours} here, {theirs} where the weights were trained"
