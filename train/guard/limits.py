"""The outcome of a step, and the limits that it must keep to change the weights."""

import math
from typing import NamedTuple

from polyad.model.output import RoutingStats
from polyad.parallel.zero import StepResult

LARGEST_WEIGHT = 1e9
"""No sound weight is larger. A flip of the highest exponent bit multiplies a weight by 2^128, and
attention or a later norm may hide that from the loss."""


class Limits(NamedTuple):
    """The highest loss and gradient norm of a step: both finite, or both infinite."""

    loss: float
    grad_norm: float

    def exceeded(self, loss: float, grad_norm: float) -> bool:
        """Whether a step is a spike. One that is not finite is no spike: it is skipped anyway.

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
    """False if a weight was larger than `LARGEST_WEIGHT`, on any process. Checked only where the
    step has finite limits."""
