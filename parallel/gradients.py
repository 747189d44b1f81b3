"""Gradients on their way to the optimizer: in fp32, and in one order on all processes.

**In fp32.** DeepSpeed accumulates the micro-batches of a bf16 model in bf16 at stage 0, and rounds
the sum over processes to bf16. At stages 1 to 3 it sums in fp32 if its configuration says so; see
`zero.py`.

**In one order.** DeepSpeed puts gradients into a bucket as autograd gives them, and sums bucket by
bucket: the numbers that stand at the same place on different processes have to be of the same
parameter. It takes for granted that all processes compute in the same order. They do not where
graphs differ: torch.compile may break a graph on one process and not on another, and gives the
gradients of each graph all at once. The sums are then of different parameters, and nothing fails.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from polyad.parallel import comm


class Fp32Gradients:
    """Collects gradients from autograd, and gives the fp32 master weights their mean.

    Args:
        pairs: weights in bf16, and their masters.
        group_of: gives the group of the processes that hold the same parameter and see other
            samples.
        bucket_size: elements that are summed over processes in one call.
        world: this process.
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
        if gradient is None:  # a compiled block calls hooks of weights that it gives none, too
            return
        if parameter in self._sums:
            self._sums[parameter] += gradient
        else:
            self._sums[parameter] = gradient.float()

    @torch.no_grad()
    def reduce(self) -> None:
        """Sets the masters' gradients: the mean over all data-parallel processes, in fp32.

        Every process calls it, once a step. A parameter without a gradient here takes part with
        zeros, since other processes may have one. Experts are summed over the processes that hold
        the same ones, and divided by the number of all: each of those saw the tokens of many.
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
    """Gradients in groups of at most `size` elements, or of one that is larger."""
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
    """Hands gradients over in the reverse order of a model's parameters, which is nearly theirs.

    One that arrives early is kept until those before it have come; those of which none comes are
    left out at the end of the backward pass.

    Args:
        parameters: of the model, the same on every process.
        reduce: takes a parameter whose gradient is there.
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
        """Call it before the backward pass of each micro-batch."""
        self._arrived.clear()  # stage 1 does not end those before the last of a step
        self._next = 0

    def arrive(self, parameter: nn.Parameter, *group: int) -> None:
        """A gradient is there; stages 1 and 2 say the number of the parameter's group, too.

        Compiled blocks call this of weights that they give no gradient, too: those are left out.
        """
        if parameter.grad is None and getattr(parameter, "grad_accum", None) is None:
            return
        self._arrived[self._place[id(parameter)]] = (parameter, *group)
        while self._next in self._arrived:
            self._reduce(*self._arrived.pop(self._next))
            self._next += 1

    def end(self) -> None:
        """The backward pass of a micro-batch has ended."""
        for place in sorted(self._arrived):
            self._reduce(*self._arrived[place])
        self.begin()
        self._finish()
