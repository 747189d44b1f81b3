"""The training loop: batches in, steps done, everything said and saved on the way."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from data.batches import batch_of_step
from parallel import comm
from parallel.zero import Engine, StepResult
from train.config.run import RunConfig
from train.errors import RunError
from train.guard.limits import NO_LIMITS, Limits
from train.guard.spikes import SpikeGuard, remember
from train.guard.stopping import StopAsked, StopSignals
from train.loop.device import memory_statistics
from train.loop.metrics import Metrics, peak_flops
from train.loop.routing import routing_record
from train.loop.schedule import learning_rate
from train.loop.step import StepOutcome, train_step
from train.loop.timing import StepTimer
from train.loop.trace import profiler
from train.state import TrainState
from train.tasks.scoring import perplexity


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What the loop calls beside training steps. All processes call each of them together."""

    validate: Callable[[], dict[str, float]] | None
    """Gives `validation_loss`, in nats a token, and of a mixture that of each source. None where
    the data has no validation split."""
    save: Callable[[TrainState], None]
    """Writes a checkpoint, or begins to."""
    saving: Callable[[], None]
    """Looks how far that is; called after every step."""
    saved: Callable[[], None]
    """Waits until it is done; called before the run ends."""
    go_back: Callable[[TrainState, int], Iterator[Tensor] | None]
    """Takes everything back to the newest checkpoint, the state too, but for a global batch that is
    left out from now on; gives the micro-batches that follow. None, and nothing is changed, where
    there is no checkpoint."""
    documents: Callable[[int], dict[str, list[int]]]
    """Numbers of the documents that a global batch has tokens of, by the name of their data; the
    one hook that the main process calls alone."""
    stop: StopSignals
    """Whether a signal asks the run to stop. `validate` raises `StopAsked` if one comes meanwhile.
    """
    at: Callable[[str], None]
    """Is told what is done from now on, which is progress."""
    fluctuation: Callable[[], dict[str, float]] | None = None
    """Compares routing with that of the checkpoint before, before a checkpoint is written. None
    where `log.fluctuation` does not ask for it."""


class TrainLoop:
    """Trains until `config.train.steps`, or until a signal stops it.

    Args:
        engine: model and optimizer.
        micro_batches: this process's, [micro_batch_size, T + 1] token ids, in order, on the
            engine's device.
        state: progress so far; brought up to date after every step.
        config: the run's.
        accumulation_steps: micro-batches of this process in a step.
        flops_per_token: of forward and backward, for MFU.
        world: this process.
        hooks: validation, saving and the like.
        metrics: on the main process.
    """

    def __init__(
        self,
        engine: Engine,
        micro_batches: Iterator[Tensor],
        state: TrainState,
        config: RunConfig,
        *,
        accumulation_steps: int,
        flops_per_token: int,
        world: comm.World,
        hooks: Hooks,
        metrics: Metrics | None,
    ) -> None:
        self._engine, self._batches, self._state, self._config = (
            engine, micro_batches, state, config
        )  # fmt: skip
        self._accumulation_steps, self._world = accumulation_steps, world
        self._hooks, self._metrics = hooks, metrics
        self._flops_per_token = flops_per_token
        self._peak = peak_flops(config.log, config.train.precision, tf32=config.train.tf32)
        self._folder = Path(config.run.folder)
        self._guard = SpikeGuard(config.monitor, self._folder, hooks.documents, metrics)
        self._saved_at = state.step
        self._timer = StepTimer()

    def run(self) -> int:
        """Trains, and waits for the last checkpoint.

        Returns:
            0 at the end of the run; what `StopSignals.agreed` gave that stopped it before, after
            everything was saved.

        Raises:
            RunError: too many steps in a row were not finite, or there were too many spikes.
        """
        signal = self._train()
        with self._hooks.stop.saving():
            self._hooks.saved()
        return signal

    def _train(self) -> int:
        state, hooks = self._state, self._hooks
        self._engine.train()
        if state.unfinished is not None:
            unfinished, state.unfinished = state.unfinished, None
            self._finish(unfinished, saves=False)
        self._timer = StepTimer()  # the first step begins here
        with profiler(self._config.log.profile, self._folder, self._world) as tick:
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
        """One step; gives its record, or None if it led back to a checkpoint."""
        state, config = self._state, self._config
        rate = learning_rate(
            config.schedule, config.optimizer.learning_rate, state.step, config.train.steps
        )
        batch = batch_of_step(state.step, state.left_out)
        limits = self._guard.limits(state)
        outcome = train_step(
            self._engine,
            self._batches,
            self._accumulation_steps,
            rate,
            losses=config.loss,
            progress=(state.step + 1) / config.train.steps,
            limits=limits if self._guard.holds else NO_LIMITS,
        )
        loss, result, routing, sane = outcome
        seconds = self._timer.step()
        tokens = config.train.global_batch_size * config.model.sequence_length
        spike = limits.exceeded(loss, result.grad_norm) or not sane
        _advance(state, config, tokens, seconds, loss, result, spike=spike)
        if (
            spike
            and config.monitor.spike_action == "rewind"
            and self._went_back(batch, limits, outcome)
        ):
            return None
        rate_of_tokens = tokens / seconds
        flops = self._flops_per_token * rate_of_tokens
        record: dict[str, Any] = {
            "step": state.step,
            "loss": loss,
            "grad_norm": result.grad_norm,
            "learning_rate": rate,
            "tokens_per_second": rate_of_tokens,
            "step_seconds": seconds,
            "tokens": state.tokens,
            "mfu": flops / (self._peak * self._world.size) if self._peak else None,
            "skipped": not result.applied,
            "skipped_steps": state.skipped_steps,
        } | routing_record(routing)
        if spike:
            record |= self._guard.stayed(state.step, batch, limits, outcome)
        return record | self._guard.rewound()

    def _went_back(self, batch: int, limits: Limits, outcome: StepOutcome) -> bool:
        """Back to the newest checkpoint, if there is one."""
        state = self._state
        self._guard.check_rewinds(state)
        step, count = state.step, state.spikes
        following = self._hooks.go_back(state, batch)
        if following is None:
            return False
        self._batches, state.spikes = following, count
        self._guard.went_back(step, batch, limits, outcome, state.step)
        self._saved_at = state.step
        return True

    def _finish(self, record: dict[str, Any], *, saves: bool = True) -> None:
        """What follows a step: validation, its record, and a checkpoint, each if it is due."""
        state, config, hooks = self._state, self._config, self._hooks
        end = _why_to_end(state, config)
        done = state.step == config.train.steps
        due = end is None and _due(state.step, config.evaluation.every, done)
        if due and hooks.validate is not None:
            hooks.at(f"validation after step {state.step}")
            try:
                with self._timer.aside():
                    record = record | _with_perplexities(hooks.validate())
            except StopAsked:  # the next start does it, with the same weights
                state.unfinished = record
                return
            finally:
                self._engine.train()
        saves = saves and end is None and _due(state.step, config.checkpoint.every, done)
        if saves and hooks.fluctuation is not None:
            with self._timer.aside():
                record |= hooks.fluctuation()
            self._engine.train()
        record |= memory_statistics(self._world)
        if self._metrics is not None:
            self._metrics.write(record)
        hooks.saving()
        if end is not None:
            hooks.saved()
            raise RunError(
                f"step {state.step}: {end}; the last checkpoint is of step {self._saved_at}"
            )
        if saves:
            self._save()

    def _save(self) -> None:
        """Writes a checkpoint, unless there is one of this step with the same state."""
        if self._saved_at == self._state.step and self._state.unfinished is None:
            return
        self._hooks.at(f"saving step {self._state.step}")
        with self._hooks.stop.saving():
            self._hooks.save(self._state)
        self._saved_at = self._state.step


def _with_perplexities(losses: dict[str, float]) -> dict[str, float]:
    """`validation_perplexity` beside `validation_loss`, and of a mixture that of each source."""
    return losses | {
        name.replace("validation_loss", "validation_perplexity", 1): perplexity(loss)
        for name, loss in losses.items()
    }


def _why_to_end(state: TrainState, config: RunConfig) -> str | None:
    """What too many steps in a row were left out for."""
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
    config: RunConfig,
    tokens: int,
    seconds: float,
    loss: float,
    result: StepResult,
    *,
    spike: bool,
) -> None:
    state.step += 1
    state.samples += config.train.global_batch_size
    state.tokens += tokens
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
