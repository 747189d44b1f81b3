"""Parallel degrees and ranks: plain arithmetic, to check a layout before any process starts."""

from dataclasses import dataclass

from polyad.model.config import divisors


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
        self._check_divides("tensor_parallel_size", self.world_size, "processes")
        self._check_divides(
            "expert_parallel_size",
            self.world_size // self.tensor_parallel_size,
            f"data-parallel processes (processes / parallel.tensor_parallel_size = "
            f"{self.world_size} / {self.tensor_parallel_size})",
        )

    def _check_divides(self, key: str, number: int, unit: str) -> None:
        degree = getattr(self, key)
        if degree < 1 or number % degree:
            allowed = ", ".join(map(str, divisors(number)))
            raise LayoutError(
                f"parallel.{key}: {degree} does not divide the {number} {unit}; allowed: "
                f"{allowed}; `polyad launch CONFIG --processes-per-node N` starts N processes"
            )

    @property
    def data_parallel_size(self) -> int:
        """Number of data-parallel ranks, which see different samples."""
        return self.world_size // self.tensor_parallel_size

    def accumulation_steps(self, global_batch_size: int, micro_batch_size: int) -> int:
        """Number of micro-batches that each rank runs per optimizer step.

        Raises:
            LayoutError: the global batch is not a multiple of the micro-batches of all ranks.
        """
        at_once = micro_batch_size * self.data_parallel_size
        if global_batch_size % at_once:
            raise LayoutError(
                f"train.global_batch_size: {global_batch_size} is not divisible by "
                f"train.micro_batch_size x data-parallel processes = {micro_batch_size} x "
                f"{self.data_parallel_size} = {at_once}; allowed: multiples of it"
            )
        return global_batch_size // at_once
