"""Gradient reduction in the same order on all ranks.

DeepSpeed puts gradients into a bucket in the order in which autograd computes
them, and reduces bucket by bucket: values at the same place on different ranks must belong to the
same parameter. It assumes that all ranks compute in the same order. They do not if graphs differ:
torch.compile may break a graph on one rank and not on another, and returns the gradients of each
graph all at once. Then gradients of different parameters are summed, without an error.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn


class InOneOrder:
    """Passes gradients on in reverse parameter order, which is nearly the order of autograd.

    A gradient that arrives early is kept until those before it have arrived; missing ones are
    skipped at the end of the backward pass.

    Args:
        parameters: the model's parameters, the same on every rank.
        reduce: called with a parameter whose gradient is complete.
        finish: called at the end of the backward pass.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        reduce: Callable[..., None],
        finish: Callable[[], None],
    ) -> None:
        self._place = {id(parameter): n for n, parameter in enumerate(reversed(parameters))}
        self._reduce, self._finish = reduce, finish
        self._arrived: dict[int, tuple[Any, ...]] = {}
        self._next = 0

    def begin(self) -> None:
        """Must be called before the backward pass of each micro-batch."""
        self._arrived.clear()  # stage 1 only ends the last pass of a step
        self._next = 0

    def arrive(self, parameter: nn.Parameter, *group: int) -> None:
        """Called when a gradient is complete; stages 1 and 2 also pass the index of its group.

        Compiled blocks also call this for weights without a gradient: those are skipped.
        """
        if parameter.grad is None and getattr(parameter, "grad_accum", None) is None:
            return
        self._arrived[self._place[id(parameter)]] = (parameter, *group)
        while self._next in self._arrived:
            self._reduce(*self._arrived.pop(self._next))
            self._next += 1

    def end(self) -> None:
        """Called when the backward pass of a micro-batch has ended."""
        for place in sorted(self._arrived):
            self._reduce(*self._arrived[place])
        self.begin()
        self._finish()
