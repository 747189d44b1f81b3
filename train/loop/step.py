"""One optimizer step over the global batch, and the last look at it before the weights change."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from model.output import RoutingStats
from parallel import comm
from parallel.zero import Engine, StepResult
from train.guard.limits import NO_LIMITS, Limits
from train.loop.routing import RoutingMean, update_routers
from train.tasks.loss import LossConfig, routing_loss, split_samples

NO_OTHER_LOSS = LossConfig()
REFUSE = -1.0
"""A largest norm that no gradient has."""
LARGEST_WEIGHT = 1e9
"""Only a damaged weight is larger: a flip of its highest exponent bit multiplies it by 2^128, which
attention, or a norm after it, may hide from the loss."""


class StepOutcome(NamedTuple):
    """An optimizer step over the global batch; the same on every process."""

    loss: float
    """Mean negative log-likelihood of a token, in nats."""
    result: StepResult
    routing: tuple[RoutingStats, ...]
    """Averaged over the step; empty in a dense model."""
    sane: bool
    """False if a weight was larger than `LARGEST_WEIGHT`, on any process; looked at where steps are
    held against limits."""


def train_step(
    engine: Engine,
    micro_batches: Iterator[Tensor],
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
        micro_batches: this process's, in order, on the engine's device.
        accumulation_steps: how many of them make a step.
        learning_rate: of this step.
        losses: what routed layers add.
        progress: share of the run's steps that are done after this one, for routers that change
            over a run.
        limits: the same on all processes; with a loss or a norm above them nothing is changed.

    Returns:
        What came of it.
    """
    total, routing_mean = torch.zeros((), device=engine.device), RoutingMean()
    for number in range(accumulation_steps):
        if number:
            engine.step(learning_rate)  # inside the window: counts it
        input_ids_BT, target_ids_BT = split_samples(next(micro_batches))
        logits_BTV, routing = engine(input_ids_BT)
        loss = engine.token_losses(logits_BTV, target_ids_BT).mean()
        total += loss.detach() / accumulation_steps
        routing_mean.add(routing)
        added = routing_loss(routing, losses)
        if added is not None:
            loss = loss + added
        engine.backward(loss)
    loss_mean, routing = routing_mean.over_ranks(total)
    held, sane = math.isfinite(limits.loss), True
    if held:
        sane = not comm.highest(not engine.largest_weight() <= LARGEST_WEIGHT)
    refused = held and (loss_mean.item() > limits.loss or not sane)
    result = engine.step(learning_rate, REFUSE if refused else limits.grad_norm)
    assert result is not None
    if result.applied:
        update_routers(engine.module, routing, progress)
    return StepOutcome(loss_mean.item(), result, routing, sane)
