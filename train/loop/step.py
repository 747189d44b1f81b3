"""One optimizer step over the global batch, which may be refused before the weights change."""

import math
from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from model.output import RoutingStats
from parallel import comm
from parallel.zero import Engine
from train.guard.limits import LARGEST_WEIGHT, NO_LIMITS, Limits, StepOutcome
from train.loop.losses import LossConfig, routing_loss
from train.loop.routing import RoutingMean, update_routers
from train.tasks.task import Batch, Predictor

NO_OTHER_LOSS = LossConfig()
REFUSE = -1.0
"""As the largest gradient norm allowed, refuses every step: a norm is never negative."""


TaskLosses: TypeAlias = Callable[[Predictor, Batch], tuple[Tensor, tuple[RoutingStats, ...]]]


def train_step(
    engine: Engine,
    task_losses: TaskLosses[Batch],
    micro_batches: Iterator[Batch],
    accumulation_steps: int,
    learning_rate: float,
    *,
    losses: LossConfig = NO_OTHER_LOSS,
    progress: float = 0.0,
    limits: Limits = NO_LIMITS,
) -> StepOutcome:
    """One optimizer step over the global batch.

    Args:
        engine: model and optimizer.
        task_losses: computes the loss on a micro-batch; see `Task.losses`.
        micro_batches: this process's, in order, on the engine's device.
        accumulation_steps: how many of them make a step.
        learning_rate: of this step.
        losses: coefficients of the routed layers' auxiliary losses.
        progress: share of the run's steps that are done after this one, for routers that change
            over a run.
        limits: the same on all processes; a step with a loss or a norm above them changes nothing.

    Returns:
        The loss, the norm, the routing statistics, and whether the step was applied.
    """
    total, routing_mean = torch.zeros((), device=engine.device), RoutingMean()
    for number in range(accumulation_steps):
        if number:
            engine.step(learning_rate)  # DeepSpeed counts micro-batches; only the last call updates
        of_targets, routing = task_losses(engine, next(micro_batches))
        loss = of_targets.mean()
        total += loss.detach() / accumulation_steps
        routing_mean.add(routing)
        auxiliary = routing_loss(routing, losses)
        if auxiliary is not None:
            loss = loss + auxiliary
        engine.backward(loss)
    loss_mean, routing = routing_mean.over_ranks(total)
    limited, sane = math.isfinite(limits.loss), True
    if limited:
        sane = not comm.highest(not engine.largest_weight() <= LARGEST_WEIGHT)
    refused = limited and (loss_mean.item() > limits.loss or not sane)
    result = engine.step(learning_rate, REFUSE if refused else limits.grad_norm)
    assert result is not None
    if result.applied:
        update_routers(engine.module, routing, progress)
    return StepOutcome(loss_mean.item(), result, routing, sane)
