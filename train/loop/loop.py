"""The training loop: trains on batches, writes records, validates and saves."""

import gc
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any

from polyad.parallel.checkpoint.save import Saver
from polyad.parallel.zero import Engine, StepResult
from polyad.train.config.run import RunConfig
from polyad.train.errors import RunError
from polyad.train.guard.failures import Explain, expect_progress
from polyad.train.guard.run_folder import last_checkpoint
from polyad.train.guard.spikes import NO_LIMITS, limits_of, remember, spike_event, spike_line
from polyad.train.guard.stopping import StopAsked, StopSignals
from polyad.train.loop.metrics import Metrics, peak_flops
from polyad.train.loop.optimizer import learning_rate, warm_up
from polyad.train.loop.profiling import Prefetch, StepTimer, memory_of_process, profiler
from polyad.train.loop.statistics import routing_record
from polyad.train.loop.step import IssuedStep, issue_step
from polyad.train.state import TrainState
from polyad.train.tasks.random_input import training_flops
from polyad.train.tasks.task import Task

WARM = 3
"""Steps after which everything has been imported and compiled."""
MEMORY = ("memory_bytes", "memory_reserved_bytes")
"""Keys of a record: memory since the step before, of the process that used most."""


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A step that was issued but whose numbers have not been read yet."""

    step: int
    samples: int
    """Samples of the run so far, including this step."""
    rate: float
    seconds: float
    data_seconds: float
    issued: IssuedStep


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
    micro_batches: InitVar[Iterator[Any]]
    """This process's micro-batches, in order."""
    accumulation_steps: int
    """Number of micro-batches per step and process."""
    state: TrainState
    """Progress so far; updated after every step."""
    saver: Saver
    """Writes checkpoints."""
    files: Mapping[str, bytes]
    """What a checkpoint contains beside configuration, weights and state."""
    fluctuation: Callable[[], dict[str, float]] | None
    """Compares routing with that at the last checkpoint; called before a checkpoint is written.
    None without `log.fluctuation`."""
    memory: Explain
    stop: StopSignals
    metrics: Metrics | None
    """None except on the main process."""

    def __post_init__(self, micro_batches: Iterator[Any]) -> None:
        config, task, world = self.config, self.task, self.engine.world
        self._train, self._evaluation = config.train, config.evaluation
        self._folder, self._config_yaml = Path(config.run.folder), config.to_yaml()
        self._batches = Prefetch(micro_batches, self.engine.device)
        self._world = world
        self._units_per_sample = task.model.units_per_sample()
        self._peak = None
        if task.trains_whole_model:
            self._peak = peak_flops(config.log, config.train.precision, tf32=config.train.tf32)
        self._flops_per_unit = (
            training_flops(task.model, *task.sequences_of_sample()) if self._peak else 0
        )
        self._holds = config.monitor.spike_action == "skip"
        """Whether a step that exceeds its limits must not change the weights."""
        self._limit = 60 * config.parallel.timeout_minutes
        self._saved_at = self.state.step
        self._owes_save = False
        """Whether a checkpoint was due in a skipped step, and no step was applied since."""
        self._bad: str | None = None
        """What was not finite in the last validation; if set, no checkpoint is written."""
        self._timer = StepTimer()
        self._pending: Pending | None = None
        self._signals = 0

    def run(self) -> int:
        """Trains, and waits for the last checkpoint.

        Returns:
            0 at the end of the run. If a signal stopped it earlier, the number from
            `StopSignals.agreed`, after everything was saved.

        Raises:
            RunError: too many steps in a row were not finite, or there were too many spikes.
        """
        try:
            signal = self._steps()
        except BaseException:
            pending = self._pending
            # No collectives here: other ranks may be elsewhere.
            if pending is not None and pending.issued.exchanged.arrived:
                record = self._close(pending)
                if self.metrics is not None:
                    self.metrics.write(record)
            raise
        with self.stop.saving():
            self.saver.finish()
        return signal

    def _steps(self) -> int:
        state = self.state
        self.engine.train()
        if state.unfinished is not None:
            unfinished, state.unfinished = state.unfinished, None
            memory = _memory_record(*memory_of_process(self._world.device))
            self._saved_at = -1  # this step's checkpoint says "not validated yet"
            self._finish(unfinished | memory, saves=False)
            if state.unfinished is None:
                self._save()
        self._timer = StepTimer()  # the first step starts here, not in the constructor
        first = state.step
        with profiler(self.config.log.profile, self._folder, self._world) as tick:
            while state.step < self._train.steps and not self._is_over():
                signal = self._signal()
                if signal or state.unfinished is not None:
                    self._settle()
                    self._save()
                    return signal or self.stop.agreed()
                expect_progress(self._limit)
                issued = self._issue()
                tick()
                self._settle()
                self._pending = issued
                if self._waits_for(issued):
                    self._pending = None
                    self._finish(self._close(issued))
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

    def _signal(self) -> int:
        """The signal that some process got, as in `StopSignals.agreed`. With several processes, as
        exchanged in the last step whose numbers were read."""
        return self.stop.agreed() if self._world.size == 1 else self._signals

    def _waits_for(self, pending: "Pending") -> bool:
        """Whether the next step can be issued only after this one's numbers are read."""
        step = pending.step
        done = step == self._train.steps
        scores = _due(step, self._evaluation.every, done)
        due = scores or _due(step, self.config.checkpoint.every, done)
        return due or self._owes_save or self._holds or not pending.issued.result.applied

    def _record_is_due(self, step: int) -> bool:
        """Whether a step has a console line, and routing statistics in its record."""
        done = step == self._train.steps
        return self.config.log.is_due(step, done=done) or _due(step, self._evaluation.every, done)

    def _issue(self) -> "Pending":
        """Issues one step, whose numbers are read after the next one is issued."""
        state, train, config = self.state, self._train, self.config
        peak = config.optimizer.learning_rate
        rate = learning_rate(config.schedule, peak, state.step, train.steps)
        warm_up(self.engine.optimizer, state.step)
        limits = limits_of(config.monitor, state) if self._holds else NO_LIMITS
        issued = issue_step(
            self.engine,
            self.task.losses,
            self._batches,
            self.accumulation_steps,
            rate,
            losses=config.loss,
            progress=(state.step + 1) / train.steps,
            limits=limits,
            own=lambda: (self.stop.number, *memory_of_process(self._world.device)),
            record_is_due=self._record_is_due(state.step + 1),
        )
        seconds = self._timer.step()
        state.step += 1
        state.samples += train.global_batch_size
        state.seconds += seconds
        return Pending(
            step=state.step,
            samples=state.samples,
            rate=rate,
            seconds=seconds,
            data_seconds=self._batches.seconds(),
            issued=issued,
        )

    def _settle(self) -> None:
        """Reads the pending step's numbers, if any, and writes its record."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._write(self._close(pending))

    def _close(self, pending: "Pending") -> dict[str, Any]:
        """The record of a step."""
        state = self.state
        outcome, numbers = pending.issued.outcome(), pending.issued.exchanged.read()
        signals, held, reserved = numbers.highest
        self._signals = signals
        if signals:
            self.stop.heard()
        loss, result, routing = outcome
        limits = limits_of(self.config.monitor, state)
        spike = limits.exceeded(loss, result.grad_norm)
        self._advance(loss, result, spike=spike)
        units = f"{self.task.unit.name}s"
        units_of_step = self._train.global_batch_size * self._units_per_sample
        units_per_second = units_of_step / pending.seconds
        flops = self._flops_per_unit * units_per_second
        record: dict[str, Any] = {
            "step": pending.step,
            "loss": loss,
            "grad_norm": result.grad_norm,
            "learning_rate": pending.rate,
            f"{units}_per_second": units_per_second,
            "step_seconds": pending.seconds,
            "data_seconds": pending.data_seconds,
            **self.task.counted(pending.samples),
            "mfu": flops / (self._peak * self._world.size) if self._peak else None,
            "skipped": not result.applied,
            "skipped_steps": state.skipped_steps,
        } | _memory_record(held, reserved)
        if self.metrics is None:  # only the main process writes it
            return record
        record |= routing_record(routing, self._world.expert_parallel_size)
        if spike:
            size = self._train.global_batch_size
            documents = self.task.sources(range((pending.step - 1) * size, pending.step * size))
            event = spike_event(self.config.monitor, pending.step, limits, outcome, documents)
            self.metrics.say(spike_line(event))
            record["spike"] = event
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
        done, better = state.step == self._train.steps, False
        due = reason is None and _due(state.step, self._evaluation.every, done)
        if due and self.task.has_validation:
            try:
                with self._timer.aside():
                    scores = self._validate()
                record = record | scores
                score = scores[self.task.validation_score]
                self._bad = not_finite(scores, self.task.validation_score)
                better = state.judge(score, higher_is_better=self.task.higher_is_better)
            except StopAsked:  # the next start of the run validates, with the same weights
                state.unfinished = {k: v for k, v in record.items() if k not in MEMORY}
                return
            finally:
                self.engine.train()
            if self._is_over() and self.metrics is not None:
                self.metrics.say(f"polyad: {state.why_it_is_over(self._evaluation.patience)}")
            if self._bad and (done or self._is_over()):
                reason = f"the run ends with a validation that is not finite ({self._bad})"
            elif self._bad and self.metrics is not None:
                self.metrics.say(
                    f"polyad: warning: step {state.step}: {self._bad}; no checkpoint is written "
                    f"until a validation is finite; earlier ones are kept"
                )
        saves = saves and reason is None and self._saves_now(record["skipped"], done)
        if reason is None and ((better and self.config.checkpoint.keep_best) or self._is_over()):
            saves, self._saved_at = True, -1  # even if already saved before validation
        if saves and self.fluctuation is not None:
            with self._timer.aside():
                record |= self.fluctuation()
            self.engine.train()
        self._write(record)
        if reason is not None:
            self.saver.finish()
            saved = last_checkpoint(self._folder / "checkpoints")
            raise RunError(f"step {state.step}: {reason}; {saved}")
        if saves:
            self._save()

    def _saves_now(self, skipped: bool, done: bool) -> bool:
        """Whether a checkpoint is due; one that is due in a skipped step waits for the next step.

        Steps may be skipped because the weights are damaged, and their checkpoint would replace a
        good one. If they are not damaged, a skipped step has changed nothing.
        """
        if self._bad:
            return False
        due = self._owes_save or _due(self.state.step, self.config.checkpoint.every, done)
        self._owes_save = due and skipped and not done
        return due and not self._owes_save

    def _save(self) -> None:
        """Writes a checkpoint, unless this step was already saved with the same state."""
        if self._bad or (self._saved_at == self.state.step and self.state.unfinished is None):
            return
        if self.metrics is not None:
            self.metrics.flush()  # or a resumed run would lack these records
        expect_progress(self._limit)
        state = self.state
        # Writes or starts to write: `poll` checks the progress, `finish` waits for the end.
        with self.stop.saving(), self.memory(lambda: f"saving step {state.step}"):
            self.saver.save(
                state.step,
                state.to_json() | self.task.counted(state.samples),
                self._config_yaml,
                self.files,
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
        with self.memory(lambda: "in validation"):
            return self.task.validate(
                self.engine,
                batch_size=self._evaluation.batch_size or self._train.micro_batch_size,
                world=self._world,
                report=self._validated,
            )

    def _validated(self, share: float) -> None:
        expect_progress(self._limit)
        self.stop.check()

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

    def _advance(self, loss: float, result: StepResult, *, spike: bool) -> None:
        """Updates the state after a step's numbers were read."""
        state, not_finite = self.state, not result.applied and not spike
        state.skipped_steps += not_finite
        state.skipped_in_a_row = state.skipped_in_a_row + 1 if not_finite else 0
        state.spikes += spike
        state.spikes_in_a_row = state.spikes_in_a_row + 1 if spike and not result.applied else 0
        if result.applied:
            remember(self.config.monitor, state, loss, result.grad_norm)
        if state.first_loss is None:
            state.first_loss = loss


def not_finite(scores: Mapping[str, float], validation_score: str) -> str | None:
    """Returns the first score of a validation that is NaN or infinite; None if all are finite.

    The loss is checked, too, since an accuracy is finite whatever the logits are.

    Args:
        scores: the validation's scores.
        validation_score: the most important key of them.
    """
    for key in (validation_score, "validation_loss"):
        if key in scores and not math.isfinite(scores[key]):
            return f"{key} is {scores[key]}"
    return None


def _memory_record(held: int, reserved: int) -> dict[str, int | None]:
    return dict(zip(MEMORY, (held, reserved or None), strict=True))


def _due(step: int, every: int, done: bool) -> bool:
    return done or (every > 0 and step % every == 0)
