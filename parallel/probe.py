"""Measures the bandwidth of links between hosts, or between the processes of one."""

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from polyad.parallel import comm

SENT, REPEATS = {"cuda": 64 * 2**20, "cpu": 4 * 2**20}, 3
"""Bytes that a rank sends in a measurement, by device; and the number of repetitions."""


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


def measure(world: comm.World, hosts: Sequence[str]) -> list[Link]:
    """Measures the links between the first ranks of hosts, or of one host between its ranks.

    It takes a few seconds; all ranks call it together.

    Args:
        world: this rank.
        hosts: the host of each rank.
    """
    first = {host: rank for rank, host in reversed([*enumerate(hosts)])}
    members = sorted(first.values()) if len(first) > 1 else list(range(world.size))
    buffers = torch.zeros(2, SENT[world.device.type], dtype=torch.uint8, device=world.device)
    mine = []
    for pairs in rounds(members):
        comm.barrier()
        mine += [_link(world, *pair, buffers) for pair in pairs if world.rank in pair]
    both_ends = [link for links in comm.from_all(mine) for link in links]
    return sorted({link[:2]: link for link in both_ends}.values())


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


def _link(world: comm.World, one: int, other: int, buffers: torch.Tensor) -> Link:
    peer = other if world.rank == one else one
    both = [dist.P2POp(dist.isend, buffers[0], peer), dist.P2POp(dist.irecv, buffers[1], peer)]

    def exchange() -> None:
        for work in dist.batch_isend_irecv(both):
            work.wait()
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)

    exchange()  # connects
    begun = time.perf_counter()
    for _ in range(REPEATS):
        exchange()
    return Link(one, other, REPEATS * buffers[0].numel() / (time.perf_counter() - begun))
