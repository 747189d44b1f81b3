"""Collectives with gradients: what the processes that share a layer exchange.

A layer of `model/` that can be cut names the places where it may have to exchange something, and
has the identity there (`model/regions.py`). Cutting it puts a function of this file there. Each
says what its gradient is reduced over. Random numbers of activations that are cut are here, too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from polyad.parallel import comm
from polyad.parallel.megatron import (
    data_parallel_group,
    tensor_parallel_group,
    tensor_parallel_library,
)


class Group(NamedTuple):
    """Processes that exchange tensors. All of them call the same methods in the same order."""

    name: str
    """The name by which torch's functional collectives know it."""
    rank: int
    """This process's number among them."""
    size: int

    @classmethod
    def of(cls, group: Any) -> "Group":
        """The group that torch has made."""
        return cls(group.group_name, group.rank(), group.size())

    def gather(self, part: Tensor, axis: int) -> Tensor:
        """Gathers the parts of all processes; backward each gets its part of the summed gradient.

        Args:
            part: This process's, as large as those of the others.
            axis: Along which the parts are put together.
        """
        whole: Tensor = _Gather.apply(part, axis, self, True)
        return whole

    def gather_equal(self, part: Tensor, axis: int) -> Tensor:
        """Gathers the parts; backward each takes its part of a gradient that is equal on all."""
        whole: Tensor = _Gather.apply(part, axis, self, False)
        return whole

    def sum_and_scatter(self, whole: Tensor, axis: int) -> Tensor:
        """Gives each process a part of the sum over all; backward gathers the gradients.

        Args:
            whole: This process's summand.
            axis: Along which the sum is cut; the number of processes divides its size.
        """
        part: Tensor = _Scatter.apply(whole, axis, self, True)
        return part

    def scatter(self, whole: Tensor, axis: int) -> Tensor:
        """Takes this process's part of what is equal on all; backward gathers the gradients."""
        part: Tensor = _Scatter.apply(whole, axis, self, False)
        return part

    def sum_gradient(self, x: Tensor) -> Tensor:
        """The identity; backward the sum of the gradients, in fp32. For small parameters.

        `copy` is the one for activations, which sums in their own precision.
        """
        same: Tensor = _SummedGradient.apply(x, self)
        return same

    def mean(self, x: Tensor) -> Tensor:
        """The mean over processes, each of which has a loss of its own.

        The loss of all is the mean of theirs, so the gradient is the mean of the gradients, too.
        """
        mean: Tensor = _Mean.apply(x, self, True)
        return mean

    def mean_of_parts(self, x: Tensor) -> Tensor:
        """The mean over processes that all have the same loss; backward each gets its part of a
        gradient that is equal on all."""
        mean: Tensor = _Mean.apply(x, self, False)
        return mean

    def exchange(self, rows_MD: Tensor, receive: list[int], send: list[int]) -> Tensor:
        """Sends rows to each process and gets others; backward the gradients go the way back.

        Args:
            rows_MD: First all rows for the first process, then those for the second, and so on.
            receive: How many come from each.
            send: How many go to each.
        """
        arrived_MD: Tensor = _Exchange.apply(rows_MD, receive, send, self)
        return arrived_MD

    # Those below have no gradient.

    def all_parts(self, part: Tensor) -> Tensor:
        """The parts of all processes, one after the other along the first axis."""
        return wait(self.start_gather(part))

    def total(self, x: Tensor) -> Tensor:
        """The sum over the processes."""
        return wait(torch.ops._c10d_functional.all_reduce(x, "sum", self.name))

    def total_in_fp32(self, x: Tensor) -> Tensor:
        """The sum over the processes, added up in fp32 and rounded once."""
        return self.total(x.float()).to(x.dtype)

    def of_first(self, x: Tensor) -> Tensor:
        """What the first of the processes has."""
        return wait(torch.ops._c10d_functional.broadcast(x, 0, self.name))

    # Those that are started here have to be waited for, with `wait`, before they are read.

    def start_gather(self, part: Tensor) -> Tensor:
        """Starts `all_parts`."""
        return torch.ops._c10d_functional.all_gather_into_tensor(
            part.contiguous(), self.size, self.name
        )

    def start_sum(self, whole: Tensor) -> Tensor:
        """Starts a sum, of which each process gets a part along the first axis."""
        return torch.ops._c10d_functional.reduce_scatter_tensor(
            whole.contiguous(), "sum", self.size, self.name
        )

    def start_exchange(self, rows: Tensor, receive: list[int], send: list[int]) -> Tensor:
        """Starts `exchange`."""
        return torch.ops._c10d_functional.all_to_all_single(
            rows.contiguous(), receive, send, self.name
        )


def wait(tensor: Tensor) -> Tensor:
    """Waits for what `Group` has started: a GPU's stream does, or else this thread."""
    return torch.ops._c10d_functional.wait_tensor(tensor)


def tensor_group() -> Group:
    """The processes that share this one's layers."""
    return Group.of(tensor_parallel_group())


def data_group(world: comm.World) -> Group:
    """The processes that have the same part of every layer, and other samples.

    Args:
        world: This process.
    """
    cut = world.tensor_parallel_size > 1
    return Group.of(data_parallel_group() if cut else dist.group.WORLD)


def copy(x: Tensor) -> Tensor:
    """The identity; backward the sum of the gradients over the tensor-parallel processes."""
    same: Tensor = tensor_parallel_library().copy_to_tensor_model_parallel_region(x)
    return same


def sum_parts(x: Tensor) -> Tensor:
    """The sum over the tensor-parallel processes; backward the identity."""
    total: Tensor = tensor_parallel_library().reduce_from_tensor_model_parallel_region(x)
    return total


def highest_in_place(values: Tensor) -> Tensor:
    """The elementwise maximum over the tensor-parallel processes, without gradient."""
    dist.all_reduce(values, dist.ReduceOp.MAX, group=tensor_parallel_group())
    return values


def total_in_place(values: Tensor) -> Tensor:
    """The elementwise sum over the tensor-parallel processes, without gradient."""
    dist.all_reduce(values, group=tensor_parallel_group())
    return values


class Flight:
    """An exchange of rows that other operations come between, forward and backward.

    Between `depart` and `arrive` the rows must not be read. Backward `arrive` starts the exchange
    of the gradients and `depart` waits for it: autograd runs, in between, what ran in between.

    Args:
        receive: Rows from each process.
        send: Rows to each.
        group: The processes.
    """

    def __init__(self, receive: list[int], send: list[int], group: Group) -> None:
        self.receive, self.send, self.group = receive, send, group
        self.gradient: Tensor | None = None
        """On its way."""

    def depart(self, rows_MD: Tensor) -> Tensor:
        """Starts the exchange."""
        away_MD: Tensor = _Departure.apply(rows_MD, self)
        return away_MD

    def arrive(self, away_MD: Tensor) -> Tensor:
        """Waits for it."""
        arrived_MD: Tensor = _Arrival.apply(away_MD, self)
        return arrived_MD


@contextmanager
def own_random_numbers(world: comm.World) -> Iterator[None]:
    """Random numbers of this process's own, for dropout of activations that are cut.

    All tensor-parallel processes draw the same numbers otherwise, since what they drop there is
    replicated. The seed is drawn from those, so recomputation finds the same numbers again.
    """
    seed = int(torch.randint(2**31 - world.tensor_parallel_size, ()))
    devices = [world.device] if world.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed + world.tensor_parallel_rank)
        yield


class OwnDropout(nn.Dropout):
    """Dropout of units that are cut: each process drops others.

    Args:
        probability: The probability that a unit is dropped.
        world: This process.
    """

    def __init__(self, probability: float, world: comm.World) -> None:
        super().__init__(probability)
        self._world = world

    def forward(self, x: Tensor) -> Tensor:
        """Zeros some units, and scales the others up."""
        with own_random_numbers(self._world):
            return super().forward(x)


def _gathered(part: Tensor, axis: int, group: Group) -> Tensor:
    whole = group.all_parts(part)
    return torch.cat(whole.chunk(group.size), axis) if axis else whole


def _own(whole: Tensor, axis: int, group: Group) -> Tensor:
    return whole.chunk(group.size, axis)[group.rank].contiguous()


def _summed_part(whole: Tensor, axis: int, group: Group) -> Tensor:
    return wait(group.start_sum(torch.cat(whole.chunk(group.size, axis)) if axis else whole))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, axis: int, group: Group, in_parts: bool) -> Tensor:
        ctx.axis, ctx.group, ctx.in_parts = axis, group, in_parts
        return _gathered(part, axis, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        cut = _summed_part if ctx.in_parts else _own
        return cut(gradient, ctx.axis, ctx.group), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, axis: int, group: Group, in_parts: bool) -> Tensor:
        ctx.axis, ctx.group = axis, group
        return (_summed_part if in_parts else _own)(whole, axis, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _gathered(gradient, ctx.axis, ctx.group), None, None, None


class _SummedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.total_in_fp32(gradient), None


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, in_parts: bool) -> Tensor:
        ctx.group, ctx.in_parts = group, in_parts
        return group.total(x) / group.size

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.in_parts:  # each has summands of it
            gradient = ctx.group.total(gradient)
        return gradient / ctx.group.size, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_MD: Tensor, receive: list[int], send: list[int], group: Group
    ) -> Tensor:
        ctx.back, ctx.group = (send, receive), group
        return wait(group.start_exchange(rows_MD, receive, send))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_MD: Tensor) -> tuple[Tensor, None, None, None]:
        return wait(ctx.group.start_exchange(gradient_MD, *ctx.back)), None, None, None


class _Departure(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_MD: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        return flight.group.start_exchange(rows_MD, flight.receive, flight.send)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        assert ctx.flight.gradient is not None
        return wait(ctx.flight.gradient), None


class _Arrival(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, away_MD: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        return wait(away_MD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_MD: Tensor) -> tuple[Tensor, None]:
        flight = ctx.flight
        flight.gradient = flight.group.start_exchange(gradient_MD, flight.send, flight.receive)
        # What is on its way has another shape than what autograd hands on here.
        return gradient_MD.new_zeros(()).expand_as(gradient_MD), None
