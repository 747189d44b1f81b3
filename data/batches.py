"""Which global batch an optimizer step takes, where some are left out.

Global batch b is samples b * B to (b + 1) * B - 1. Step s takes the s-th of those that are not left
out: batch s itself as long as none is.
"""

import itertools
from collections.abc import Collection, Iterator


def batch_of_step(step: int, left_out: Collection[int] = ()) -> int:
    """The number of the global batch that a step takes.

    Args:
        step: Its number, from 0.
        left_out: Global batches that no step takes.

    Returns:
        The number of the batch, from 0.
    """
    batch = step
    for other in sorted(set(left_out)):
        if other > batch:
            break
        batch += 1
    return batch


def batches_from(step: int, left_out: Collection[int] = ()) -> Iterator[int]:
    """Lists global batches in the order of steps, without end.

    Args:
        step: The first step, from 0.
        left_out: Global batches that no step takes.

    Returns:
        Their numbers.
    """
    absent = frozenset(left_out)
    return (b for b in itertools.count(batch_of_step(step, absent)) if b not in absent)
