"""Timing: the start of a process, each step, and a profiler trace of a few steps."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

from polyad.data.files import named
from polyad.model.config import Config
from polyad.parallel import comm


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
