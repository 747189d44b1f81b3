"""How a run is spread over processes."""

from typing import Annotated

from pydantic import AfterValidator, Field

from polyad.data.errors import check_path
from polyad.model.config import Config


class ParallelConfig(Config):
    """Degrees of parallelism. The data-parallel degree follows from the number of processes."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Processes that share every layer: heads, inner units and vocabulary are cut. Keep it within a
    host."""

    sequence_parallel: bool = False
    """Whether a tensor-parallel process has some of the tokens between the cut layers, in place of
    all: less memory, and as many bytes exchanged."""

    expert_parallel_size: int = Field(default=1, ge=1)
    """Data-parallel processes that the experts are spread over; it divides them, and the experts.
    The more there are, the fewer experts each holds, and the more tokens travel."""

    expert_overlap: bool = False
    """Whether half of the experts of a process compute while rows of the others travel, forward and
    backward; the numbers stay the same."""

    zero_stage: int = Field(default=1, ge=0, le=3)
    """What ZeRO shards over data-parallel processes: 1 optimizer state, 2 gradients too, 3
    parameters too. 0 shards nothing."""

    bucket_size: int = Field(default=50_000_000, ge=1, le=10**12)
    """Gradient elements reduced in one call; one buffer of this size is held."""

    timeout_minutes: float = Field(default=30.0, ge=0.01, le=7 * 24 * 60)
    """How long a collective waits for a process that does not come."""


class CheckpointConfig(Config):
    """When a run is saved, and what it starts from."""

    every: int = Field(default=0, ge=0)
    """Optimizer steps between checkpoints; 0 saves at the end of the run only."""

    asynchronous: bool = False
    """Whether training goes on while a thread copies a snapshot (the next optimizer step waits for
    what is left of that) and writes it. It takes as much more memory on the host as this process's
    part of a checkpoint. The end of a run waits for it."""

    keep_last: int | None = Field(default=None, ge=1)
    """So many of the newest checkpoints stay, older ones are deleted; None keeps all. One whose
    manifest or sizes are wrong does not count."""

    keep_every: int = Field(default=0, ge=0)
    """Checkpoints whose step is a multiple stay for ever, whatever `keep_last` says; 0: none."""

    keep_best: bool = False
    """Whether a checkpoint is written after each validation that is better than all before, and the
    best one stays whatever `keep_last` says; the file `best` beside it names it."""

    init_from: Annotated[str | None, AfterValidator(check_path)] = None
    """A checkpoint, a run or a Hugging Face folder of GPT-2 whose weights start a new run: no
    moments, no data position."""
