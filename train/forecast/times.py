"""How long a step takes, from what is computed and sent: a roofline for each operation.

An operation takes as long as its products at the rate that the device reaches, or as long as its
bytes take to memory and back, whichever is more (Williams et al. 2009, "Roofline"). Products are
computed in tiles, all multiprocessors at once: a last round that is not full takes as long as a
full one. Collectives take as long as their bytes on the slowest link that they use, and a time for
each call. Kernels run one after the other; the host issues them ahead, unless they are short.
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
"""Rows and columns of a product that a multiprocessor computes at once."""
FUSED = 0.5
"""The share of bytes that move, and of calls, that is left when a compiler joins operations."""
HIDDEN = 0.9
"""The share of the backward pass that gradients can travel in."""


class StepTime(NamedTuple):
    """Seconds of a step."""

    products: float
    attention: float
    memory: float
    """Operations that wait for memory: norms, activations, sums, the optimizer."""
    idle: float
    """The device is idle so long, while the host issues what comes next."""
    exposed: dict[str, float]
    """Collectives that nothing is computed beside, by axis."""
    hidden: float
    """Collectives that something is computed beside."""

    @property
    def total(self) -> float:
        """All but what is hidden."""
        return self.products + self.attention + self.memory + self.idle + sum(self.exposed.values())


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a process of a layout is."""

    dims: Dims
    processes_of_node: int
    zero_stage: int
    overlap: bool = False
    """Whether rows of experts travel beside what others compute."""

    def group(self, axis: str) -> tuple[int, int]:
        """Processes of a group, and those of them on this node."""
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
        work: Operations, and how often each is done.
        exchanges: Collectives.
        device: That computes.
        place: Of the process.
        tf32: Whether fp32 is multiplied as TF32.
        compiled: Whether a compiler joins operations that wait for memory.
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
    """Which collectives are waited for, by axis, and how long others take that are not.

    Gradients travel during the backward pass from ZeRO stage 1 on, and at stage 3 so do weights; of
    experts' rows half do, with overlap.
    """
    exposed: dict[str, float] = {}
    under = 0.0
    hidden = 0.0
    for exchange, amount in exchanges.items():
        seconds = seconds_of(exchange, amount)
        reduces = exchange.kind in {"reduce", "reduce-scatter"}
        gathers = exchange.kind == "all-gather" and place.zero_stage == 3
        if exchange.axis in {"data", "expert data"} and place.zero_stage and (reduces or gathers):
            under += seconds
            continue
        if place.overlap and exchange.kind == "all-to-all":
            hidden += seconds / 2
            seconds /= 2
        exposed[exchange.axis] = exposed.get(exchange.axis, 0.0) + seconds
    seen = max(0.0, under - HIDDEN * backward)
    if seen:
        exposed["data"] = exposed.get("data", 0.0) + seen
    return exposed, hidden + under - seen


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
    """The share of multiprocessors that are busy, the mean over the rounds of a product's tiles."""
    shapes = [each for each in _flat(work.args) if isinstance(each, Shape) and len(each.size) > 1]
    if work.name not in {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}:
        return 1.0
    first, second = shapes[-2:]
    tiles = prod(first.size[:-2]) * ceil(first.size[-2] / TILE[0]) * ceil(second.size[-1] / TILE[1])
    if tiles < processors:  # libraries cut the inner axis then
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
