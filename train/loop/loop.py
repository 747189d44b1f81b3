"""The training loop: trains on batches, writes records, validates and saves."""

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyad.parallel.checkpoint.save import Saver
from polyad.parallel.zero import Engine
from polyad.train.config.run import RunConfig
from polyad.train.errors import RunError
from polyad.train.guard.run_folder import last_checkpoint
from polyad.train.guard.spikes import NO_LIMITS, limits_of, remember, spike_line
from polyad.train.guard.stopping import (
    StopAsked,
    StopSignals,
    expect_progress,
    explain_out_of_memory,
)
from polyad.train.loop.metrics import Metrics, is_due, peak_flops
from polyad.train.loop.optimizer import learning_rate, warm_up
from polyad.train.loop.profiling import Prefetch, StepTimer, memory_of_step, profiler
from polyad.train.loop.step import IssuedStep, issue_step, routing_record
from polyad.train.state import TrainState
from polyad.train.tasks.random_input import training_flops
from polyad.train.tasks.task import Scoring, Task

WARM = 3
"""Steps after which everything has been imported and compiled."""
MEMORY = "memory_bytes"
"""Key of a record: peak memory since the step before, of the process that used most."""


@dataclass(kw_only=True)
class TrainLoop:
    """Trains until `train.steps`, or until a signal stops it.

    Validates, writes records and saves on the way. Every process of a run has one, and all do the
    same in the same order.
    """

    config: RunConfig
    """The run's configuration, completed with the values that the data determines."""
    engine: Engine
    """Model and optimizer."""
    task: Task[Any]
    batches: Prefetch[Any]
    """This process's micro-batches, in order."""
    state: TrainState
    """Progress so far; updated after every step."""
    saver: Saver
    """Writes checkpoints."""
    fluctuation: Callable[[], dict[str, float]] | None
    """Compares routing with that at the last checkpoint; called before a checkpoint is written.
    None without `log.fluctuation`."""
    stop: StopSignals
    metrics: Metrics | None
    """None except on the main process."""

    def __post_init__(self) -> None:
        config, task, world = self.config, self.task, self.engine.world
        self._train, self._evaluation = config.train, config.evaluation
        self._folder, self._config_yaml = Path(config.run.folder), config.to_yaml()
        self._accumulation_steps = world.accumulation_steps(
            config.train.global_batch_size, config.train.micro_batch_size
        )
        self._world, self._files = world, task.kept().files
        self._units_per_sample = task.model.units_per_sample()
        self._peak = peak_flops(config.log, config.train.precision, tf32=config.train.tf32)
        if self._peak is not None and (sequences := task.sequences_of_sample()):
            self._flops_per_unit = training_flops(task.model, *sequences)
        else:
            self._peak, self._flops_per_unit = None, 0
        self._holds = config.monitor.spike_action == "skip"
        """Whether a step that exceeds its limits must not change the weights."""
        self._limit = 60 * config.parallel.timeout_minutes
        self._saved_at = self.state.step
        self._owes_save = False
        """Whether a checkpoint was due in a skipped step, and no step was applied since."""
        self._timer = StepTimer()
        self._pending: tuple[dict[str, Any], IssuedStep] | None = None
        """A step whose numbers have not been read yet, with what its record has without them."""
        self._signal = 0
        """The signal that some process had in the last step whose numbers were read; 0: none."""

    def run(self) -> int:
        """Trains; the last checkpoint may still be written.

        Returns:
            0 at the end of the run. If a signal stopped it earlier, the number from
            `StopSignals.agreed`.

        Raises:
            RunError: a validation or too many steps in a row were not finite, or there were too
                many spikes.
        """
        state = self.state
        self.engine.train()
        if state.unfinished is not None:
            unfinished, state.unfinished = state.unfinished, None
            self._saved_at = -1  # this step's checkpoint says "not validated yet"
            memory = memory_of_step(self._world.device)
            self._finish(unfinished | {MEMORY: memory}, saves=False)
            if state.unfinished is None:
                self._save()
        self._timer = StepTimer()  # the first step starts here, not in the constructor
        first = state.step
        with profiler(self.config.log.profile, self._folder, self._world) as profile:
            while state.step < self._train.steps and not self._is_over():
                # Several processes exchange it in each step.
                signal = self.stop.agreed() if self._world.size == 1 else self._signal
                if signal or state.unfinished is not None:
                    self._settle()
                    self._save()
                    return signal or self.stop.agreed()
                expect_progress(self._limit)
                record, issued = self._issue()
                if profile is not None:
                    profile.step()
                self._settle()
                due = self._is_due(self._evaluation.every)
                due = due or self._is_due(self.config.checkpoint.every) or self._owes_save
                if due or self._holds or not issued.result.applied:
                    # The next step can be issued only after this one's numbers are read.
                    self._finish(self._close(record, issued))
                else:
                    self._pending = record, issued
                if state.step == first + WARM and self._world.device.type == "cuda":
                    # What imports and compilers made stays: Python's garbage collector would look
                    # through it again and again, while the GPU waits.
                    gc.collect()
                    gc.freeze()
        if state.unfinished is not None:  # the last validation was not finished
            self._save()
            return self.stop.agreed()
        return 0

    def _is_over(self) -> bool:
        return self.state.is_over(self._evaluation.patience)

    def _is_due(self, every: int) -> bool:
        return is_due(self.state.step, every, self._train.steps)

    def _issue(self) -> tuple[dict[str, Any], IssuedStep]:
        """Issues one step, whose numbers are read after the next one is issued."""
        state, train, config = self.state, self._train, self.config
        peak = config.optimizer.learning_rate
        rate = learning_rate(config.schedule, peak, state.step, train.steps)
        warm_up(self.engine.optimizer, state.step)
        limits = limits_of(config.monitor, state) if self._holds else NO_LIMITS
        step = state.step + 1
        has_statistics = is_due(step, config.log.every, train.steps)
        has_statistics = has_statistics or is_due(step, self._evaluation.every, train.steps)
        issued = issue_step(
            self.engine,
            self.task.losses,
            self.batches,
            self._accumulation_steps,
            rate,
            losses=config.loss,
            progress=step / train.steps,
            limits=limits,
            own=lambda: (self.stop.number, memory_of_step(self._world.device)),
            record_is_due=has_statistics,
        )
        seconds = self._timer.step()
        state.step = step
        state.samples += train.global_batch_size
        units_per_second = train.global_batch_size * self._units_per_sample / seconds
        flops = self._flops_per_unit * units_per_second
        record = {
            "step": step,
            "learning_rate": rate,
            f"{self.task.unit.name}s_per_second": units_per_second,
            "step_seconds": seconds,
            "data_seconds": self.batches.seconds(),
            **self.task.counted(state.samples),
            "mfu": flops / (self._peak * self._world.size) if self._peak else None,
        }
        return record, issued

    def _settle(self) -> None:
        """Reads the pending step's numbers, if any, and writes its record."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._write(self._close(*pending))

    def _close(self, record: dict[str, Any], issued: IssuedStep) -> dict[str, Any]:
        """Updates the state with a step's numbers, and returns its whole record."""
        state, step = self.state, record["step"]
        applied, norm = issued.result
        numbers = issued.statistics.numbers
        loss = numbers.loss
        self._signal, memory = numbers.highest
        if self._signal:
            self.stop.only_saves = True
        limits = limits_of(self.config.monitor, state)
        spike = limits.exceeded(loss, norm)
        not_finite = not applied and not spike
        state.skipped_steps += not_finite
        state.skipped_in_a_row = state.skipped_in_a_row + 1 if not_finite else 0
        state.spikes_in_a_row = state.spikes_in_a_row + 1 if spike and not applied else 0
        if applied:
            remember(self.config.monitor, state, loss, norm)
        record |= {
            "loss": loss,
            "grad_norm": norm,
            "skipped": not applied,
            "skipped_steps": state.skipped_steps,
            MEMORY: memory,
        }
        if self.metrics is None:  # only the main process writes it
            return record
        record |= routing_record(numbers.routing, self._world.expert_parallel_size)
        if spike:
            size = self._train.global_batch_size
            record["spike"] = {
                "step": step, "batch": step - 1, "action": self.config.monitor.spike_action,
                "loss": loss, "loss_limit": limits.loss,
                "grad_norm": norm, "grad_norm_limit": limits.grad_norm,
                "documents": self.task.sources(range((step - 1) * size, step * size)),
            }  # fmt: skip
            self.metrics.say(spike_line(record["spike"]))
        return record

    def _write(self, record: dict[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.write(record)
        self.saver.poll()

    def _finish(self, record: dict[str, Any], *, saves: bool = True) -> None:
        """Validates if that is due, writes the step's record, and saves if that is due.

        Args:
            record: the step's record.
            saves: whether to save if that is due.
        """
        state = self.state
        reason = self._why_to_end()
        better = False
        due = reason is None and self._is_due(self._evaluation.every)
        if due and self.task.has_validation:
            try:
                scores = self._validate()
            except StopAsked:  # the next start of the run validates, with the same weights
                state.unfinished = {k: v for k, v in record.items() if k != MEMORY}
                return
            record |= scores
            name = self.task.validation_score
            # The loss is checked, too, since an accuracy is finite whatever the logits are.
            for key in ("validation_loss", name):
                if not math.isfinite(scores.get(key, 0.0)):
                    reason = f"{key} is {scores[key]}, which is not finite"
            better = state.judge(scores[name], higher_is_better=self.task.higher_is_better)
            if self._is_over() and self.metrics is not None:
                self.metrics.say(f"polyad: {state.why_it_is_over(self._evaluation.patience)}")
        saves = saves and reason is None and self._saves_now(record["skipped"])
        if reason is None and ((better and self.config.checkpoint.keep_best) or self._is_over()):
            saves, self._saved_at = True, -1  # even if already saved before validation
        if saves and self.fluctuation is not None:
            with self._timer.paused():
                record |= self.fluctuation()
            self.engine.train()
        self._write(record)
        if reason is not None:
            self.saver.finish()
            saved = last_checkpoint(self._folder / "checkpoints")
            raise RunError(f"step {state.step}: {reason}; {saved}")
        if saves:
            self._save()

    def _saves_now(self, skipped: bool) -> bool:
        """Whether a checkpoint is due; one that is due in a skipped step waits for the next step.

        Steps may be skipped because the weights are damaged, and their checkpoint would replace a
        good one. If they are not damaged, a skipped step has changed nothing.
        """
        due = self._owes_save or self._is_due(self.config.checkpoint.every)
        self._owes_save = due and skipped and self.state.step < self._train.steps
        return due and not self._owes_save

    def _save(self) -> None:
        """Writes a checkpoint, unless this step was already saved with the same state."""
        state = self.state
        if self._saved_at == state.step and state.unfinished is None:
            return
        expect_progress(self._limit)
        # Writes or starts to write: `poll` checks the progress, `finish` waits for the end.
        with (
            self.stop.saving(),
            explain_out_of_memory(lambda: f"saving step {state.step}", self._world),
        ):
            self.saver.save(
                state.step,
                state.to_json() | self.task.counted(state.samples),
                self._config_yaml,
                self._files,
                (state.best_step or None) if self.config.checkpoint.keep_best else None,
                judged=state.unfinished is None,
            )
        self._saved_at = state.step

    def _validate(self) -> dict[str, float]:
        """Scores held-out data; returns keys for the step's record.

        Raises:
            StopAsked: a signal came.
        """
        self.engine.train(False)
        try:
            with (
                explain_out_of_memory(lambda: "in validation", self._world),
                self._timer.paused(),
            ):
                size = self._evaluation.batch_size or self._train.micro_batch_size
                return self.task.validate(
                    Scoring(self.engine, size, self._world, self._expect_progress)
                )
        finally:
            self.engine.train()

    def _expect_progress(self, share: float) -> None:
        expect_progress(self._limit)
        if self.stop.agreed():
            raise StopAsked

    def _why_to_end(self) -> str | None:
        """The reason to end the run if too many consecutive steps were skipped; else None."""
        state, allowed = self.state, self.config.monitor.max_skips
        if state.skipped_in_a_row >= self._train.max_skipped_steps:
            return (
                f"{state.skipped_in_a_row} steps in a row had a loss or gradient that is not "
                f"finite (train.max_skipped_steps)"
            )
        if state.spikes_in_a_row > allowed:
            return (
                f"{state.spikes_in_a_row} steps in a row had a loss or gradient far above the ones "
                f"before and were skipped (monitor.max_skips: {allowed})"
            )
        return None
