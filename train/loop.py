"""The training loop: batches in, steps done, everything said and saved on the way."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model.output import RoutingStats
from parallel import comm
from parallel.zero import Engine, StepResult
from train.config import RunConfig
from train.device import memory_statistics
from train.errors import RunError
from train.loss import LossConfig, routing_loss, split_samples
from train.metrics import Metrics, peak_flops
from train.routing import RoutingMean, routing_record, update_routers
from train.schedule import learning_rate
from train.state import TrainState

NO_OTHER_LOSS = LossConfig()


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What the loop calls beside training steps."""

    validate: Callable[[], dict[str, float]] | None
    """Gives `validation_loss`, in nats a token, and of a mixture that of each source; all processes
    call it together. None where the data has no validation split."""
    save: Callable[[TrainState], None]
    """Writes a checkpoint, or begins to; all processes call it together."""
    saving: Callable[[], None] = lambda: None
    """Looks how far that is; all processes call it together after every step."""
    saved: Callable[[], None] = lambda: None
    """Waits until it is done; all processes call it together before they end."""
    fluctuation: Callable[[], dict[str, float]] | None = None
    """Compares routing with that of the checkpoint before; all processes call it together, before a
    checkpoint is written. None where `log.fluctuation` does not ask for it."""


def train_loop(
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
    """Trains until `config.train.steps`; `state` is brought up to date after every step.

    Args:
        engine: model and optimizer.
        micro_batches: this process's, [micro_batch_size, T + 1] token ids, in order, on the
            engine's device.
        state: progress so far.
        config: the run's.
        accumulation_steps: micro-batches of this process in a step.
        flops_per_token: of forward and backward, for MFU.
        world: this process.
        hooks: validation and saving.
        metrics: on the main process.

    Raises:
        RunError: too many steps in a row were not finite.
    """
    peak = peak_flops(config.log, config.train.precision, tf32=config.train.tf32)
    tokens_per_step = config.train.global_batch_size * config.model.sequence_length
    engine.train()
    saved_at = state.step
    with _profiler(config, Path(config.run.folder), world) as tick:
        while state.step < config.train.steps:
            started = time.monotonic()
            rate = learning_rate(
                config.schedule, config.optimizer.learning_rate, state.step, config.train.steps
            )
            loss, result, routing = train_step(
                engine,
                micro_batches,
                accumulation_steps,
                rate,
                losses=config.loss,
                progress=(state.step + 1) / config.train.steps,
            )
            seconds = time.monotonic() - started
            _advance(state, config, tokens_per_step, seconds, loss, result)
            tick()
            rate_of_tokens = tokens_per_step / seconds
            flops = flops_per_token * rate_of_tokens
            record: dict[str, Any] = {
                "step": state.step,
                "loss": loss,
                "grad_norm": result.grad_norm,
                "learning_rate": rate,
                "tokens_per_second": rate_of_tokens,
                "step_seconds": seconds,
                "tokens": state.tokens,
                "mfu": flops / (peak * world.size) if peak else None,
                "skipped": not result.applied,
                "skipped_steps": state.skipped_steps,
            } | routing_record(routing)
            too_many = state.skipped_in_a_row >= config.train.max_skipped_steps
            done = state.step == config.train.steps
            due = not too_many and _due(state.step, config.evaluation.every, done)
            if due and hooks.validate is not None:
                record |= hooks.validate()
                engine.train()
            saves = not too_many and _due(state.step, config.checkpoint.every, done)
            if saves and hooks.fluctuation is not None:
                record |= hooks.fluctuation()
                engine.train()
            record |= memory_statistics(world)
            if metrics is not None:
                metrics.write(record)
            hooks.saving()
            if too_many:
                hooks.saved()
                raise RunError(
                    f"step {state.step}: {state.skipped_in_a_row} steps in a row had a loss or "
                    f"gradient that is not finite (train.max_skipped_steps); the last checkpoint "
                    f"is of step {saved_at}"
                )
            if saves:
                hooks.save(state)
                saved_at = state.step
    hooks.saved()


class StepOutcome(NamedTuple):
    """An optimizer step over the global batch; the same on every process."""

    loss: float
    """Mean negative log-likelihood of a token, in nats."""
    result: StepResult
    routing: tuple[RoutingStats, ...]
    """Averaged over the step; empty in a dense model."""


def train_step(
    engine: Engine,
    micro_batches: Iterator[Tensor],
    accumulation_steps: int,
    learning_rate: float,
    *,
    losses: LossConfig = NO_OTHER_LOSS,
    progress: float = 0.0,
) -> StepOutcome:
    """One optimizer step over the global batch.

    Args:
        engine: model and optimizer.
        micro_batches: this process's, in order, on the engine's device.
        accumulation_steps: how many of them make a step.
        learning_rate: of this step.
        losses: what routed layers add.
        progress: share of the run's steps that are done after this one, for routers that change
            over a run.

    Returns:
        What came of it.
    """
    total, routing_mean = torch.zeros((), device=engine.device), RoutingMean()
    result: StepResult | None = None
    for _ in range(accumulation_steps):
        input_ids_BT, target_ids_BT = split_samples(next(micro_batches))
        logits_BTV, routing = engine(input_ids_BT)
        loss = engine.token_losses(logits_BTV, target_ids_BT).mean()
        total += loss.detach() / accumulation_steps
        routing_mean.add(routing)
        added = routing_loss(routing, losses)
        if added is not None:
            loss = loss + added
        engine.backward(loss)
        result = engine.step(learning_rate)
    assert result is not None
    loss_mean, routing = routing_mean.over_ranks(total)
    if result.applied:
        update_routers(engine.module, routing, progress)
    return StepOutcome(loss_mean.item(), result, routing)


def _advance(
    state: TrainState,
    config: RunConfig,
    tokens: int,
    seconds: float,
    loss: float,
    result: StepResult,
) -> None:
    state.step += 1
    state.samples += config.train.global_batch_size
    state.tokens += tokens
    state.seconds += seconds
    state.skipped_steps += not result.applied
    state.skipped_in_a_row = 0 if result.applied else state.skipped_in_a_row + 1
    if state.first_loss is None:
        state.first_loss = loss


def _due(step: int, every: int, done: bool) -> bool:
    return done or (every > 0 and step % every == 0)


def _profiler(
    config: RunConfig, folder: Path, world: comm.World
) -> AbstractContextManager[Callable[[], None]]:
    """A context that gives what to call after every step: a torch profiler's tick, or nothing."""
    wanted = config.log.profile
    if wanted.num_steps == 0:
        return nullcontext(lambda: None)
    return _Trace(wanted.first_step, wanted.num_steps, folder / "profile", world)


class _Trace:
    """Traces steps first .. first + num - 1 of this process, written as a Chrome trace."""

    def __init__(self, first: int, num: int, folder: Path, world: comm.World) -> None:
        self._folder, self._rank = folder, world.rank
        activities = [torch.profiler.ProfilerActivity.CPU]
        if world.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(
                wait=max(first - 2, 0), warmup=min(first - 1, 1), active=num, repeat=1
            ),
            on_trace_ready=self._write,
            profile_memory=True,
        )

    def __enter__(self) -> Callable[[], None]:
        self._profiler.start()
        return self._profiler.step

    def __exit__(self, *error: object) -> None:
        self._profiler.stop()

    def _write(self, profiler: torch.profiler.profile) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self._folder / f"rank-{self._rank:05d}.json"))
        table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25)
        (self._folder / f"rank-{self._rank:05d}.txt").write_text(table, encoding="utf-8")
