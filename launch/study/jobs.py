"""Concurrent jobs of a study, each a few `polyad` commands in child processes.

A single thread starts commands, waits for the first one to end, and resumes the job to which it
belongs.
"""

import os
import time
from collections.abc import Generator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, NoReturn, TypeVar

import torch

from polyad.launch.machine import threads_of_each
from polyad.launch.processes import STOPPED, Child, Children
from polyad.train.errors import RunError, stopped

Work = Generator[tuple[str, ...], None, Any]
"""A generator that yields the words of a `polyad` command, resumes after its success, and returns a
result. If a command fails, the yield raises `CommandFailed`; a job that does not catch it fails."""
Item = TypeVar("Item")
VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Environment variable with the GPUs visible to a process."""


class CommandFailed(Exception):
    """A command of a job failed with a status other than 0."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def shared_cores(jobs: int) -> dict[str, str]:
    """Environment variables with which concurrent jobs share the cores equally.

    Args:
        jobs: number of concurrent jobs; a single one has all cores.
    """
    return {"OMP_NUM_THREADS": str(threads_of_each(jobs))} if jobs > 1 else {}


def gpu_of(place: int) -> dict[str, str]:
    """Environment variables that assign a GPU to one of several jobs, round robin.

    Args:
        place: number of the job among the running ones, from 0.

    Returns:
        Variables; empty with fewer than two GPUs, or if `CUDA_VISIBLE_DEVICES` names fewer.
    """
    named = os.environ.get(VISIBLE)
    if named is None:
        gpus = [str(number) for number in range(torch.cuda.device_count())]
    else:
        gpus = [name for each in named.split(",") if (name := each.strip())]
    return {VISIBLE: gpus[place % len(gpus)]} if len(gpus) > 1 else {}


@dataclass
class _Going(Generic[Item]):
    """A running job."""

    place: int
    item: Item
    name: str
    work: Work
    since: float
    command: str = ""
    child: Child | None = None


class Jobs(Generic[Item]):
    """Up to `number` concurrent jobs, within a `with` block, at whose end none is running.

    Args:
        number: maximum number of jobs; they share the cores equally, and each has one GPU.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._children = Children(shared_cores(number))
        self._going: list[_Going[Item]] = []

    def __enter__(self) -> "Jobs[Item]":
        self._children.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._children.__exit__(kind, error, trace)
        if kind is None and self._children.signal:  # it came when no command ran
            raise stopped(self._children.signal, "run the same command again to continue")

    @property
    def has_room(self) -> bool:
        """Whether another job can start."""
        return len(self._going) < self.number

    @property
    def going(self) -> list[tuple[Item, float]]:
        """The items of running jobs, with the seconds since their start."""
        return [(each.item, time.monotonic() - each.since) for each in self._going]

    def begin(self, item: Item, name: str, work: Work) -> None:
        """Starts a job.

        Args:
            item: identifies it in `wait`, such as a run.
            name: the run's name for its lines and errors.
            work: its commands.
        """
        taken = {each.place for each in self._going}
        place = next(place for place in range(self.number) if place not in taken)
        going = _Going(place, item, name, work, time.monotonic())
        self._going.append(going)
        self._goes_on(going)

    def wait(self) -> tuple[Item, Any]:
        """Waits for the first job to end; there must be one.

        Returns:
            Its item, and its result.

        Raises:
            RunError: one failed; the others were stopped, and have saved and ended.
            Stopped: or KeyboardInterrupt: a signal stopped one of them or this process.
        """
        while True:
            child, status = self._children.wait()
            going = next(each for each in self._going if each.child is child)
            if self._children.signal or status in STOPPED:
                self._end(going, status)
            if (result := self._goes_on(going, status)) is not None:
                self._going.remove(going)
                return going.item, result

    def _goes_on(self, going: _Going[Item], status: int = 0) -> Any:
        """Starts a job's next command after one with this status; returns its result at the end."""
        try:
            words = going.work.throw(CommandFailed(status)) if status else next(going.work)
        except StopIteration as end:
            return end.value
        except CommandFailed:
            self._end(going, status)
        prefix = f"{going.name}: " if self.number > 1 else ""
        going.command = words[0]
        gpu = gpu_of(going.place) if self.number > 1 else {}
        going.child = self._children.start(words, prefix=prefix, variables=gpu)
        return None

    def _end(self, first: _Going[Item], status: int) -> NoReturn:
        """Ends all jobs, after one has failed, or a signal came."""
        self._children.end_all()
        several = len(self._going) > 1
        kept = f"run the same command again to continue {('these runs' if several else 'this run')}"
        names = "; ".join(each.name for each in self._going)
        number = self._children.signal or (status - 128 if status in STOPPED else 0)
        if number:
            raise stopped(number, f"{names}: {kept}")
        raise RunError(
            f"{first.name}: `polyad {first.command}` ended with status {status}; run the same "
            "command again to continue with this run (finished ones are kept)"
        )
