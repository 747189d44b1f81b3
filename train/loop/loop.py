"""The training loop: trains on batches, writes records, validates and saves."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.batches import batch_of_step
from parallel.zero import Engine, StepResult
from train.errors import RunError
from train.guard.limits import NO_LIMITS, Limits, StepOutcome
from train.guard.monitor import MonitorConfig
from train.guard.spikes import SpikeGuard, remember
from train.guard.stopping import StopAsked
from train.loop.config import TrainConfig
from train.loop.device import memory_statistics
from train.loop.hooks import Hooks
from train.loop.losses import LossConfig
from train.loop.metrics import LogConfig, Metrics, peak_flops
from train.loop.optimizer import OptimizerConfig
from train.loop.routing import routing_record
from train.loop.schedule import ScheduleConfig, learning_rate
from train.loop.step import train_step
from train.loop.timing import StepTimer, TimedBatches
from train.loop.trace import profiler
from train.state import TrainState
from train.tasks.task import Task


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
        self._flops_per_unit = task.model.flops_per_unit()
        self._units_per_sample = task.model.units_per_sample()
        self._peak = peak_flops(config.log, config.train.precision, tf32=config.train.tf32)
        self._guard = SpikeGuard(config.monitor, config.folder, hooks.sources, metrics)
        self._saved_at = state.step
        self._timer = StepTimer()

    def run(self) -> int:
        """Trains, and waits for the last checkpoint.

        Returns:
            0 at the end of the run. If a signal stopped it before, the number that
            `StopSignals.agreed` gave, after everything was saved.

        Raises:
            RunError: too many steps in a row were not finite, or there were too many spikes.
        """
        signal = self._train()
        with self._hooks.stop.saving():
            self._hooks.checkpoints.finish()
        return signal

    def _train(self) -> int:
        state, hooks = self._state, self._hooks
        self._engine.train()
        if state.unfinished is not None:
            unfinished, state.unfinished = state.unfinished, None
            self._finish(unfinished, saves=False)
        self._timer = StepTimer()  # the first step starts here, not in the constructor
        with profiler(self._config.log.profile, self._config.folder, self._world) as tick:
            while state.step < self._config.train.steps:
                signal = hooks.stop.agreed()
                if signal or state.unfinished is not None:
                    self._save()
                    return signal
                hooks.at(f"step {state.step + 1}")
                record = self._step()
                tick()
                if record is not None:
                    self._finish(record)
        if state.unfinished is not None:  # the last validation was not finished
            self._save()
            return hooks.stop.agreed()
        return 0

    def _step(self) -> dict[str, Any] | None:
        """Does one step; returns its record, or None if the run went back to a checkpoint."""
        state, config = self._state, self._config
        rate = learning_rate(
            config.schedule, config.optimizer.learning_rate, state.step, config.train.steps
        )
        batch = batch_of_step(state.step, state.left_out)
        limits = self._guard.limits(state)
        outcome = train_step(
            self._engine,
            self._task.losses,
            self._batches,
            self._accumulation_steps,
            rate,
            losses=config.loss,
            progress=(state.step + 1) / config.train.steps,
            limits=limits if self._guard.holds else NO_LIMITS,
        )
        loss, result, routing, sane = outcome
        seconds = self._timer.step()
        spike = limits.exceeded(loss, result.grad_norm) or not sane
        _advance(state, config, seconds, loss, result, spike=spike)
        if (
            spike
            and config.monitor.spike_action == "rewind"
            and self._went_back(batch, limits, outcome)
        ):
            return None
        units = f"{self._task.unit.name}s"
        units_per_second = config.train.global_batch_size * self._units_per_sample / seconds
        flops = self._flops_per_unit * units_per_second
        record: dict[str, Any] = {
            "step": state.step,
            "loss": loss,
            "grad_norm": result.grad_norm,
            "learning_rate": rate,
            f"{units}_per_second": units_per_second,
            "step_seconds": seconds,
            "data_seconds": self._batches.seconds(),
            **self._task.counted(state.samples),
            "mfu": flops / (self._peak * self._world.size) if self._peak else None,
            "skipped": not result.applied,
            "skipped_steps": state.skipped_steps,
        } | routing_record(routing)
        if spike:
            record |= self._guard.stayed(state.step, batch, limits, outcome)
        return record | self._guard.rewound()

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
        self._saved_at = state.step
        return True

    def _finish(self, record: dict[str, Any], *, saves: bool = True) -> None:
        """Validates if that is due, writes the step's record, and saves if that is due."""
        state, config, hooks = self._state, self._config, self._hooks
        reason = _why_to_end(state, config)
        done = state.step == config.train.steps
        due = reason is None and _due(state.step, config.validate_every, done)
        if due and hooks.validate is not None:
            hooks.at(f"validation after step {state.step}")
            try:
                with self._timer.aside():
                    record = record | hooks.validate()
            except StopAsked:  # the next start of the run validates, with the same weights
                state.unfinished = record
                return
            finally:
                self._engine.train()
        saves = saves and reason is None and _due(state.step, config.save_every, done)
        if saves and hooks.fluctuation is not None:
            with self._timer.aside():
                record |= hooks.fluctuation()
            self._engine.train()
        record |= memory_statistics(self._world)
        if self._metrics is not None:
            self._metrics.write(record)
        hooks.checkpoints.poll()
        if reason is not None:
            hooks.checkpoints.finish()
            raise RunError(
                f"step {state.step}: {reason}; the last checkpoint is of step {self._saved_at}"
            )
        if saves:
            self._save()

    def _save(self) -> None:
        """Writes a checkpoint, unless this step was saved with the same state."""
        if self._saved_at == self._state.step and self._state.unfinished is None:
            return
        self._hooks.at(f"saving step {self._state.step}")
        with self._hooks.stop.saving():
            self._hooks.checkpoints.save(self._state)
        self._saved_at = self._state.step


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
    seconds: float,
    loss: float,
    result: StepResult,
    *,
    spike: bool,
) -> None:
    state.step += 1
    state.samples += config.train.global_batch_size
    state.seconds += seconds
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
