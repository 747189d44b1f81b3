"""Predicted time of a step from its operations and collectives, by a roofline for each operation.

An operation takes the time of its products at the rate that the device reaches, or of its memory
traffic, whichever is longer (Williams et al. 2009, "Roofline"). Products are computed in tiles on
all multiprocessors at once: a partial last round takes as long as a full one. Collectives take the
time of their bytes on the slowest link that they use, and a latency per call. Kernels run one after
the other; the CPU issues them ahead, unless they are short.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import ceil, log2, prod
from typing import Any, NamedTuple

import torch

from polyad.parallel.dims import Dims
from polyad.parallel.plan.devices import Device
from polyad.parallel.plan.traffic import Amount, Exchange, Exchanges, axes_of
from polyad.parallel.plan.work import Shape, Work

TILE = (128, 128)
"""Rows and columns of a product's tile, computed by one multiprocessor at a time."""
FUSED = 0.5
"""The share of memory traffic, and of calls, that remains when a compiler fuses operations."""
HIDDEN = 0.9
"""The share of the backward pass with which gradient communication can overlap."""


class StepTime(NamedTuple):
    """Seconds of a step."""

    products: float
    attention: float
    memory: float
    """Memory-bound operations: norms, activations, sums, the optimizer."""
    idle: float
    """Idle time of the device, while the CPU issues the next operations."""
    exposed: dict[str, float]
    """Collectives that are not overlapped with computation, by axis."""
    hidden: float
    """Collectives overlapped with computation."""

    @property
    def total(self) -> float:
        """The total without overlapped time."""
        return self.products + self.attention + self.memory + self.idle + sum(self.exposed.values())


@dataclass(frozen=True, kw_only=True)
class Place:
    """The placement of a layout's process."""

    dims: Dims
    processes_of_node: int
    zero_stage: int

    def group(self, axis: str) -> tuple[int, int]:
        """The number of processes in a group, and of those on this node."""
        ranks = axes_of(self.dims, 0).get(axis, frozenset())
        return len(ranks), sum(rank < self.processes_of_node for rank in ranks)


def step_time(
    work: Iterable[tuple[Work, int]],
    exchanges: Exchanges,
    device: Device,
    place: Place,
    *,
    tf32: bool = False,
    compiled: bool = False,
) -> StepTime:
    """Predicts a step.

    Args:
        work: Operations, and the number of times each is executed.
        exchanges: Collectives.
        device: The device.
        place: Placement of the process.
        tf32: Whether fp32 products use TF32.
        compiled: Whether a compiler fuses memory-bound operations.
    """
    spent = {"products": 0.0, "attention": 0.0, "memory": 0.0}
    backward, calls = 0.0, 0
    for each, times in work:
        seconds = times * operation_seconds(each, device, tf32=tf32)
        kind = "attention" if "attention" in each.name else "products" if each.flops else "memory"
        spent[kind] += seconds
        calls += times
        if each.phase == "backward":
            backward += seconds
    if compiled:
        spent["memory"] *= FUSED
        calls = round(calls * FUSED)
    computed = sum(spent.values())
    idle = max(0.0, calls * device.host_seconds - computed)
    exposed, hidden = beside(
        exchanges,
        backward,
        lambda each, amount: exchange_seconds(each, amount, device, place),
        place,
    )
    return StepTime(**spent, idle=idle, exposed=exposed, hidden=hidden)


def beside(
    exchanges: Exchanges,
    backward: float,
    seconds_of: Callable[[Exchange, Amount], float],
    place: Place,
) -> tuple[dict[str, float], float]:
    """Splits collectives into exposed ones, by axis, and the time of overlapped ones.

    Gradients overlap with the backward pass from ZeRO stage 1 on, and weights at stage 3.
    """
    exposed: dict[str, float] = {}
    under = 0.0
    for exchange, amount in exchanges.items():
        seconds = seconds_of(exchange, amount)
        reduces = exchange.kind in {"reduce", "reduce-scatter"}
        gathers = exchange.kind == "all-gather" and place.zero_stage == 3
        if exchange.axis in {"data", "expert data"} and place.zero_stage and (reduces or gathers):
            under += seconds
            continue
        exposed[exchange.axis] = exposed.get(exchange.axis, 0.0) + seconds
    seen = max(0.0, under - HIDDEN * backward)
    if seen:
        exposed["data"] = exposed.get("data", 0.0) + seen
    return exposed, under - seen


def operation_seconds(work: Work, device: Device, *, tf32: bool = False) -> float:
    """Seconds of one operation on a GPU."""
    at_memory = work.bytes / (device.bandwidth * device.memory_share)
    if not work.flops:
        return max(at_memory, device.kernel_seconds)
    precision = "fp32" if work.dtype in {torch.float32, torch.float64} else "bf16"
    peak = device.peak(precision, tf32=tf32)
    if "attention" in work.name:
        computed = work.flops / (peak * device.attention_share)
    else:
        computed = work.flops / (peak * device.product_share * _filled(work, device.processors))
    return max(at_memory, computed, device.kernel_seconds)


def _filled(work: Work, processors: int) -> float:
    """The share of busy multiprocessors, averaged over the rounds of a product's tiles."""
    shapes = [each for each in _flat(work.args) if isinstance(each, Shape) and len(each.size) > 1]
    if work.name not in {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}:
        return 1.0
    first, second = shapes[-2:]
    tiles = prod(first.size[:-2]) * ceil(first.size[-2] / TILE[0]) * ceil(second.size[-1] / TILE[1])
    if tiles < processors:  # libraries then split the inner axis
        inner = first.size[-1]
        tiles *= min(max(1, inner // 512), processors // tiles)
    return tiles / (processors * ceil(tiles / processors))


def _flat(values: Any) -> Iterable[Any]:
    for value in values:
        if isinstance(value, list | tuple) and not isinstance(value, Shape):
            yield from _flat(value)
        else:
            yield value


def exchange_seconds(exchange: Exchange, amount: Amount, device: Device, place: Place) -> float:
    """Seconds of all calls of a collective.

    Processes of a group on one node share its network adapters with other groups, one each.
    """
    size, here = place.group(exchange.axis)
    if size < 2:
        return 0.0
    within = device.node_link * device.link_share
    outside = device.network_link * device.link_share * here
    sent = amount.payload if exchange.kind == "reduce" else amount.sent
    latency = device.node_latency if here == size else device.network_latency
    calls = amount.calls * latency * log2(size)
    if exchange.kind == "all-to-all":
        away = sent * (size - here) / (size - 1)
        return calls + max((sent - away) / within, away / (outside / here))
    slowest = within if here == size else min(within, outside) if here > 1 else outside
    return calls + sent / slowest


def seconds_by_axis(found: Mapping[str, float]) -> dict[str, float]:
    """The times above zero, the longest first."""
    return dict(sorted(((k, s) for k, s in found.items() if s), key=lambda each: -each[1]))
