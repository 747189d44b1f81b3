"""Parallel degrees and ranks: arithmetic alone, to check a layout before any process starts."""

from dataclasses import dataclass


class LayoutError(ValueError):
    """Degrees or batch sizes that do not fit the processes."""

    exit_status = 2


@dataclass(frozen=True, kw_only=True)
class Dims:
    """How `world_size` processes are used.

    Raises:
        LayoutError: the degrees do not divide the processes.
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
                    f"parallel.{key}: {degree} does not divide the {self.world_size} processes"
                )
        if self.data_parallel_size % self.expert_parallel_size:
            raise LayoutError(
                f"parallel.expert_parallel_size: {self.expert_parallel_size} does not divide the "
                f"{self.data_parallel_size} data-parallel processes that "
                f"parallel.tensor_parallel_size: {self.tensor_parallel_size} leaves of "
                f"{self.world_size}"
            )

    @property
    def data_parallel_size(self) -> int:
        """Processes that see different samples."""
        return self.world_size // self.tensor_parallel_size

    def crossing(self, processes_of_node: int) -> str | None:
        """Says that processes which exchange something in every layer are on different nodes.

        Args:
            processes_of_node: on each.

        Returns:
            A line; None if none are.
        """
        together = self.tensor_parallel_size * self.expert_parallel_size
        if self.world_size <= processes_of_node or processes_of_node % together == 0:
            return None
        return (
            f"parallel.tensor_parallel_size: {self.tensor_parallel_size} x "
            f"parallel.expert_parallel_size: {self.expert_parallel_size} = {together} processes do "
            f"not stay within nodes of {processes_of_node}: what they exchange in every layer "
            f"crosses the network"
        )

    def accumulation_steps(self, global_batch_size: int, micro_batch_size: int) -> int:
        """Micro-batches that each process runs in one optimizer step.

        Raises:
            LayoutError: the global batch is not a multiple of all processes' micro-batches.
        """
        at_once = micro_batch_size * self.data_parallel_size
        if global_batch_size % at_once:
            raise LayoutError(
                f"train.global_batch_size: {global_batch_size} is not divisible by "
                f"train.micro_batch_size x data-parallel processes = {micro_batch_size} x "
                f"{self.data_parallel_size} = {at_once}"
            )
        return global_batch_size // at_once
