"""A torch profiler trace of a few steps."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from polyad.data.files import named
from polyad.parallel import comm
from polyad.train.loop.metrics import ProfileConfig


def profiler(
    config: ProfileConfig, folder: Path, world: comm.World
) -> AbstractContextManager[Callable[[], None]]:
    """A context that yields a function to call after every step, which advances the profiler.

    Args:
        config: the steps that are traced.
        folder: the run's.
        world: this process.
    """
    if config.num_steps == 0:
        return nullcontext(lambda: None)
    return _Trace(config.first_step, config.num_steps, folder / "profile", world)


class _Trace:
    """Traces steps first .. first + num - 1 of this process, written as a Chrome trace."""

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
        with named(self._folder):
            self._write_files(profiler)

    def _write_files(self, profiler: torch.profiler.profile) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self._folder / f"rank-{self._rank:05d}.json"))
        table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25)
        (self._folder / f"rank-{self._rank:05d}.txt").write_text(table, encoding="utf-8")
