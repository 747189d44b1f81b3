"""The keys under `monitor:`, and the detection and recording of loss and gradient spikes.

A step is compared with the steps before it: with their median m over a window, and their spread s,
1.4826 times the median absolute deviation, which estimates the standard deviation of normal
numbers. Both are robust to outliers. A loss is a spike above m + threshold * s. For gradient norms,
which vary by factors, logarithms are compared. Low values are never spikes.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from polyad.model.config import Config
from polyad.train.state import TrainState

LOSS_FLOOR = 0.01
"""Lower bound of the spread of losses, as a share of their median."""
LOG_NORM_FLOOR = 0.1
"""Lower bound of the spread of log norms."""


class MonitorConfig(Config):
    """What is monitored during training, and how a run reacts to problems."""

    spike_action: Literal["none", "warn", "skip"] = "warn"
    """Reaction to a spike, a loss or gradient norm far above recent ones: `warn` prints a line;
    `skip` skips the update of that step; `none` does nothing."""
    spike_threshold: Annotated[float, Field(gt=0)] = 10.0
    """How far above the median a value counts as a spike, in standard deviations (estimated from
    the median absolute deviation)."""
    spike_window: Annotated[int, Field(ge=8, le=100_000)] = 128
    """Number of recent steps over which the median is taken; checkpoints store two numbers for
    each."""
    spike_warmup: Annotated[int, Field(ge=8)] = 64
    """Number of steps that must be in the window before spikes are detected; at most all of it."""
    max_skips: Annotated[int, Field(ge=1)] = 10
    """Maximum number of spikes in a row that are skipped; one more ends the run."""
    grace_seconds: Annotated[float, Field(gt=0, le=86_400)] = 25.0
    """Seconds that a run may take to save after a termination signal; `polyad launch` makes
    torchrun wait 5 seconds longer before it kills the processes."""


class Limits(NamedTuple):
    """The highest loss and gradient norm of a step: both finite, or both infinite."""

    loss: float
    grad_norm: float

    def exceeded(self, loss: float, grad_norm: float) -> bool:
        """Whether a step is a spike. Steps that are not finite are not; they are skipped anyway."""
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        return finite and (loss > self.loss or grad_norm > self.grad_norm)


NO_LIMITS = Limits(math.inf, math.inf)


def limits_of(config: MonitorConfig, state: TrainState) -> Limits:
    """The limits of the next step."""
    if config.spike_action == "none" or len(state.recent_losses) < config.spike_warmup:
        return NO_LIMITS
    median, spread = _middle(state.recent_losses)
    loss = median + config.spike_threshold * max(spread, LOSS_FLOOR * abs(median))
    median, spread = _middle([math.log(norm) for norm in state.recent_grad_norms])
    log_norm = median + config.spike_threshold * max(spread, LOG_NORM_FLOOR)
    return Limits(loss, math.exp(min(log_norm, 700.0)))


def remember(config: MonitorConfig, state: TrainState, loss: float, grad_norm: float) -> None:
    """Adds an applied step to the window."""
    if config.spike_action == "none":
        return
    # A norm of 0 has no logarithm, so 1e-30 takes its place: after zeros, any gradient is a spike.
    state.recent_losses = [*state.recent_losses, loss][-config.spike_window :]
    norms = [*state.recent_grad_norms, max(grad_norm, 1e-30)]
    state.recent_grad_norms = norms[-config.spike_window :]


def _middle(values: Sequence[float]) -> tuple[float, float]:
    median = statistics.median(values)
    return median, 1.4826 * statistics.median([abs(value - median) for value in values])


def spike_line(event: dict[str, Any]) -> str:
    """Formats a spike as a console line."""
    done = {"warn": "the step was applied", "skip": "the step was skipped"}[event["action"]]
    return (
        f"step {event['step']}: spike: loss {event['loss']:.4f} (limit {event['loss_limit']:.4f}), "
        f"norm {event['grad_norm']:.2f} (limit {event['grad_norm_limit']:.2f}); {done}"
    )
