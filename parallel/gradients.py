"""Gradient reduction in fp32, and in the same order on all ranks.

**In fp32.** In stage 0 DeepSpeed accumulates the micro-batches of a bf16 model in bf16, and rounds
the sum over ranks to bf16. In stages 1 to 3 it sums in fp32 if its configuration says so; see
`zero.py`.

**In one order.** DeepSpeed puts gradients into a bucket in the order in which autograd computes
them, and reduces bucket by bucket: values at the same place on different ranks must belong to the
same parameter. It assumes that all ranks compute in the same order. They do not if graphs differ:
torch.compile may break a graph on one rank and not on another, and returns the gradients of each
graph all at once. Then gradients of different parameters are summed, without an error.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from polyad.parallel import comm


class Fp32Gradients:
    """Accumulates gradients from autograd, and sets those of the fp32 master weights to their mean.

    Args:
        pairs: bf16 weights and their masters.
        group_of: returns the group of the ranks that hold the same parameter and see other samples.
        bucket_size: number of elements that are reduced over ranks in one call.
        world: this rank.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[Any, Any]],
        group_of: Callable[[Any], Any],
        bucket_size: int,
        world: comm.World,
    ) -> None:
        self._pairs, self._group_of = pairs, group_of
        self._bucket_size, self._replicas = bucket_size, world.data_parallel_size
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        for parameter, _ in pairs:
            parameter.register_post_accumulate_grad_hook(self._add)

    @torch.no_grad()
    def _add(self, parameter: torch.Tensor) -> None:
        """Called by autograd when a parameter's gradient of a micro-batch is complete."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:  # compiled blocks also call hooks of weights without a gradient
            return
        if parameter in self._sums:
            self._sums[parameter] += gradient
        else:
            self._sums[parameter] = gradient.float()

    @torch.no_grad()
    def reduce(self) -> None:
        """Sets the masters' gradients to the mean over all data-parallel ranks, in fp32.

        Every rank calls it once per step. A parameter without a gradient on this rank is reduced
        with zeros, since other ranks may have one. Gradients of experts are summed over the ranks
        that hold the same ones, and divided by the number of all ranks, since each of those has
        processed tokens of many.
        """
        groups: dict[Any, list[nn.Parameter]] = {}
        for parameter, master in self._pairs:
            gradient = self._sums.pop(parameter, None)
            master.grad = torch.zeros_like(master) if gradient is None else gradient
            groups.setdefault(self._group_of(parameter), []).append(master)
        for group, masters in groups.items():
            alone = dist.get_world_size(group) == 1
            for bucket in _buckets([m.grad for m in masters], self._bucket_size):
                if alone:
                    torch._foreach_div_(bucket, self._replicas)
                    continue
                flat = torch.cat([gradient.flatten() for gradient in bucket])
                dist.all_reduce(flat, group=group)
                flat /= self._replicas
                pieces = flat.split([gradient.numel() for gradient in bucket])
                for gradient, piece in zip(bucket, pieces, strict=True):
                    gradient.copy_(piece.view_as(gradient))


def _buckets(gradients: list[Any], size: int) -> list[list[torch.Tensor]]:
    """Splits gradients into groups of at most `size` elements; larger ones are alone."""
    buckets: list[list[torch.Tensor]] = []
    room = 0
    for gradient in gradients:
        if gradient.numel() > room or not buckets:
            buckets.append([])
            room = size
        buckets[-1].append(gradient)
        room -= gradient.numel()
    return buckets


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
