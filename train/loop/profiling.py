"""Batches copied ahead, the time of each step, memory in use, and a profiler trace."""

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Generic

import torch
from pydantic import Field

from polyad.data.files import named
from polyad.model.config import Config
from polyad.parallel import comm
from polyad.train.tasks.task import Batch


class StepTimer:
    """Seconds from the end of one step to the end of the next.

    So a step's time includes writing the previous step's record and checkpoint, and waiting for a
    late batch. Only time inside `aside`, for scoring the model, is not counted.
    """

    def __init__(self) -> None:
        self._since = time.monotonic()

    def step(self) -> float:
        """Ends a step; returns its seconds."""
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        return seconds

    @contextmanager
    def aside(self) -> Iterator[None]:
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
) -> AbstractContextManager[Callable[[], None]]:
    """A context that yields a function to call after every step, which advances the profiler.

    Args:
        config: the steps to trace.
        folder: the run's folder.
        world: this process.
    """
    if config.num_steps == 0:
        return nullcontext(lambda: None)
    return _Trace(config.first_step, config.num_steps, folder / "profile", world)


class _Trace:
    """Traces steps first .. first + num - 1 of this process and writes a Chrome trace."""

    def __init__(self, first: int, num: int, folder: Path, world: comm.World) -> None:
        self._folder, self._rank = folder, world.rank
        activities = [torch.profiler.ProfilerActivity.CPU]
        if world.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(
                wait=max(first - 2, 0), warmup=min(first - 1, 1), active=num, repeat=1
            ),
            on_trace_ready=self._write,
            profile_memory=True,
        )

    def __enter__(self) -> Callable[[], None]:
        self._profiler.start()
        return self._profiler.step

    def __exit__(self, *error: object) -> None:
        self._profiler.stop()

    def _write(self, profiler: torch.profiler.profile) -> None:
        name = f"rank-{self._rank:05d}"
        with named(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self._folder / f"{name}.json"))
            table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25)
            (self._folder / f"{name}.txt").write_text(table, encoding="utf-8")


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


class Prefetch(Generic[Batch]):
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
        self._batches, self._device = batches, device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._begun, self.waited = False, 0.0
        self._ahead: Batch | None = None
        self._end: Exception | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next micro-batch.

        Raises:
            StopIteration: there is none. An error in reading a micro-batch is raised when its turn
                comes, after those before it were returned.
        """
        started = time.monotonic()
        try:
            return self._next()
        finally:
            self.waited += time.monotonic() - started

    def seconds(self) -> float:
        """Seconds spent waiting since the last call."""
        seconds, self.waited = self.waited, 0.0
        return seconds

    def _next(self) -> Batch:
        if not self._begun:
            self._begun = True
            self._fetch()
        if self._end is not None:
            raise self._end
        batch = self._ahead
        assert batch is not None
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            for part in batch:
                part.record_stream(current)  # no reuse of its memory before the model has read it
        self._fetch()
        return batch

    def _fetch(self) -> None:
        try:
            batch = next(self._batches)
        except Exception as error:  # StopIteration too
            self._ahead, self._end = None, error
            return
        with torch.cuda.stream(self._stream):
            moved = (part.to(self._device, non_blocking=True) for part in batch)
            self._ahead = type(batch)(*moved)


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


def memory_of_process(device: torch.device) -> tuple[int, int]:
    """Peak memory of this process since the last call, in bytes; does not synchronize with a GPU.

    Returns:
        Bytes held by tensors on the GPU, or on a CPU by the whole process since its start; and
        bytes that the allocator has reserved on the GPU, 0 on a CPU.
    """
    if device.type != "cuda":
        return peak_memory_bytes(device), 0
    held, reserved = peak_memory_bytes(device), torch.cuda.max_memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    return held, reserved
