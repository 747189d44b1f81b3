"""Measures links between and within hosts, compute speed, and clock differences.

Source of the bandwidths: NCCL tests' "bus bandwidth", the bytes per second that cross a link, so
that the bandwidth of a collective does not depend on the number of ranks (2 (n - 1) / n of the
bytes for an all-reduce, (n - 1) / n for an all-to-all).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from polyad.parallel import comm

LARGEST, REPEATS = {"cuda": 64 * 2**20, "cpu": 4 * 2**20}, 5
"""Bytes that a rank sends in a measurement, by device; and the number of repetitions."""
PAIR_REPEATS = 3
MATRIX, PRODUCTS = {"cuda": 4096, "cpu": 512}, 50
"""The side of a product's factors, by device; and the number of timed products."""
CLOCK_ROUNDS = 8


class Link(NamedTuple):
    """A measured link, in bytes per second in each direction."""

    one: int
    """Rank of one end."""
    other: int
    """Rank of the other end."""
    bytes_per_second: float

    def to_json(self) -> list[float]:
        """Returns the three numbers, as `polyad doctor --json` writes a link."""
        return [*self]


@dataclass
class Measured:
    """The results, the same on every rank."""

    all_reduce: float | None = None
    """Bus bandwidth over all ranks, in bytes per second; None with one rank."""
    all_to_all: float | None = None
    within: list[Link] = field(default_factory=list)
    """Pairs of ranks on one host."""
    between: list[Link] = field(default_factory=list)
    """Pairs of hosts, measured between their first ranks."""
    flops: list[float] = field(default_factory=list)
    """FLOP/s of a matrix product on each rank."""
    clocks: list[float] = field(default_factory=list)
    """How far the clock of each rank is ahead of rank 0's, in seconds."""


def measure(world: comm.World, hosts: Sequence[str]) -> Measured:
    """Measures for a few seconds; all ranks call it together.

    Args:
        world: this rank.
        hosts: the host of each rank.
    """
    flops, clocks = comm.from_all(_product_flops(world.device)), _clocks()
    found = Measured(flops=flops, clocks=clocks)
    if world.size == 1:
        return found
    found.all_reduce = _slowest(_all_reduce(world))
    found.all_to_all = _slowest(_all_to_all(world))
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    found.within = _links(world, list(by_host.values()))
    found.between = _links(world, [[ranks[0] for ranks in by_host.values()]])
    return found


def rounds(members: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Pairs each member with each other one once; every member is in at most one pair per round.

    Source: the circle method of round-robin tournaments.

    Args:
        members: distinct numbers.

    Returns:
        n - 1 rounds of pairs for an even number of members n, n for an odd one.
    """
    circle: list[int | None] = [*members, *([None] if len(members) % 2 else [])]
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(a, b) for a, b in pairs if a is not None and b is not None]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def _links(world: comm.World, groups: Sequence[Sequence[int]]) -> list[Link]:
    """Measures all pairs of every group, several at once."""
    plans = [list(rounds(group)) for group in groups if len(group) > 1]
    mine: list[Link] = []
    buffers = torch.zeros(2, LARGEST[world.device.type], dtype=torch.uint8, device=world.device)
    for number in range(max(map(len, plans), default=0)):
        comm.barrier()
        at_once = [pair for plan in plans if number < len(plan) for pair in plan[number]]
        for one, other in at_once:
            if world.rank in (one, other):
                mine.append(_link(world, one, other, buffers))
    found = [link for links in comm.from_all(mine) for link in links]
    slower: dict[tuple[int, int], Link] = {}
    for link in found:  # both ends have measured
        key = link[:2]
        if key not in slower or link.bytes_per_second < slower[key].bytes_per_second:
            slower[key] = link
    return [slower[key] for key in sorted(slower)]


def _link(world: comm.World, one: int, other: int, buffers: torch.Tensor) -> Link:
    peer = other if world.rank == one else one

    def exchange() -> None:
        if world.device.type == "cuda":
            send = dist.P2POp(dist.isend, buffers[0], peer)
            for work in dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, buffers[1], peer)]):
                work.wait()
        elif world.rank == one:
            dist.send(buffers[0], peer)
            dist.recv(buffers[1], peer)
        else:
            dist.recv(buffers[1], peer)
            dist.send(buffers[0], peer)

    directions = 1 if world.device.type == "cuda" else 2  # gloo's directions are sequential
    seconds = _median_seconds(exchange, world.device, PAIR_REPEATS)
    return Link(one, other, directions * buffers[0].numel() / seconds)


def _all_reduce(world: comm.World) -> float:
    values = torch.zeros(LARGEST[world.device.type] // 4, device=world.device)
    seconds = _median_seconds(lambda: dist.all_reduce(values), world.device, REPEATS)
    return 2 * (world.size - 1) / world.size * values.nbytes / seconds


def _all_to_all(world: comm.World) -> float:
    numbers = LARGEST[world.device.type] // 4 // world.size * world.size
    values = torch.zeros(numbers, device=world.device)
    given = torch.empty_like(values)
    seconds = _median_seconds(lambda: dist.all_to_all_single(given, values), world.device, REPEATS)
    return (world.size - 1) / world.size * values.nbytes / seconds


def _product_flops(device: torch.device) -> float:
    return float(2 * MATRIX[device.type] ** 3 / product_seconds(device, PRODUCTS))


def product_seconds(device: torch.device, repeats: int) -> float:
    """Returns the shortest time of a matrix product of a fixed size on this rank's device.

    Args:
        device: the device of this rank; it is synchronized.
        repeats: number of timed products.
    """
    side = MATRIX[device.type]
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = torch.ones(2, side, side, dtype=kind, device=device)
    return min(
        _median_seconds(lambda: a @ b, device, 1, warm_up=number == 0) for number in range(repeats)
    )


def _clocks() -> list[float]:
    """Returns how far each clock is ahead of rank 0's, including the barrier's jitter."""
    rows = []
    for _ in range(CLOCK_ROUNDS):
        comm.barrier()
        times = comm.from_all(time.time())
        rows.append([each - times[0] for each in times])
    return [min(column, key=abs) for column in zip(*rows, strict=True)]


def _slowest(value: float) -> float:
    return min(comm.from_all(value))


def _median_seconds(
    work: Callable[[], Any], device: torch.device, repeats: int, *, warm_up: bool = True
) -> float:
    def finished() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    if warm_up:
        work()
    seconds = []
    for _ in range(repeats):
        begun = finished()
        work()
        seconds.append(finished() - begun)
    return sorted(seconds)[len(seconds) // 2]
