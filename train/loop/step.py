"""One optimizer step over the global batch, which may be rejected before the weights change."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from polyad.model.output import RoutingStats, ask_for_statistics
from polyad.parallel import comm
from polyad.parallel.zero import Engine, StepResult
from polyad.train.guard.spikes import NO_LIMITS, Limits, StepOutcome
from polyad.train.loop.losses import (
    InputRecorder,
    LossConfig,
    routing_loss,
    with_counts_of_all,
    with_sample_similarity,
)
from polyad.train.loop.statistics import Exchanged, StepStatistics, update_routers
from polyad.train.tasks.task import Batch, Predictor, real_tokens

NO_OTHER_LOSS = LossConfig()
REFUSE = -1.0
"""A limit of the gradient norm that rejects every step, because a norm is never negative."""


TaskLosses: TypeAlias = Callable[[Predictor, Batch], tuple[Tensor, tuple[RoutingStats, ...]]]


class IssuedStep(NamedTuple):
    """An optimizer step over the global batch, which a GPU may not have finished yet."""

    result: StepResult
    exchanged: Exchanged

    def outcome(self) -> StepOutcome:
        """Waits for the step's numbers, if they are not on the CPU yet."""
        numbers = self.exchanged.read()
        return StepOutcome(numbers.loss, self.result, numbers.routing)


def issue_step(
    engine: Engine,
    task_losses: TaskLosses[Batch],
    micro_batches: Iterator[Batch],
    accumulation_steps: int,
    learning_rate: float,
    *,
    losses: LossConfig = NO_OTHER_LOSS,
    progress: float = 0.0,
    limits: Limits = NO_LIMITS,
    own: Callable[[], Sequence[int]] = tuple,
    record_is_due: bool = True,
) -> IssuedStep:
    """Issues one optimizer step over the global batch; see `train_step`.

    Args:
        engine: model and optimizer.
        task_losses: computes the loss on a micro-batch; see `Task.losses`.
        micro_batches: this process's micro-batches, in order, on the engine's device.
        accumulation_steps: number of micro-batches per step.
        learning_rate: the step's learning rate.
        losses: coefficients of the routed layers' auxiliary losses.
        progress: share of the run's steps done after this one, for routers that change over a run.
        limits: the same on all processes; a step whose loss or norm exceeds them changes nothing.
            Finite limits are checked before the weights change, which waits for the loss.
        own: returns numbers of this process to share with all; see `StepStatistics.exchange`.
        record_is_due: the same on all processes; see `ask_for_statistics`.

    Returns:
        Whether the step was applied, and its numbers, which may not have arrived on the CPU yet.
    """
    statistics, pairs = StepStatistics(engine.device), losses.sample_similarity
    names = losses.asked()
    ask_for_statistics(
        engine.module,
        losses=names,
        samples=pairs is not None,
        record_is_due=record_is_due,
    )
    recorder = InputRecorder(engine, getattr(engine.module, "as_read", None))
    mean_tokens = None
    if names:
        mean_tokens, micro_batches = _mean_tokens(micro_batches, accumulation_steps)
    for number in range(accumulation_steps):
        if number:
            engine.step(learning_rate)  # DeepSpeed updates only after the last micro-batch
        of_targets, routing = task_losses(
            engine if pairs is None else recorder, next(micro_batches)
        )
        loss = of_targets.mean()
        if pairs is not None:
            routing = with_sample_similarity(routing, recorder.inputs, pairs)
        if losses.load_balance and losses.load_balance_counts == "all":
            routing = with_counts_of_all(routing, comm.mean_over_ranks)
        statistics.add(loss, routing)
        auxiliary = routing_loss(routing, losses, mean_tokens)
        if auxiliary is not None:
            loss = loss + auxiliary
        engine.backward(loss)
    exchanged = statistics.exchange(own())
    refused = math.isfinite(limits.loss) and exchanged.read().loss > limits.loss
    result = engine.step(learning_rate, REFUSE if refused else limits.grad_norm)
    assert result is not None
    if result.applied:
        update_routers(engine.module, exchanged.routing, progress)
    return IssuedStep(result, exchanged)


def _mean_tokens(
    micro_batches: Iterator[Batch], accumulation_steps: int
) -> tuple[Tensor | None, Iterator[Batch]]:
    """Returns the mean tokens of a step's micro-batches on all processes, and the micro-batches.

    All processes call this together. Padded micro-batches are read ahead for it. Of others, which
    may be large images, one is read and nothing is exchanged, since all have equally many tokens.
    """
    first = next(micro_batches)
    if real_tokens(first) is None:
        return None, itertools.chain([first], micro_batches)
    rest = itertools.islice(micro_batches, accumulation_steps - 1)
    batches = [first, *rest]
    counts = [tokens for batch in batches if (tokens := real_tokens(batch)) is not None]
    total = comm.sum_over_ranks(torch.stack(counts).sum().float())
    return total / (len(batches) * comm.size()), iter(batches)


def train_step(*arguments: Any, **named: Any) -> StepOutcome:
    """Calls `issue_step` and waits for its numbers."""
    return issue_step(*arguments, **named).outcome()
