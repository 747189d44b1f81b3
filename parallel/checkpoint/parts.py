"""Which elements of a model's tensors a process writes into a checkpoint.

A checkpoint's index lists every box of every tensor. If each process wrote a part of each parameter
the list would grow with parameters times processes: a third of a gigabyte for GPT-2 1558M on 1,024
of them. So what several processes could write is laid end to end and cut into one range for each:
processes plus parameters are as many ranges. Where copies of all are there (stage 0, and what
tensor parallelism does not cut), each process takes its range of them. ZeRO 3 cuts every parameter
over all processes; from `REARRANGED_FROM` of them on they exchange what they have for such ranges.
"""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from polyad.parallel.checkpoint.box import MASTER
from polyad.parallel.fragments import Fragment, fragments, partitions
from polyad.parallel.shard import Placement
from polyad.parallel.zero import Engine

REARRANGED_FROM = 32
"""Data-parallel processes of ZeRO 3. Below, the index is small, and nothing is exchanged."""


class Part(NamedTuple):
    """Elements start .. start + numel, row-major, of this process's shard of a parameter."""

    name: str
    placement: Placement
    start: int
    numel: int
    step: float
    values: Mapping[str, Tensor]
    """Flat, by field."""


def parts_of(engine: Engine) -> Iterator[Part]:
    """What this process writes of weights and optimizer state.

    Each element is written by exactly one process. Under ZeRO 3 on many processes these exchange
    values: then all of them have to call this.
    """
    held = list(_held(engine))
    if engine.stage == 3 and engine.world.data_parallel_size >= REARRANGED_FROM:
        held = _rearranged(engine, held)
    for (rank, copies), some in _by_copies(engine, held).items():
        total = sum(part.numel for part in some)
        first, last = total * rank // copies, total * (rank + 1) // copies
        at = 0
        for part in some:
            start, stop = max(first - at, 0), min(last - at, part.numel)
            at += part.numel
            if start < stop:
                yield _cut(part, start, stop)


def _held(engine: Engine) -> Iterator[Part]:
    for name, fragment in fragments(engine).items():
        values = {field: fragment.view(field) for field in (MASTER, *fragment.fields)}
        yield Part(
            name, fragment.placement, fragment.start, fragment.numel, _step(fragment), values
        )


def _step(fragment: Fragment) -> float:
    return float(fragment.state.get("step", 0.0))


def _cut(part: Part, start: int, stop: int) -> Part:
    """The elements start .. stop of those that a part has."""
    values = {field: flat[start:stop] for field, flat in part.values.items()}
    return part._replace(start=part.start + start, numel=stop - start, values=values)


def _by_copies(engine: Engine, held: list[Part]) -> dict[tuple[int, int], list[Part]]:
    """Parts by which copy of them this process holds, and how many copies there are.

    ZeRO leaves one copy of the optimizer's state in each tensor-parallel rank; what tensor
    parallelism does not cut, every such rank has.
    """
    world, found = engine.world, dict[tuple[int, int], list[Part]]()
    for part in held:
        parts = part.placement.expert_parallel_size
        rank, copies = world.data_parallel_rank // parts, world.data_parallel_size // parts
        if engine.stage:
            rank, copies = 0, 1
        if part.placement.replicated:
            rank = rank * world.tensor_parallel_size + world.tensor_parallel_rank
            copies *= world.tensor_parallel_size
        found.setdefault((rank, copies), []).append(part)
    return found


class _Range(NamedTuple):
    """Elements first .. last of all parameters laid end to end, which are of one parameter."""

    parameter: int
    first: int
    last: int


def _rearranged(engine: Engine, held: list[Part]) -> list[Part]:
    """What this process has after an exchange: one range of all parameters laid end to end."""
    cut = partitions(engine)
    rank, ranks = dist.get_rank(cut.group), dist.get_world_size(cut.group)
    begins = [0]
    for numel in cut.numels:
        begins.append(begins[-1] + numel)
    size = math.ceil(begins[-1] / ranks)

    def having(other: int) -> list[_Range]:
        """What a process has before the exchange."""
        found = []
        for number, (numel, part) in enumerate(zip(cut.numels, cut.sizes, strict=True)):
            first, last = min(other * part, numel), min((other + 1) * part, numel)
            if first < last:
                found.append(_Range(number, begins[number] + first, begins[number] + last))
        return found

    def of_range(some: list[_Range], other: int) -> list[_Range]:
        """Those elements that another process will have."""
        low, high = other * size, (other + 1) * size
        return [
            _Range(number, max(first, low), min(last, high))
            for number, first, last in some
            if first < high and last > low
        ]

    mine = having(rank)
    places = {cut.names.index(part.name): part for part in held}
    leaving = [of_range(mine, other) for other in range(ranks)]
    arriving = [of_range(having(other), rank) for other in range(ranks)]
    send, receive = (
        [sum(last - first for _, first, last in some) for some in each]
        for each in (leaving, arriving)
    )
    moved: dict[str, Tensor] = {}
    for field in (MASTER, *engine.state_fields):
        pieces = [
            places[number].values[field][
                first - begins[number] - places[number].start : last
                - begins[number]
                - places[number].start
            ]
            for some in leaving
            for number, first, last in some
        ]
        device = engine.device
        given = torch.cat(pieces) if pieces else torch.empty(0, device=device)
        taken = torch.empty(sum(receive), dtype=given.dtype, device=device)
        dist.all_to_all_single(taken, given, receive, send, group=cut.group)
        ordered, at = torch.empty_like(taken), 0
        for some in arriving:
            for _, first, last in some:
                place = first - rank * size
                ordered[place : place + last - first] = taken[at : at + last - first]
                at += last - first
        moved[field] = ordered
    # Of few numbers a process may have had none, and no count of the steps that they have seen.
    step = torch.tensor(max((part.step for part in held), default=0.0), device=engine.device)
    dist.all_reduce(step, dist.ReduceOp.MAX, group=cut.group)
    result = []
    for number, name in enumerate(cut.names):
        low = max(begins[number], rank * size)
        high = min(begins[number + 1], (rank + 1) * size)
        if low < high:
            here = slice(low - rank * size, high - rank * size)
            values = {field: flat[here] for field, flat in moved.items()}
            start = low - begins[number]
            placement = cut.placements[number]
            result.append(Part(name, placement, start, high - low, step.item(), values))
    return result
