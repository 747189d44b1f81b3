"""Differentiable collectives between the ranks that share a layer.

A layer of `model/` that can be split names the places where it may have to communicate, with the
identity as the default (`model/layers.py`). Splitting it puts a function of this module there.
Each says what its gradient is reduced over. Random numbers for split activations are here, too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from polyad.parallel import comm


class Group(NamedTuple):
    """Ranks that exchange tensors. All of them call the same methods in the same order."""

    name: str
    """The group's name in torch's functional collectives."""
    rank: int
    """This process's rank in the group."""
    size: int

    @classmethod
    def of(cls, group: Any) -> "Group":
        """Wraps a group created by torch."""
        return cls(group.group_name, group.rank(), group.size())

    def gather(self, part: Tensor, axis: int) -> Tensor:
        """Gathers the parts of all ranks; backward reduce-scatters the gradient.

        Args:
            part: This rank's part, equal in size on all ranks.
            axis: The axis along which the parts are concatenated.
        """
        return _with_gradient(part, self._gathered, self._summed_part, axis)

    def gather_equal(self, part: Tensor, axis: int) -> Tensor:
        """Gathers the parts; backward takes this rank's part of a gradient equal on all ranks."""
        return _with_gradient(part, self._gathered, self._own, axis)

    def sum_and_scatter(self, whole: Tensor, axis: int) -> Tensor:
        """Reduce-scatters a tensor; backward gathers the gradients.

        Args:
            whole: This rank's summand.
            axis: The axis along which the sum is split; its size is a multiple of the number of
                ranks.
        """
        return _with_gradient(whole, self._summed_part, self._gathered, axis)

    def scatter(self, whole: Tensor, axis: int) -> Tensor:
        """Takes this rank's part of a tensor equal on all ranks; backward gathers the gradients."""
        return _with_gradient(whole, self._own, self._gathered, axis)

    def sum_gradient(self, x: Tensor) -> Tensor:
        """The identity; backward all-reduces the gradient, in fp32. For small parameters.

        `copy` is the equivalent for activations, which sums in their own precision.
        """
        return _with_gradient(x, lambda x: x.view_as(x), self.total_in_fp32)

    def mean(self, x: Tensor) -> Tensor:
        """Averages over ranks, each of which has its own loss.

        The total loss is the mean of theirs, so the gradient is the mean of the gradients, too.
        """
        # Each rank has a summand of the gradient.
        return _with_gradient(x, self._mean, self._mean)

    def exchange(self, rows_MD: Tensor, receive: list[int], send: list[int]) -> Tensor:
        """Exchanges rows (all-to-all); backward sends the gradients back.

        Args:
            rows_MD: All rows for the first rank, then those for the second, and so on.
            receive: Number of rows from each rank.
            send: Number of rows to each rank.
        """
        return _with_gradient(
            rows_MD,
            lambda rows: self._exchanged(rows, receive, send),
            lambda gradient: self._exchanged(gradient, send, receive),
        )

    # The methods below have no gradient.

    def all_parts(self, part: Tensor) -> Tensor:
        """Gathers the parts of all ranks along the first axis."""
        return wait(self.start_gather(part))

    def total(self, x: Tensor) -> Tensor:
        """Returns the sum over the ranks."""
        return wait(torch.ops._c10d_functional.all_reduce(x, "sum", self.name))

    def highest(self, x: Tensor) -> Tensor:
        """Returns the elementwise maximum over the ranks."""
        return wait(torch.ops._c10d_functional.all_reduce(x, "max", self.name))

    def total_in_fp32(self, x: Tensor) -> Tensor:
        """Returns the sum over the ranks, accumulated in fp32 and rounded once."""
        return self.total(x.float()).to(x.dtype)

    def of_first(self, x: Tensor) -> Tensor:
        """Broadcasts the value of the group's first rank."""
        return wait(torch.ops._c10d_functional.broadcast(x, 0, self.name))

    def _mean(self, x: Tensor) -> Tensor:
        return self.total(x) / self.size

    def _gathered(self, part: Tensor, axis: int) -> Tensor:
        whole = self.all_parts(part)
        return torch.cat(whole.chunk(self.size), axis) if axis else whole

    def _own(self, whole: Tensor, axis: int) -> Tensor:
        return whole.chunk(self.size, axis)[self.rank].contiguous()

    def _summed_part(self, whole: Tensor, axis: int) -> Tensor:
        return wait(self.start_sum(torch.cat(whole.chunk(self.size, axis)) if axis else whole))

    def _exchanged(self, rows: Tensor, receive: list[int], send: list[int]) -> Tensor:
        started = torch.ops._c10d_functional.all_to_all_single(
            rows.contiguous(), receive, send, self.name
        )
        return wait(started)

    # The results of the methods below must be waited for, with `wait`, before they are read.

    def start_gather(self, part: Tensor) -> Tensor:
        """Starts `all_parts`."""
        return torch.ops._c10d_functional.all_gather_into_tensor(
            part.contiguous(), self.size, self.name
        )

    def start_sum(self, whole: Tensor) -> Tensor:
        """Starts a reduce-scatter along the first axis."""
        return torch.ops._c10d_functional.reduce_scatter_tensor(
            whole.contiguous(), "sum", self.size, self.name
        )


def wait(tensor: Tensor) -> Tensor:
    """Waits for an operation that `Group` has started: on a GPU's stream, or in this thread."""
    return torch.ops._c10d_functional.wait_tensor(tensor)


def tensor_group() -> Group:
    """Returns the group of ranks that share this one's layers."""
    return Group.of(comm.tensor_parallel_group())


def data_group(world: comm.World) -> Group:
    """Returns the group of ranks that have the same part of every layer, and other samples.

    Args:
        world: This rank.
    """
    cut = world.tensor_parallel_size > 1
    return Group.of(comm.data_parallel_group() if cut else dist.group.WORLD)


def copy(x: Tensor) -> Tensor:
    """The identity; backward all-reduces the gradients over the tensor-parallel ranks."""
    return comm.megatron().tensor_parallel.copy_to_tensor_model_parallel_region(x)


def sum_parts(x: Tensor) -> Tensor:
    """All-reduces over the tensor-parallel ranks; backward is the identity."""
    return comm.megatron().tensor_parallel.reduce_from_tensor_model_parallel_region(x)


@contextmanager
def own_random_numbers(world: comm.World) -> Iterator[None]:
    """Uses separate random numbers on this rank, for dropout of split activations.

    Otherwise all tensor-parallel ranks draw the same numbers, since they drop replicated
    activations. The seed is drawn from those numbers, so recomputation draws the same numbers
    again.
    """
    seed = int(torch.randint(2**31 - world.tensor_parallel_size, ()))
    devices = [world.device] if world.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed + world.tensor_parallel_rank)
        yield


class OwnDropout(nn.Dropout):
    """Dropout of split units: each rank draws separately.

    Args:
        probability: The probability that a unit is dropped.
        world: This rank.
    """

    def __init__(self, probability: float, world: comm.World) -> None:
        super().__init__(probability)
        self._world = world

    def forward(self, x: Tensor) -> Tensor:
        """Zeros some units, and scales the others up."""
        with own_random_numbers(self._world):
            return super().forward(x)


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Any, backward: Any, *axis: int) -> Tensor:
        ctx.function, ctx.axis = backward, axis
        return forward(x, *axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.function(gradient, *ctx.axis), None, None, *(None for _ in ctx.axis)


def _with_gradient(
    x: Tensor, forward: Callable[..., Tensor], backward: Callable[..., Tensor], *axis: int
) -> Tensor:
    """Applies a function whose gradient is another function of the gradient of its result; both get
    the axis."""
    return _WithGradient.apply(x, forward, backward, *axis)
