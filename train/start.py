"""Where a run starts: its data, and a checkpoint, other weights or a seed.

All is checked before memory is taken; the first line of a run says where it starts.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from polyad.model.lora import of_base
from polyad.parallel import comm
from polyad.parallel.checkpoint.format import CONFIG_FILE
from polyad.parallel.checkpoint.load import (
    Checkpoint,
    newest_that_opens,
    newest_verified,
    verify_together,
)
from polyad.parallel.checkpoint.manage import complete_checkpoints
from polyad.parallel.config import Dims
from polyad.parallel.families import FamilyWeights
from polyad.parallel.weights import (
    Weights,
    check_base,
    check_fits,
    digest_of,
    open_weights,
    origin_of,
)
from polyad.train.config.adaptation import (
    graph_statistics,
    model_of,
    reinitialized_prefixes,
    trained_line,
)
from polyad.train.config.distillation import TeacherAt, check_teacher, of_step
from polyad.train.config.environment import check_same_checkpoint
from polyad.train.config.rules import refuse_changes, validate
from polyad.train.config.run import RunConfig, config_of_checkpoint, load_config
from polyad.train.errors import ConfigError, some_of
from polyad.train.guard.run_folder import LOCK_FILE, check_place
from polyad.train.loop.metrics import check_trackers
from polyad.train.loop.optimizer import learning_rate
from polyad.train.state import TrainState
from polyad.train.tasks.images import ImageClassification
from polyad.train.tasks.pixels import normalization_of
from polyad.train.tasks.registry import open_task
from polyad.train.tasks.samples import probe_of
from polyad.train.tasks.task import Task

LAUNCH_FOLDER = "launch"
"""Subfolder of a run to which `polyad launch` writes, possibly before the run starts."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A checked run: first against its data, then also against its initial weights."""

    config: RunConfig
    """The configuration, completed with the values that the data determines."""
    dims: Dims
    task: Task[Any]
    resume: Checkpoint | None = None
    """The checkpoint from which the run continues."""
    init: Weights | None = None
    """The initial weights of a new run; with adapters also of a resumed one."""
    base_digest: str | None = None
    """A digest of the frozen weights under adapters."""
    teacher: TeacherAt | None = None
    """The teacher's checkpoint."""

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.config.run.folder)

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return self.folder / "checkpoints"

    def what_is_kept(self) -> str:
        """Where the run continues if it is interrupted, in words."""
        if checkpoints := complete_checkpoints(self.checkpoints):
            return f"run the same command again to continue from {checkpoints[-1]}"
        return "no checkpoint was written yet; run the same command again to start from step 0"

    def start_state(self) -> TrainState:
        """Returns the state of a run that continues from its checkpoint, or starts."""
        values: dict[str, Any] = {}
        if self.resume is not None:
            values |= self.resume.state.model_dump()
            before, now = (
                (each.evaluation.max_windows, each.evaluation.stride, each.checkpoint.keep_best)
                for each in (config_of_checkpoint(self.resume), self.config)
            )
            if before != now:  # other scores, or a best checkpoint that was not kept
                values |= {"best_score": None, "validations_since_best": 0}
        elif self.init is not None:
            values["huggingface"] = origin_of(self.init)
        values |= {
            **self.task.kept().state,
            "world_size": self.dims.world_size,
            "base_digest": self.base_digest,
            "teacher_step": None if self.teacher is None else self.teacher.step,
        }
        return TrainState(**values)


def open_plan(path: Path, overrides: Sequence[str], world_size: int) -> Plan:
    """Reads the configuration and opens the data, without slow imports.

    Args:
        path: the configuration.
        overrides: `key=value`.
        world_size: number of processes.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong.
    """
    config = load_config(path, overrides)
    dims = validate(config, world_size)
    check_trackers(config.log.trackers)
    task = open_task(config.for_task())
    for key, is_set in (
        ("log.fluctuation", config.log.fluctuation),
        ("evaluation.patience", config.evaluation.patience),
        ("checkpoint.keep_best", config.checkpoint.keep_best),
    ):
        if is_set and not task.has_validation:
            raise ConfigError(
                f"{key}: {is_set} is not allowed with {task.place}, which has no validation split"
            )
    if config.log.fluctuation:
        probe_of(task, config.log.fluctuation_tokens)
    config = config.model_copy(update={"model": task.model})
    return Plan(config=config, dims=dims, task=task)


def find_start(plan: Plan) -> Plan:
    """Finds and checks what a run starts from: a checkpoint, other weights, a teacher. Needs no
    process group and little memory.

    Args:
        plan: the run's plan.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong.
    """
    config, task = plan.config, plan.task
    model = model_of(config)
    teacher = check_teacher(config, task)
    resume = find_resume(config, task)
    init, base_digest = None, None
    if resume is not None:
        resume.check_model(model)
        if teacher is not None and config.distill.blocks is not None:
            key = f"distill.teacher: {config.distill.teacher}"
            teacher = of_step(teacher, resume.state.teacher_step, key)
    place = config.checkpoint.init_from
    # A teacher of blocks provides all weights except replaced feed-forwards.
    start = teacher.folder if teacher is not None and config.distill.blocks else place
    if start is not None and (resume is None or config.adapt.lora):
        init = _open_init(config, task, Path(start))
    if config.adapt.lora is not None:
        assert init is not None
        base_digest = digest_of(init, of_base(model))
        if resume is not None:
            check_base(resume.folder, resume.state.base_digest, init, base_digest)
    return replace(plan, resume=resume, init=init, base_digest=base_digest, teacher=teacher)


def find_start_together(plan: Plan, world: comm.World) -> Plan:
    """Finds where a run starts like `find_start`: rank 0 reads the run's folder, and every process
    opens what it has found.

    Args:
        plan: the same on all processes.
        world: this process.

    Raises:
        ValueError: on all processes, if rank 0 finds something wrong, or a host has another
            checkpoint at that place.
    """
    started = comm.on_main(partial(find_start, plan)) or plan
    init, place = started.init, None if started.init is None else started.init.folder
    found = place, isinstance(init, Checkpoint), started.teacher, started.base_digest
    place, is_checkpoint, teacher, base_digest = comm.from_main(found)
    key = "checkpoint.init_from" if plan.config.distill.blocks is None else "distill.teacher"
    if place is not None and is_checkpoint:
        check_same_checkpoint(key, place)
    if teacher is not None:
        check_same_checkpoint("distill.teacher", teacher.folder)
    if place is not None and not world.is_main:
        init = _open_init(plan.config, plan.task, place)
    return replace(plan, resume=started.resume, init=init, base_digest=base_digest, teacher=teacher)


def verify_start(plan: Plan) -> Plan:
    """Verifies every byte of the checkpoint from which a run continues, or from whose weights it
    starts; all processes call this.

    Returns:
        The plan with the newest intact checkpoint, which only rank 0 has looked for so far.
    """
    resume = newest_verified(plan.resume, plan.checkpoints)
    if resume is not None and (plan.resume is None or resume.folder != plan.resume.folder):
        resume.check_model(model_of(plan.config))
    if resume is None and isinstance(plan.init, Checkpoint):
        verify_together(plan.init)
    return replace(plan, resume=resume)


def _open_init(config: RunConfig, task: Task[Any], path: Path) -> Weights:
    """Opens the initial weights of a new run, and checks that they fit its model and data."""
    weights = open_weights(path)
    if isinstance(weights, FamilyWeights):
        weights.seed = config.seed
    anew = reinitialized_prefixes(task, weights, config)
    check_fits(weights, config.model, (*anew, *graph_statistics(weights, config.model)[1]))
    for name in sorted(of_base(model_of(config))):
        if name.startswith(anew) or (isinstance(weights, FamilyWeights) and weights.is_new(name)):
            raise ConfigError(
                f"adapt.lora.trained: {name} starts from random values and would never be trained"
            )
    task.check_weights(weights, "checkpoint.init_from")
    return weights


def find_resume(config: RunConfig, task: Task[Any]) -> Checkpoint | None:
    """Finds the newest complete checkpoint in the run's folder, if the folder belongs to this run.

    Raises:
        ConfigError: the folder contains another run, or is not a run's folder.
    """
    folder = Path(config.run.folder)
    saved = folder / CONFIG_FILE
    # A start that was killed early leaves these files but no configuration.
    early = (LOCK_FILE, f".{CONFIG_FILE}.")
    names = check_place(folder, "run.folder")
    if all(name == LAUNCH_FOLDER or name.startswith(early) for name in names):
        return None
    if not saved.exists():
        raise ConfigError(f"run.folder: {folder} holds files of something that is not a run")
    checkpoint = newest_that_opens(folder / "checkpoints")
    if checkpoint is None:
        refuse_changes(load_config(saved), config, folder)
        return None
    refuse_changes(config_of_checkpoint(checkpoint), config, folder)
    if checkpoint.state.data_fingerprint != task.fingerprint:
        raise ConfigError(
            f"{task.place} holds other data than {folder} was trained on, or mixes it by other "
            "weights"
        )
    if checkpoint.training_step > config.train.steps:
        raise ConfigError(
            f"train.steps: {config.train.steps} is less than the {checkpoint.training_step} steps "
            f"that the run in {folder} has already done"
        )
    return checkpoint


def nothing_is_left(plan: Plan, state: TrainState) -> bool:
    """Whether the run is finished: all steps done or stopped early, including the last validation.

    Args:
        plan: the run's plan.
        state: the run's state.
    """
    if state.unfinished is not None:
        return False
    return state.step == plan.config.train.steps or state.is_over(plan.config.evaluation.patience)


def say_first_lines(plan: Plan, state: TrainState) -> None:
    """Prints where the run starts, and warnings; called only by the main process."""
    lines = [_first_line(plan, state)]
    if not nothing_is_left(plan, state):
        if line := trained_line(model_of(plan.config)):
            lines.append(line)
        lines += [f"polyad: {note}" for note in plan.task.notes]
        if not plan.task.has_validation:
            lines.append("polyad: the data has no validation split to score")
    print(*lines, sep="\n", file=sys.stderr, flush=True)


def _first_line(plan: Plan, state: TrainState) -> str:
    steps = plan.config.train.steps
    if plan.resume is None:
        return f"new run: {steps:,} steps, in {plan.folder}{_weights(plan)}"
    place, left = plan.resume.folder, steps - state.step
    if nothing_is_left(plan, state):
        reason = f"all {steps:,} steps are done"
        if left:
            reason = state.why_it_is_over(plan.config.evaluation.patience)
        return f"nothing left to do: {reason}; the last checkpoint is {place}"
    changes = _changes(plan, plan.resume, state.step)
    if left:
        line = f"continues from step {state.step:,} of {steps:,} ({left:,} left), from {place}"
    else:
        line = f"continues after step {state.step:,}, the last, with the validation, from {place}"
    return line + changes


def _changes(plan: Plan, resume: Checkpoint, step: int) -> str:
    """What changes at a resume that no error refuses: the learning rate and the teacher."""
    config, before, changes = plan.config, config_of_checkpoint(resume), ""
    if step < config.train.steps:
        rate, rate_before = (
            f"{learning_rate(c.schedule, c.optimizer.learning_rate, step, c.train.steps):.3g}"
            for c in (config, before)
        )
        if rate != rate_before:
            changes = f"; the learning rate of step {step + 1:,} is {rate}, it was {rate_before}"
    teacher_step = resume.state.teacher_step
    if plan.teacher is not None and teacher_step not in (None, plan.teacher.step):
        changes += f"; the teacher is at step {plan.teacher.step:,}, it was at {teacher_step:,}"
    return changes


def _weights(plan: Plan) -> str:
    """Where a new run has its weights from, and what they lack."""
    if plan.init is None:
        return ""
    note = getattr(plan.init, "note", None)
    lacks = f"; {note}" if note else ""
    task = plan.task
    if isinstance(task, ImageClassification):
        theirs = normalization_of(plan.init, task.model.image_size)
        if theirs not in (None, task.settings.normalization):
            lacks += (
                f"; data.normalization: {task.settings.normalization}, but the weights were "
                f"trained with {theirs}"
            )
    if anew := reinitialized_prefixes(task, plan.init, plan.config):
        lacks += f"; initialized from the seed: {some_of([f'{prefix}*' for prefix in anew], 3)}"
    step = f"step {plan.init.training_step:,}, " if isinstance(plan.init, Checkpoint) else ""
    return f", from the weights of {step}{plan.init.folder}{lacks}"
