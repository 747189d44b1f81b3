"""Batches copied ahead, the time of each step, memory in use, and a profiler trace."""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

from polyad.data.files import named
from polyad.model.config import Config
from polyad.parallel import comm
from polyad.train.tasks.task import Batch


class StepTimer:
    """Seconds from the end of one step to the end of the next.

    So a step's time includes writing the previous step's record and checkpoint, and waiting for a
    late batch. Only time inside `paused`, for scoring the model, is not counted.
    """

    def __init__(self) -> None:
        self._since = time.monotonic()

    def step(self) -> float:
        """Ends a step; returns its seconds."""
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        return seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose time is not counted."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._since += time.monotonic() - started


class ProfileConfig(Config):
    """A torch profiler trace of a few steps, written to `profile/` in the run folder."""

    first_step: Annotated[int, Field(ge=1)] = 3
    """First step to trace, counted from the start of the process; earlier steps are warm-up."""
    num_steps: Annotated[int, Field(ge=0)] = 0
    """Number of steps to trace; 0: no trace."""


def profiler(
    config: ProfileConfig, folder: Path, world: comm.World
) -> AbstractContextManager[torch.profiler.profile | None]:
    """A context with the profiler, of which `step` is called after every step; None without one.

    The trace of this process is written when its last step ends, for chrome://tracing.

    Args:
        config: the steps to trace.
        folder: the run's folder.
        world: this process.
    """
    if config.num_steps == 0:
        return nullcontext()
    first, file = config.first_step, folder / "profile" / f"rank-{world.rank:05d}.json"

    def write(profile: torch.profiler.profile) -> None:
        with named(file.parent):
            file.parent.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(file))

    schedule = torch.profiler.schedule(
        wait=max(first - 2, 0), warmup=min(first - 1, 1), active=config.num_steps, repeat=1
    )
    return torch.profiler.profile(schedule=schedule, on_trace_ready=write, profile_memory=True)


def allow_tf32(allowed: bool, device: torch.device) -> None:
    """Sets how a GPU multiplies and convolves in fp32; does nothing on a CPU.

    torch has three settings for this. torch.compile understands this one in every release; with
    `fp32_precision` alone the compiler of 2.10 and 2.13 ends in an error.

    Args:
        allowed: whether to use TF32, with a mantissa of 10 bits, in place of fp32, with 23.
        device: this process's device.
    """
    if device.type == "cuda":  # the same call would change oneDNN's products on a CPU
        torch.set_float32_matmul_precision("high" if allowed else "highest")
        torch.backends.cudnn.allow_tf32 = allowed


class Prefetch(Iterator[Batch]):
    """Yields micro-batches on the device while copying the next one.

    On a GPU the copy runs on its own stream, from pinned memory, while the model computes. On a CPU
    the next micro-batch is only read ahead. Reading ahead does not affect resumption: a run's
    position in the data follows from its step alone.

    Attributes:
        waited: Seconds spent waiting for micro-batches since the last call of `seconds`.

    Args:
        batches: NamedTuples of tensors, in order; in pinned memory for a GPU.
        device: the model's device.
    """

    def __init__(self, batches: Iterator[Batch], device: torch.device) -> None:
        self._moved, self.waited = _moved(batches, device), 0.0

    def __next__(self) -> Batch:
        """The next micro-batch.

        Raises:
            StopIteration: there is none.
        """
        started = time.monotonic()
        try:
            return next(self._moved)
        finally:
            self.waited += time.monotonic() - started

    def seconds(self) -> float:
        """Seconds spent waiting since the last call."""
        seconds, self.waited = self.waited, 0.0
        return seconds


def _moved(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yields micro-batches on a device; the next one is copied before each is yielded."""
    stream: torch.cuda.Stream | None = None
    if device.type == "cuda":
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(batch: Batch | None) -> Batch | None:
        if batch is None:
            return None
        with torch.cuda.stream(stream):
            return type(batch)(*(part.to(device, non_blocking=True) for part in batch))

    ahead = copy(next(batches, None))
    while (batch := ahead) is not None:
        if stream is not None:
            current = torch.cuda.current_stream(device)
            current.wait_stream(stream)
            for part in batch:
                part.record_stream(current)  # no reuse of its memory before the model has read it
        ahead = copy(next(batches, None))
        yield batch


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this process: on the GPU if it uses one, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count the parent process's peak, too
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def memory_of_step(device: torch.device) -> int:
    """Peak memory of this process since the last call, in bytes; does not synchronize with a GPU.

    On a CPU the whole process counts, since its start.
    """
    memory = peak_memory_bytes(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    return memory
