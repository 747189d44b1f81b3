"""The learning rate of a run, in words: where it goes, and what is odd about it."""

from polyad.train.config.run import RunConfig
from polyad.train.config.text import flatten
from polyad.train.loop.schedule import learning_rate


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
    """What to say of a learning rate that does not go on as a run began; None: it does.

    Args:
        before: what the run was trained with so far.
        now: what it goes on with.
        step: optimizer steps done.
    """
    changed = _changes(before, now)
    if not changed or step >= now.train.steps:
        return None
    here, there = (
        learning_rate(each.schedule, each.optimizer.learning_rate, step, each.train.steps)
        for each in (now, before)
    )
    changes = "is as before, and changes later on"
    if f"{here:.3g}" != f"{there:.3g}":
        changes = f"is {here:.3g}, and was to be {there:.3g}"
    return f"the learning rate of step {step + 1:,} {changes} ({', '.join(changed)})"


def _changes(before: RunConfig, now: RunConfig) -> list[str]:
    """The keys by which the learning rate of a run goes on otherwise than it began."""
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
        f"{key}: {_word(there[key])} there, {_word(here[key])} here"
        for key in keys
        if there[key] != here[key]
    ]
    if "train.steps" in keys and changed:
        changed[-1] += ", with schedule.decay_steps: null"
    return changed


def _word(value: object) -> str:
    return "null" if value is None else str(value)


def warm_up_note(config: RunConfig) -> str | None:
    """What is odd about a run that ends before its learning rate is at its highest."""
    steps, warmup = config.train.steps, config.schedule.warmup_steps
    if steps >= warmup:
        return None
    return (
        f"train.steps: {steps:,} ends the run in the warm-up of schedule.warmup_steps: {warmup:,}"
    )


def schedule_notes(config: RunConfig) -> list[str]:
    """What is odd about how long the schedule is beside the run."""
    steps, schedule = config.train.steps, config.schedule
    notes = [note] if (note := warm_up_note(config)) else []
    end = schedule.decay_steps
    if end is None or schedule.kind == "constant" or abs(end - steps) <= steps / 10:
        return notes
    last = learning_rate(schedule, config.optimizer.learning_rate, steps - 1, steps)
    key = f"schedule.decay_steps: {end:,}"
    if end < steps:
        left = f"the rate stays at {last:.3g} for the last {steps - end:,} steps"
        what = f"{key} is long before train.steps: {steps:,}: {left}"
    else:
        what = f"{key} is long after train.steps: {steps:,}: the run ends at a rate of {last:.3g}"
    return [*notes, f"{what}; null ends both together"]
