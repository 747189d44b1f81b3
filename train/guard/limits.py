"""What a step is held against before it changes the weights."""

import math
from typing import NamedTuple


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
