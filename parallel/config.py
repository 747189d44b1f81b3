"""The keys under `parallel:` and `checkpoint:`; and parallel degrees and ranks by plain arithmetic,
to check a layout before any process starts."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, Field

from polyad.data.errors import check_path
from polyad.model.config import Config, divisors


class ParallelConfig(Config):
    """Degrees of parallelism. The data-parallel size follows from the number of processes."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Number of processes over which every layer is sharded (attention heads, inner units and
    vocabulary). Keep a tensor-parallel group within one host."""

    sequence_parallel: bool = False
    """Whether the tokens are divided over the tensor-parallel processes between the sharded layers,
    which saves memory and exchanges the same number of bytes."""

    expert_parallel_size: int = Field(default=1, ge=1)
    """Number of data-parallel processes over which the experts are distributed; must divide the
    data-parallel size and the number of experts. With a larger size each process holds fewer
    experts, and more tokens are exchanged."""

    zero_stage: int = Field(default=1, ge=1, le=3)
    """What ZeRO shards over data-parallel processes: 1 the optimizer state, 2 also the gradients, 3
    also the parameters."""

    bucket_size: int = Field(default=50_000_000, ge=1, le=10**12)
    """Number of elements reduced in one call at ZeRO 2 and 3, and gathered in one call; buffers of
    this size are allocated. At ZeRO 1 gradients are reduced in one call for each group."""

    timeout_minutes: float = Field(default=30.0, ge=0.01, le=7 * 24 * 60)
    """How long a collective waits for a missing process before it fails, in minutes."""


class CheckpointConfig(Config):
    """When checkpoints are saved, which ones are kept, and what a run starts from."""

    every: int = Field(default=0, ge=0)
    """Number of optimizer steps between checkpoints; 0: save only at the end of the run."""

    asynchronous: bool = False
    """Whether training continues while a background thread copies a snapshot and writes it. The
    next optimizer step waits until the copy is complete, and the end of the run until it is
    written. Needs additional host memory of the size of this process's part of a checkpoint."""

    keep_last: int | None = Field(default=None, ge=1)
    """Number of newest checkpoints to keep; older ones are deleted. null: keep all. Checkpoints
    whose manifest or file sizes are wrong do not count."""

    keep_every: int = Field(default=0, ge=0)
    """Checkpoints whose step is a multiple of this number are never deleted, whatever `keep_last`
    says; 0: none."""

    keep_best: bool = False
    """Whether to write a checkpoint after every validation that is better than all before it. The
    best one is kept whatever `keep_last` says; the file `best` beside the checkpoints names it."""

    init_from: Annotated[str | None, AfterValidator(check_path)] = None
    """A checkpoint, a run or a folder of weights (such as a Hugging Face one) from which a new run
    takes its initial weights, but no optimizer state and no position in the data; null: random
    initial weights."""


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
