"""The training loop: trains on batches, writes records, validates and saves."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyad.data.batches import batch_of_step
from polyad.parallel.zero import Engine, StepResult
from polyad.train.errors import RunError
from polyad.train.guard.limits import NO_LIMITS, Limits, StepOutcome
from polyad.train.guard.monitor import MonitorConfig
from polyad.train.guard.room import last_checkpoint
from polyad.train.guard.spikes import SpikeGuard, remember
from polyad.train.guard.stopping import StopAsked
from polyad.train.loop.best import is_over, judge, not_finite, why_it_is_over
from polyad.train.loop.config import TrainConfig
from polyad.train.loop.device import memory_of_process
from polyad.train.loop.hooks import Hooks
from polyad.train.loop.losses import LossConfig
from polyad.train.loop.metrics import LogConfig, Metrics, peak_flops
from polyad.train.loop.optimizer import OptimizerConfig, warm_up
from polyad.train.loop.routing import routing_record
from polyad.train.loop.schedule import ScheduleConfig, learning_rate
from polyad.train.loop.step import IssuedStep, issue_step
from polyad.train.loop.timing import StepTimer, TimedBatches
from polyad.train.loop.trace import profiler
from polyad.train.state import TrainState
from polyad.train.tasks.random_input import training_flops
from polyad.train.tasks.task import Task

MEMORY = ("memory_bytes", "memory_reserved_bytes")
"""Keys of a record, of the process that took the most since the step before."""


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """The sections of a configuration that the loop reads."""

    folder: Path
    """The folder of the run."""
    train: TrainConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    loss: LossConfig
    monitor: MonitorConfig
    log: LogConfig
    validate_every: int
    """Steps between validations; 0: only at the end."""
    save_every: int
    """Steps between checkpoints; 0: only at the end."""
    patience: int | None = None
    """Validations without a better score after which the run ends; None: it goes on."""
    keep_best: bool = False
    """Whether a checkpoint is written after each validation that is the best so far."""


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A step that was issued, and whose numbers are not read yet."""

    step: int
    samples: int
    """Of the run, with it."""
    batch: int
    """Its global batch."""
    rate: float
    seconds: float
    data_seconds: float
    issued: IssuedStep


class TrainLoop:
    """Trains until `config.train.steps`, or until a signal stops it.

    Args:
        engine: model and optimizer.
        task: what is learned.
        micro_batches: this process's, in order, on the engine's device.
        state: progress so far; updated after every step.
        config: the run's sections.
        accumulation_steps: micro-batches of this process in a step.
        hooks: validation, saving and the like.
        metrics: None on all processes but the main one.
    """

    def __init__(
        self,
        engine: Engine,
        task: Task[Any],
        micro_batches: Iterator[Any],
        state: TrainState,
        config: LoopConfig,
        *,
        accumulation_steps: int,
        hooks: Hooks,
        metrics: Metrics | None,
    ) -> None:
        self._engine, self._task, self._batches = engine, task, TimedBatches(micro_batches)
        self._state, self._config = state, config
        self._accumulation_steps, self._world = accumulation_steps, engine.world
        self._hooks, self._metrics = hooks, metrics
        self._units_per_sample = task.model.units_per_sample()
        self._peak = peak_flops(config.log, config.train.precision, tf32=config.train.tf32)
        self._flops_per_unit = (
            training_flops(task.model, *task.sequences_of_sample()) if self._peak else 0
        )
        self._guard = SpikeGuard(config.monitor, config.folder, hooks.sources, metrics)
        self._saved_at = state.step
        self._owes_save = False
        """Whether a checkpoint was due in a step that was skipped, and none was applied since."""
        self._bad: str | None = None
        """What was not finite in the last validation: of such weights no checkpoint is written."""
        self._timer = StepTimer()
        self._pending: Pending | None = None
        self._told = 0

    def run(self) -> int:
        """Trains, and waits for the last checkpoint.

        Returns:
            0 at the end of the run. If a signal stopped it before, the number that
            `StopSignals.agreed` gave, after everything was saved.

        Raises:
            RunError: too many steps in a row were not finite, or there were too many spikes.
        """
        try:
            signal = self._train()
        except BaseException:
            pending = self._pending
            known = pending is not None and pending.issued.exchanged.arrived
            record = self._close(pending) if pending is not None and known else None
            if record is not None and self._metrics is not None:
                self._metrics.write(record)  # others may be elsewhere: nothing here waits for them
            raise
        with self._hooks.stop.saving():
            self._hooks.checkpoints.finish()
        return signal

    def _train(self) -> int:
        state, hooks = self._state, self._hooks
        self._engine.train()
        if state.unfinished is not None:
            unfinished, state.unfinished = state.unfinished, None
            memory = _memory_record(*memory_of_process(self._world.device))
            self._saved_at = -1  # the checkpoint of this step has that it was not judged
            self._finish(unfinished | memory, saves=False)
            if state.unfinished is None:
                self._save()
        self._timer = StepTimer()  # the first step starts here, not in the constructor
        with profiler(self._config.log.profile, self._config.folder, self._world) as tick:
            while state.step < self._config.train.steps and not self._is_over():
                signal = self._signal()
                if signal or state.unfinished is not None:
                    self._settle()
                    self._save()
                    return signal or hooks.stop.agreed()
                hooks.at(f"step {state.step + 1}")
                issued = self._issue()
                tick()
                self._settle()
                self._pending = issued
                if self._waits_for(issued):
                    self._finish(self._settle())
        if state.unfinished is not None:  # the last validation was not finished
            self._save()
            return hooks.stop.agreed()
        return 0

    def _is_over(self) -> bool:
        return is_over(self._state, self._config.patience)

    def _signal(self) -> int:
        """The signal that some process got, as `StopSignals.agreed`; of several processes as they
        told each other in the last step whose numbers were read."""
        return self._hooks.stop.agreed() if self._world.size == 1 else self._told

    def _waits_for(self, pending: "Pending") -> bool:
        """Whether the numbers of a step are needed before the next one is issued."""
        config, step = self._config, pending.step
        done = step == config.train.steps
        due = _due(step, config.validate_every, done) or _due(step, config.save_every, done)
        return due or self._owes_save or self._guard.holds or not pending.issued.result.applied

    def _issue(self) -> "Pending":
        """Issues one step; its numbers are read when the next one is under way."""
        state, config = self._state, self._config
        rate = learning_rate(
            config.schedule, config.optimizer.learning_rate, state.step, config.train.steps
        )
        warm_up(self._engine.optimizer, state.step)
        batch = batch_of_step(state.step, state.left_out)
        limits = self._guard.limits(state) if self._guard.holds else NO_LIMITS
        look = self._hooks.stragglers
        look.look(state.step + 1)
        issued = issue_step(
            self._engine,
            self._task.losses,
            self._batches,
            self._accumulation_steps,
            rate,
            losses=config.loss,
            progress=(state.step + 1) / config.train.steps,
            limits=limits,
            own=lambda: (
                self._hooks.stop.number,
                *memory_of_process(self._world.device),
                *look.own(self._batches.waited),
            ),
        )
        seconds = self._timer.step()
        state.step += 1
        state.samples += config.train.global_batch_size
        state.seconds += seconds
        return Pending(
            step=state.step,
            samples=state.samples,
            batch=batch,
            rate=rate,
            seconds=seconds,
            data_seconds=self._batches.seconds(),
            issued=issued,
        )

    def _settle(self) -> dict[str, Any] | None:
        """Reads the numbers of the step before, if that was not done, and writes its record unless
        that waits for validation; returns it, or None if the run went back to a checkpoint."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        record = self._close(pending)
        if not self._waits_for(pending):
            self._write(record)
        return record

    def _close(self, pending: "Pending") -> dict[str, Any] | None:
        """The record of a step; None if the run went back to a checkpoint."""
        state, config = self._state, self._config
        outcome, numbers = pending.issued.outcome(), pending.issued.exchanged.read()
        *highest, products, waits = zip(*numbers.of_each, strict=True)
        signals, held, reserved = map(max, highest)
        self._told = signals
        if signals:
            self._hooks.stop.heard()
        loss, result, routing, sane = outcome
        limits = self._guard.limits(state)
        spike = limits.exceeded(loss, result.grad_norm) or not sane
        _advance(state, config, loss, result, spike=spike)
        if (
            spike
            and config.monitor.spike_action == "rewind"
            and self._went_back(pending.batch, limits, outcome)
        ):
            return None
        units = f"{self._task.unit.name}s"
        units_per_second = config.train.global_batch_size * self._units_per_sample / pending.seconds
        flops = self._flops_per_unit * units_per_second
        record: dict[str, Any] = {
            "step": pending.step,
            "loss": loss,
            "grad_norm": result.grad_norm,
            "learning_rate": pending.rate,
            f"{units}_per_second": units_per_second,
            "step_seconds": pending.seconds,
            "data_seconds": pending.data_seconds,
            **self._task.counted(pending.samples),
            "mfu": flops / (self._peak * self._world.size) if self._peak else None,
            "skipped": not result.applied,
            "skipped_steps": state.skipped_steps,
        } | _memory_record(held, reserved)
        if self._metrics is not None:  # of all processes one writes it
            record |= routing_record(routing, self._world.expert_parallel_size)
        slow, lines = self._hooks.stragglers.judge(products, waits, pending.seconds)
        record |= slow
        if self._metrics is not None:
            for line in lines:
                self._metrics.say(f"polyad: warning: step {pending.step}: {line}")
        if spike:
            record |= self._guard.stayed(pending.step, pending.batch, limits, outcome)
        return record | self._guard.rewound()

    def _write(self, record: dict[str, Any] | None) -> None:
        if self._metrics is not None and record is not None:
            self._metrics.write(record)
        self._hooks.checkpoints.poll()

    def _went_back(self, batch: int, limits: Limits, outcome: StepOutcome) -> bool:
        """Goes back to the newest checkpoint; returns False if there is none."""
        state = self._state
        self._guard.check_rewinds(state)
        step, count = state.step, state.spikes
        following = self._hooks.go_back(state, batch)
        if following is None:
            return False
        self._batches, state.spikes = TimedBatches(following), count
        self._guard.went_back(step, batch, limits, outcome, state.step)
        self._saved_at, self._bad = state.step, None
        return True

    def _finish(self, record: dict[str, Any] | None, *, saves: bool = True) -> None:
        """Validates if that is due, writes the step's record, and saves if that is due.

        Args:
            record: None if the run went back to a checkpoint: then nothing is due.
            saves: whether to save if that is due.
        """
        if record is None:
            return
        state, config, hooks = self._state, self._config, self._hooks
        reason = _why_to_end(state, config)
        done, better = state.step == config.train.steps, False
        due = reason is None and _due(state.step, config.validate_every, done)
        if due and hooks.validate is not None:
            hooks.at(f"validation after step {state.step}")
            try:
                with self._timer.aside():
                    scores = hooks.validate()
                record = record | scores
                score = scores[self._task.validation_score]
                self._bad = not_finite(scores, self._task.validation_score)
                better = judge(state, score, higher_is_better=self._task.higher_is_better)
            except StopAsked:  # the next start of the run validates, with the same weights
                state.unfinished = {k: v for k, v in record.items() if k not in MEMORY}
                return
            finally:
                self._engine.train()
            if self._is_over() and self._metrics is not None:
                self._metrics.say(f"polyad: {why_it_is_over(state, config.patience)}")
            if self._bad and (done or self._is_over()):
                reason = f"the run ends with a validation that is not finite ({self._bad})"
            elif self._bad and self._metrics is not None:
                self._metrics.say(
                    f"polyad: warning: step {state.step}: {self._bad}; no checkpoint is written "
                    f"until a validation is finite, and the ones before stay"
                )
        saves = saves and reason is None and self._saves_now(record["skipped"], done)
        if reason is None and ((better and config.keep_best) or self._is_over()):
            saves, self._saved_at = True, -1  # also where this step was saved before it was judged
        if saves and hooks.fluctuation is not None:
            with self._timer.aside():
                record |= hooks.fluctuation()
            self._engine.train()
        self._write(record)
        if reason is not None:
            hooks.checkpoints.finish()
            saved = last_checkpoint(config.folder / "checkpoints")
            raise RunError(f"step {state.step}: {reason}; {saved}")
        if saves:
            self._save()

    def _saves_now(self, skipped: bool, done: bool) -> bool:
        """Whether a checkpoint is due; one that is due in a skipped step waits for the next step.

        Steps may be skipped since the weights are damaged, and a checkpoint of them would take the
        place of a good one. If they are not, a skipped step has changed nothing.
        """
        if self._bad:
            return False
        due = self._owes_save or _due(self._state.step, self._config.save_every, done)
        self._owes_save = due and skipped and not done
        return due and not self._owes_save

    def _save(self) -> None:
        """Writes a checkpoint, unless this step was saved with the same state."""
        if self._bad or (self._saved_at == self._state.step and self._state.unfinished is None):
            return
        if self._metrics is not None:
            self._metrics.flush()  # or the run would go on from here without these records
        self._hooks.at(f"saving step {self._state.step}")
        with self._hooks.stop.saving():
            self._hooks.checkpoints.save(self._state)
        self._saved_at = self._state.step


def _memory_record(held: int, reserved: int) -> dict[str, int | None]:
    return dict(zip(MEMORY, (held, reserved or None), strict=True))


def _why_to_end(state: TrainState, config: LoopConfig) -> str | None:
    """The reason to end the run, if too many steps in a row were skipped; else None."""
    if state.skipped_in_a_row >= config.train.max_skipped_steps:
        return (
            f"{state.skipped_in_a_row} steps in a row had a loss or gradient that is not finite "
            f"(train.max_skipped_steps)"
        )
    if state.spikes_in_a_row > config.monitor.max_skips:
        return (
            f"{state.spikes_in_a_row} steps in a row had a loss or gradient far above the ones "
            f"before and were skipped (monitor.max_skips: {config.monitor.max_skips})"
        )
    return None


def _advance(
    state: TrainState,
    config: LoopConfig,
    loss: float,
    result: StepResult,
    *,
    spike: bool,
) -> None:
    not_finite = not result.applied and not spike
    state.skipped_steps += not_finite
    state.skipped_in_a_row = state.skipped_in_a_row + 1 if not_finite else 0
    state.spikes += spike
    state.spikes_in_a_row = state.spikes_in_a_row + 1 if spike and not result.applied else 0
    if result.applied:
        remember(config.monitor, state, loss, result.grad_norm)
    if state.first_loss is None:
        state.first_loss = loss


def _due(step: int, every: int, done: bool) -> bool:
    return done or (every > 0 and step % every == 0)
