"""First messages of a start: the run's progress, what is left, and its learning rate."""

import os
import sys
from pathlib import Path

from torch import nn

from polyad.model.build import matrix_dimensions
from polyad.model.decoder import DecoderSettings
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.weights import Weights
from polyad.train.config.adaptation import begins_anew, counts, model_of
from polyad.train.config.plan import Plan
from polyad.train.config.run import RunConfig, parse_config
from polyad.train.config.text import flatten
from polyad.train.loop.muon import matrices_of_adamw
from polyad.train.loop.optimizer import learning_rate
from polyad.train.state import TrainState
from polyad.train.tasks.images import ImageClassification
from polyad.train.tasks.pixels import normalization_of

MANY_EPOCHS = 100
"""Warn above this many epochs: overfitting is likely, or the data is not the intended one."""
PADDED_ROWS = 1024
"""Maximum number of extra embedding rows that pad the vocabulary for a GPU."""


def nothing_is_left(plan: Plan, state: TrainState) -> bool:
    """Whether the run is finished: all steps done or stopped early, including the last validation.

    Args:
        plan: the run's plan.
        state: the run's state.
    """
    if state.unfinished is not None:
        return False
    return state.step == plan.config.train.steps or state.is_over(plan.config.evaluation.patience)


def first_line(plan: Plan, state: TrainState) -> str:
    """The line that a start prints before it builds anything."""
    steps, folder = plan.config.train.steps, Path(plan.config.run.folder)
    if plan.resume is None:
        return f"new run: {steps:,} steps, in {folder}{_weights(plan)}"
    place, left = plan.resume.folder, steps - state.step
    if nothing_is_left(plan, state) and left:
        reason = state.why_it_is_over(plan.config.evaluation.patience)
        line = f"nothing left to do: {reason}; the last checkpoint is {place}"
    elif nothing_is_left(plan, state):
        line = f"nothing left to do: all {steps:,} steps are done; the last checkpoint is {place}"
    elif left:
        line = f"continues from step {state.step:,} of {steps:,} ({left:,} left), from {place}"
    else:
        line = f"continues after step {state.step:,}, the last, with the validation, from {place}"
    start = plan.config.checkpoint.init_from
    unused = ""
    if start and plan.config.adapt.lora is None:
        unused = f"; checkpoint.init_from: {start} is ignored, as it is for new runs only"
    rate = "" if nothing_is_left(plan, state) else _rate(plan, state)
    return line + rate + _average(plan) + _best(plan, state) + _teacher(plan) + unused


def say_first_line(plan: Plan, state: TrainState) -> None:
    """Prints the first line, and warnings; called only by the main process."""
    print(first_line(plan, state), file=sys.stderr, flush=True)
    model = model_of(plan.config)
    count = counts(model)
    if count.frozen and not nothing_is_left(plan, state):
        print(count.in_words(), file=sys.stderr, flush=True)
    if (note := blocks_note(plan.config)) and not nothing_is_left(plan, state):
        print(f"polyad: {note}", file=sys.stderr, flush=True)
    if note := warm_up_note(plan.config):
        print(f"polyad: warning: {note}", file=sys.stderr, flush=True)
    notes = list(plan.task.notes)
    if (note := optimizer_note(plan.config, model)) and not nothing_is_left(plan, state):
        notes.append(note)
    if not plan.task.has_validation:
        notes.append(f"the data has no validation split to score; {plan.task.to_validate}")
    for note in notes:
        print(f"polyad: {note}", file=sys.stderr, flush=True)
    of_node = os.environ.get("LOCAL_WORLD_SIZE", "")
    if of_node.isdecimal() and (crossing := plan.dims.crossing(int(of_node))):
        print(f"polyad: warning: {crossing}", file=sys.stderr, flush=True)


def blocks_note(config: RunConfig) -> str | None:
    """Explains the losses of a run with distill.blocks; None for other runs."""
    if config.distill.blocks is None or not isinstance(config.model, DecoderSettings):
        return None
    blocks = config.model.replaced_blocks()
    one = len(blocks) == 1
    what = f"the feed-forward{'' if one else 's'} of block{'' if one else 's'} "
    what += f"{', '.join(map(str, blocks))} learn{'s from that' if one else ' from those'} of "
    return (
        f"{what}{config.distill.teacher}: the training loss is distill.blocks: "
        f"{config.distill.blocks}; validation scores the spliced model"
    )


def optimizer_note(config: RunConfig, model: nn.Module) -> str | None:
    """Names the matrices of blocks that Muon leaves to AdamW; None if there are none.

    Args:
        config: the run's configuration.
        model: its model.
    """
    if config.optimizer.kind != "muon":
        return None
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    dimensions = matrix_dimensions(model)
    left = matrices_of_adamw({name: dimensions[name] for name in dimensions if name in trained})
    return f"AdamW updates these matrices of blocks, not Muon: {', '.join(left)}" if left else None


def _rate(plan: Plan, state: TrainState) -> str:
    assert plan.resume is not None
    before = parse_config(plan.resume.config_yaml, origin=str(plan.resume.folder))
    note = change_of_rate(before, plan.config, state.step)
    return f"; {note}" if note else ""


def _best(plan: Plan, state: TrainState) -> str:
    assert plan.resume is not None
    if plan.resume.state.best_score is None or state.best_score is not None:
        return ""
    return "; earlier validation scores no longer count as the best"


def _teacher(plan: Plan) -> str:
    assert plan.resume is not None
    before = plan.resume.state.teacher_step
    if plan.teacher is None or before is None or plan.teacher.step == before:
        return ""
    return (
        f"; the teacher has changed: step {plan.teacher.step:,} of {plan.config.distill.teacher}, "
        f"before it was step {before:,}"
    )


def _average(plan: Plan) -> str:
    if plan.config.train.ema is None or plan.resume is None or plan.resume.has_average:
        return ""
    return "; the moving average (train.ema) starts from the weights of that step"


def _weights(plan: Plan) -> str:
    if plan.init is None:
        return ""
    note = getattr(plan.init, "note", None)
    new = f"; {note}" if note else ""
    new += _pixels(plan, plan.init)
    if anew := begins_anew(plan.task, plan.init, plan.config):
        more = f" and {len(anew) - 3} more" if len(anew) > 3 else ""
        new += (
            f"; initialized from the seed: {', '.join(f'{prefix}*' for prefix in anew[:3])}{more}"
        )
    if isinstance(plan.init, Checkpoint):
        step = plan.init.training_step
        return f", from the weights of step {step:,}, {plan.init.folder}{new}"
    return f", from the weights of {plan.init.folder}{new}"


def _pixels(plan: Plan, weights: Weights) -> str:
    """Warns if pixels are normalized differently than in the training of the weights."""
    task = plan.task
    if not isinstance(task, ImageClassification):
        return ""
    theirs, ours = normalization_of(weights, task.model.image_size), task.settings.normalization
    if theirs in (None, ours):
        return ""
    return f"; data.normalization: {ours}, but the weights were trained with {theirs}"


def schedule_line(config: RunConfig) -> str:
    """The learning rate over the run, in words."""
    schedule, peak = config.schedule, config.optimizer.learning_rate
    start = f"up to {peak:g} in {schedule.warmup_steps:,} steps" if schedule.warmup_steps else ""
    if schedule.kind == "constant":
        return f"{start}, then constant" if start else f"constant {peak:g}"
    end = schedule.decay_steps or config.train.steps
    fall = f"{schedule.kind} from {peak:g} to {peak * schedule.final_ratio:g} at step {end:,}"
    return f"{start}, {fall}" if start else fall


def change_of_rate(before: RunConfig, now: RunConfig, step: int) -> str | None:
    """Describes a change in the learning rate schedule of a resumed run; None: no change."""
    changed = _changes(before, now)
    if not changed or step >= now.train.steps:
        return None
    here, there = (
        learning_rate(each.schedule, each.optimizer.learning_rate, step, each.train.steps)
        for each in (now, before)
    )
    changes = "is unchanged, but later ones differ"
    if f"{here:.3g}" != f"{there:.3g}":
        changes = f"is {here:.3g} instead of {there:.3g}"
    return f"the learning rate of step {step + 1:,} {changes} ({', '.join(changed)})"


def _changes(before: RunConfig, now: RunConfig) -> list[str]:
    """The keys by which a resumed run's learning rate schedule differs."""
    keys = ["optimizer.learning_rate", "schedule.kind", "schedule.warmup_steps"]
    if {before.schedule.kind, now.schedule.kind} != {"constant"}:
        keys += ["schedule.final_ratio", "schedule.decay_steps"]
        ends = [each.schedule.decay_steps or each.train.steps for each in (before, now)]
        if ends[0] == ends[1]:
            keys.remove("schedule.decay_steps")
        elif before.schedule.decay_steps == now.schedule.decay_steps:
            keys[-1] = "train.steps"
    there, here = (flatten(each.model_dump(mode="json")) for each in (before, now))
    changed = [
        f"{key}: {_word(there[key])} before, {_word(here[key])} now"
        for key in keys
        if there[key] != here[key]
    ]
    if "train.steps" in keys and changed:
        changed[-1] += ", with schedule.decay_steps: null"
    return changed


def _word(value: object) -> str:
    return "null" if value is None else str(value)


def warm_up_note(config: RunConfig) -> str | None:
    """Warns about a run that ends before its learning rate reaches the peak."""
    steps, warmup = config.train.steps, config.schedule.warmup_steps
    if steps >= warmup:
        return None
    key = f"schedule.warmup_steps: {warmup:,}"
    return f"train.steps: {steps:,} ends the run before its warm-up ({key})"


def data_notes(plan: Plan) -> list[str]:
    """Warns about a run that does not suit its data: too many epochs, or a far larger
    vocabulary."""
    train, notes = plan.config.train, []
    epochs = train.steps * train.global_batch_size / plan.task.samples_per_epoch
    if epochs > MANY_EPOCHS:
        notes.append(
            f"train.steps: {train.steps:,} reads the training data {epochs:,.0f} times (epochs): "
            f"lower train.steps, or prepare more data"
        )
    ours, theirs = getattr(plan.config.model, "vocab_size", None), plan.kept.state.get("vocab_size")
    if ours and theirs and ours > theirs + PADDED_ROWS:
        notes.append(
            f"model.vocab_size: {ours:,} is more than the {theirs:,} tokens of the tokenizer: the "
            f"other {ours - theirs:,} are never used; null takes the size from the data"
        )
    return notes


def schedule_notes(config: RunConfig) -> list[str]:
    """Warns about a schedule whose length does not match the run."""
    steps, schedule = config.train.steps, config.schedule
    notes = [note] if (note := warm_up_note(config)) else []
    end = schedule.decay_steps
    if end is None or schedule.kind == "constant" or abs(end - steps) <= steps / 10:
        return notes
    last = learning_rate(schedule, config.optimizer.learning_rate, steps - 1, steps)
    key = f"schedule.decay_steps: {end:,}"
    if end < steps:
        left = f"the learning rate stays at {last:.3g} for the last {steps - end:,} steps"
        what = f"{key} is much less than train.steps: {steps:,}: {left}"
    else:
        left = f"the run ends at a learning rate of {last:.3g}"
        what = f"{key} is much more than train.steps: {steps:,}: {left}"
    return [*notes, f"{what}; null makes the decay end with the run"]
