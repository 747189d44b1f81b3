"""Runs and times the operations and collectives of a plan on this machine.

All ranks do the same at the same time, as in a step, because they share processors and memory.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from polyad.parallel.dims import Dims
from polyad.parallel.plan.traffic import Amount, Exchange, Exchanges, axes_of
from polyad.parallel.plan.weightless import Watched
from polyad.parallel.plan.work import Computed, Shape, Work

LEAST = 0.01
"""Minimum duration of a measurement, in seconds."""
MOST = 20
"""Maximum number of repeats of an operation."""
CACHE = 64_000_000
"""After reading this many bytes, earlier data is no longer in a cache."""
SETS = 8
"""Maximum number of argument sets with which an operation is run."""
BOUND = 8
"""Upper bound of random indices: any tensor that they index should have as many rows."""


def replayed(
    work: Iterable[tuple[Work, int]], told: Callable[[float], None]
) -> dict[tuple[str, str], float]:
    """Times operations; the ranks of a group call it together.

    Args:
        work: Operations, and how often each is run.
        told: Called with the fraction that is done.

    Returns:
        Total seconds by phase and name.
    """
    spent: dict[tuple[str, str], float] = {}
    listed = sorted(work, key=lambda each: (each[0].phase, each[0].name, str(each[0].args)))
    for number, (each, times) in enumerate(listed):
        key = each.phase, each.name
        spent[key] = spent.get(key, 0.0) + times * _seconds_of(each)
        told((number + 1) / len(listed))
    return spent


def host_seconds() -> float:
    """Measures the overhead of Python and autograd per operation, averaged over those of a block.

    The block is so small that this overhead dominates its time.
    """
    block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.zeros(1, 4, 16)

    def both_passes() -> float:
        begin = time.perf_counter()
        block(x).sum().backward()
        return time.perf_counter() - begin

    counted = Computed(lambda: "")
    with Watched([counted]):
        both_passes()
    of_block = sorted(both_passes() for _ in range(MOST))[MOST // 2]
    work = [(counted.of[key], times) for key, times in counted.times.items()]
    alone = sum(replayed(work, lambda share: None).values())
    return max(0.0, of_block - alone) / counted.times.total()


def _seconds_of(work: Work) -> float:
    """Returns the mean time of calls, excluding the first ones.

    Calls alternate between several arguments, since in a step weights are not in a cache either.
    """
    with torch.no_grad():
        sets = [_made(work) for _ in range(min(SETS, 1 + CACHE // max(1, work.bytes)))]
        for args, kwargs in sets:
            work.function(*args, **kwargs)
        begin = time.perf_counter()
        calls = 0
        while calls < MOST and (calls < 2 or time.perf_counter() - begin < LEAST):
            args, kwargs = sets[calls % len(sets)]
            work.function(*args, **kwargs)
            calls += 1
        return (time.perf_counter() - begin) / calls


def _made(work: Work) -> tuple[Any, Any]:
    """Creates arguments with values: random ones, and indices that are valid for any tensor."""
    whole_numbers = _whole_numbers(work)

    def tensor(value: Any) -> Any:
        if not isinstance(value, Shape):
            return value
        reach = 1 + sum((n - 1) * s for n, s in zip(value.size, value.stride, strict=True))
        elements = reach if all(value.size) else 0
        if value.dtype.is_floating_point:
            flat = torch.rand(elements, dtype=torch.float32)
        else:
            flat = next(whole_numbers)(elements)
        return flat.to(value.dtype).as_strided(value.size, value.stride)

    def is_shape(value: Any) -> bool:
        return isinstance(value, Shape)

    return (
        tree_map(tensor, work.args, is_leaf=is_shape),
        tree_map(tensor, work.kwargs, is_leaf=is_shape),
    )


def _whole_numbers(work: Work) -> Iterator[Callable[[int], torch.Tensor]]:
    """Yields, for each integer tensor of an operation, a function that makes its values."""
    rows = next((x.size[0] for x in _shapes(work.args) if x.dtype.is_floating_point and x.size), 1)
    if "embedding_bag" in work.name:  # indices of rows, and where each bag of them begins
        (chosen,) = next(x.size for x in _shapes(work.args) if not x.dtype.is_floating_point)
        yield lambda number: torch.arange(number) % rows
        yield lambda number: torch.arange(number) * chosen // number
    while "grouped" in work.name:  # where each expert's rows end, evenly distributed
        yield lambda number: torch.arange(1, number + 1) * rows // number
    while "experts" in work.name:
        yield partial(_even, rows)
    while "repeat_interleave" in work.name:
        yield partial(_even, work.kwargs.get("output_size", 0))
    while True:
        yield lambda number: torch.arange(number) % BOUND


def _even(total: int, number: int) -> torch.Tensor:
    return torch.full((number,), total // max(1, number))


def _shapes(values: Any) -> Iterable[Shape]:
    for value in values:
        if isinstance(value, Shape):
            yield value
        elif isinstance(value, list | tuple):
            yield from _shapes(value)


class HereLinks:
    """Times collectives among the ranks of this process group.

    Args:
        dims: Their layout.
    """

    def __init__(self, dims: Dims) -> None:
        self._groups: dict[str, Any] = {}
        rank = dist.get_rank()
        for axis in axes_of(dims, 0):
            every = {axes_of(dims, each)[axis] for each in range(dims.world_size)}
            for members in sorted(every, key=sorted):
                group = dist.new_group(sorted(members))
                if rank in members:
                    self._groups[axis] = group

    def seconds(self, exchange: Exchange, amount: Amount) -> float:
        """Returns the total time of calls of the mean size; all ranks call it together."""
        group = self._groups.get(exchange.axis)
        if group is None or dist.get_world_size(group) == 1 or not amount.calls:
            return 0.0
        size = dist.get_world_size(group)
        dtype = getattr(torch, exchange.precision) if exchange.precision else torch.float32
        numbers = max(1, amount.payload // amount.calls // dtype.itemsize)
        numbers += -numbers % size
        whole, part = torch.zeros(numbers, dtype=dtype), torch.zeros(numbers // size, dtype=dtype)
        call: Callable[[], Any] = {
            "all-reduce": lambda: dist.all_reduce(whole, group=group),
            "reduce": lambda: dist.reduce(whole, dist.get_global_rank(group, 0), group=group),
            "broadcast": lambda: dist.broadcast(whole, dist.get_global_rank(group, 0), group=group),
            "all-gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
            "reduce-scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
            "all-to-all": lambda: dist.all_to_all_single(
                torch.empty_like(whole), whole, group=group
            ),
        }.get(exchange.kind, lambda: dist.barrier(group))
        call()
        dist.barrier(group)
        repeats = min(amount.calls, MOST)
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        dist.barrier(group)
        return (time.perf_counter() - begin) / repeats * amount.calls


def exchanged_here(dims: Dims, exchanges: Exchanges) -> dict[str, float]:
    """Times the collectives of a step; all ranks call it together.

    Args:
        dims: The layout of the available ranks.
        exchanges: The collectives of a step.

    Returns:
        Seconds by axis.
    """
    links = HereLinks(dims)
    spent: dict[str, float] = {}
    for exchange, amount in sorted(exchanges.items()):
        seconds = links.seconds(exchange, amount)
        spent[exchange.axis] = spent.get(exchange.axis, 0.0) + seconds
    return spent
