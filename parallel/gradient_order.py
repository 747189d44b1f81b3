"""Gradients are summed over processes in one order, in whichever they arrive.

DeepSpeed puts gradients into a bucket as autograd gives them, and sums bucket by bucket: the
numbers that stand at the same place on different processes have to be of the same parameter. It
takes for granted that all processes compute in the same order. They do not where graphs differ:
torch.compile may break a graph on one process and not on another, and gives the gradients of each
graph all at once. The sums are then of different parameters, and nothing fails.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn


class InOneOrder:
    """Hands gradients over in the reverse order of a model's parameters, which is nearly theirs.

    One that arrives early is kept until those before it have come; those of which none comes are
    left out at the end of the backward pass.

    Args:
        optimizer: DeepSpeed's, of stages 1 to 3.
        parameters: of the model, the same on every process.
    """

    def __init__(self, optimizer: Any, parameters: Sequence[nn.Parameter]) -> None:
        self._place = {id(parameter): n for n, parameter in enumerate(reversed(parameters))}
        self._reduce = optimizer.reduce_ready_partitions_and_remove_grads
        self._finish = optimizer.overlapping_partition_gradients_reduce_epilogue
        self._arrived: dict[int, tuple[Any, ...]] = {}
        self._next = 0
        optimizer.reduce_ready_partitions_and_remove_grads = self._arrive
        optimizer.overlapping_partition_gradients_reduce_epilogue = self._end

    def begin(self) -> None:
        """Call it before the backward pass of each micro-batch."""
        self._arrived.clear()  # stage 1 does not end those before the last of a step
        self._next = 0

    def _arrive(self, parameter: nn.Parameter, *group: int) -> None:
        """A gradient is there; stages 1 and 2 say the number of the parameter's group, too."""
        self._arrived[self._place[id(parameter)]] = (parameter, *group)
        while self._next in self._arrived:
            self._reduce(*self._arrived.pop(self._next))
            self._next += 1

    def _end(self) -> None:
        """The backward pass of a micro-batch has ended."""
        for place in sorted(self._arrived):
            self._reduce(*self._arrived[place])
        self.begin()
        self._finish()
