"""What came of a step, and what it is held against before it changes the weights."""

import math
from typing import NamedTuple

from model.output import RoutingStats
from parallel.zero import StepResult

LARGEST_WEIGHT = 1e9
"""Only a damaged weight is larger: a flip of its highest exponent bit multiplies it by 2^128, which
attention, or a norm after it, may hide from the loss."""


class Limits(NamedTuple):
    """What a step is held against: both finite, or both infinite."""

    loss: float
    grad_norm: float

    def exceeded(self, loss: float, grad_norm: float) -> bool:
        """Whether a step is a spike. One that is not finite is something else, and skipped anyway.

        Args:
            loss: of the global batch.
            grad_norm: before clipping.
        """
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        return finite and (loss > self.loss or grad_norm > self.grad_norm)


NO_LIMITS = Limits(math.inf, math.inf)


class StepOutcome(NamedTuple):
    """An optimizer step over the global batch; the same on every process."""

    loss: float
    """Mean over the targets of all samples."""
    result: StepResult
    routing: tuple[RoutingStats, ...]
    """Averaged over the step; empty in a dense model."""
    sane: bool
    """False if a weight was larger than `LARGEST_WEIGHT`, on any process; looked at where steps are
    held against limits."""
