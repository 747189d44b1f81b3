"""Parallel degrees and ranks: plain arithmetic, to check a layout before any process starts."""

import math
from dataclasses import dataclass

MOST_SHOWN = 6
"""Maximum number of degrees or batch sizes that an error lists."""


class LayoutError(ValueError):
    """Degrees or batch sizes that do not fit the number of processes."""

    exit_status = 2


@dataclass(frozen=True, kw_only=True)
class Dims:
    """How `world_size` processes are divided.

    Raises:
        LayoutError: the degrees do not divide the number of processes.
    """

    world_size: int
    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise LayoutError(f"processes: {self.world_size} is not allowed, at least 1")
        for key in ("tensor_parallel_size", "expert_parallel_size"):
            degree = getattr(self, key)
            if degree < 1 or self.world_size % degree:
                raise LayoutError(
                    f"parallel.{key}: {degree} does not divide the {_processes(self.world_size)}; "
                    f"{self._what_to_type(key, degree)}"
                )
        if self.data_parallel_size % self.expert_parallel_size:
            raise LayoutError(
                f"parallel.expert_parallel_size: {self.expert_parallel_size} does not divide the "
                f"{self.data_parallel_size} data-parallel processes that "
                f"parallel.tensor_parallel_size: {self.tensor_parallel_size} leaves of "
                f"{self.world_size}; "
                + self._what_to_type("expert_parallel_size", self.expert_parallel_size)
            )

    def _what_to_type(self, key: str, degree: int) -> str:
        """Suggests another number of processes, or degrees that fit the present one."""
        others = 1 if key == "tensor_parallel_size" else self.tensor_parallel_size
        fitting = [size for size in divisors(max(self.world_size // others, 1)) if size != degree]
        change = f"parallel.{key}={' or '.join(map(str, fitting[:MOST_SHOWN]))}"
        if degree < 1:
            return f"{change} would do"
        at_once = degree * others
        needed = at_once * max(1, round(self.world_size / at_once))
        return (
            f"`polyad launch CONFIG --processes-per-node {needed}` starts {needed} on one machine; "
            f"for the {_processes(self.world_size)} {change} would do"
        )

    @property
    def data_parallel_size(self) -> int:
        """Number of data-parallel ranks, which see different samples."""
        return self.world_size // self.tensor_parallel_size

    def crossing(self, processes_of_node: int) -> str | None:
        """Reports if ranks that communicate in every layer are on different nodes.

        Args:
            processes_of_node: number of processes per node.

        Returns:
            One line; None if there are no such ranks.
        """
        together = self.tensor_parallel_size * self.expert_parallel_size
        if self.world_size <= processes_of_node or processes_of_node % together == 0:
            return None
        return (
            f"parallel.tensor_parallel_size: {self.tensor_parallel_size} x "
            f"parallel.expert_parallel_size: {self.expert_parallel_size} = {together} processes do "
            f"not fit into nodes of {processes_of_node}: what they exchange in every layer crosses "
            f"the network"
        )

    def accumulation_steps(self, global_batch_size: int, micro_batch_size: int) -> int:
        """Number of micro-batches that each rank runs per optimizer step.

        Raises:
            LayoutError: the global batch is not a multiple of the micro-batches of all ranks.
        """
        at_once = micro_batch_size * self.data_parallel_size
        if global_batch_size % at_once:
            ranks = self.data_parallel_size
            below = global_batch_size // at_once * at_once
            wholes = [str(size) for size in (below, below + at_once) if size]
            would_do = f"train.global_batch_size={' or '.join(wholes)}"
            if global_batch_size % ranks == 0:
                sizes = divisors(global_batch_size // ranks)
                near = sorted(sizes, key=lambda size: abs(size - micro_batch_size))[:MOST_SHOWN]
                would_do = (
                    f"train.micro_batch_size={' or '.join(map(str, sorted(near)))} would do, or "
                    f"{would_do}"
                )
            else:
                would_do += " would do"
            raise LayoutError(
                f"train.global_batch_size: {global_batch_size} is not divisible by "
                f"train.micro_batch_size x data-parallel processes = {micro_batch_size} x "
                f"{ranks} = {at_once}; {would_do}"
            )
        return global_batch_size // at_once


def divisors(number: int) -> list[int]:
    """Lists all divisors of a number, in order.

    Args:
        number: at least 1.
    """
    low = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*low, *(number // size for size in low)})


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"
