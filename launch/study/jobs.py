"""Works of a study, each a few commands of `polyad` in processes of their own, several at a time.

One thread does all of it: it starts commands, waits for whichever ends first, and goes on with the
work that asked for that one.
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
"""Yields the words of a command of `polyad`, goes on once that has ended well, returns a result.
Where it did not end well `CommandFailed` comes out of the yield; a work that lets it pass fails."""
Item = TypeVar("Item")
VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The environment variable with the GPUs that a process sees."""


class CommandFailed(Exception):
    """A command of a work ended with a status that is not 0."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def shared_cores(jobs: int) -> dict[str, str]:
    """What the environment of each of several jobs has, so that they share the cores equally.

    Args:
        jobs: that go on at a time; one has all cores, as a command has that is alone.
    """
    return {"OMP_NUM_THREADS": str(threads_of_each(jobs))} if jobs > 1 else {}


def gpu_of(place: int) -> dict[str, str]:
    """What the environment of one of several jobs has, so that they take turns among the GPUs.

    Args:
        place: of the job among those that go on, from 0.

    Returns:
        Nothing where there are not two GPUs, or `CUDA_VISIBLE_DEVICES` names fewer.
    """
    named = os.environ.get(VISIBLE)
    if named is None:
        gpus = [str(number) for number in range(torch.cuda.device_count())]
    else:
        gpus = [name for each in named.split(",") if (name := each.strip())]
    return {VISIBLE: gpus[place % len(gpus)]} if len(gpus) > 1 else {}


@dataclass
class _Going(Generic[Item]):
    """A work that has begun."""

    place: int
    item: Item
    name: str
    work: Work
    since: float
    command: str = ""
    child: Child | None = None


class Jobs(Generic[Item]):
    """Up to so many works at a time, within a `with` block, at whose end none goes on.

    Args:
        number: of works; they share this machine's cores equally, and each has one of its GPUs.
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
        """Whether one more may begin."""
        return len(self._going) < self.number

    @property
    def going(self) -> list[tuple[Item, float]]:
        """The items of the works that go on, each with the seconds since it began."""
        return [(each.item, time.monotonic() - each.since) for each in self._going]

    def begin(self, item: Item, name: str, work: Work) -> None:
        """Begins a work.

        Args:
            item: what `wait` names it by, as a run.
            name: the run's, which its lines and errors have.
            work: its commands.
        """
        taken = {each.place for each in self._going}
        place = next(place for place in range(self.number) if place not in taken)
        going = _Going(place, item, name, work, time.monotonic())
        self._going.append(going)
        self._goes_on(going)

    def wait(self) -> tuple[Item, Any]:
        """Waits for the first that ends, of at least one.

        Returns:
            Its item, and its result.

        Raises:
            RunError: one failed; the others have been asked to stop, and have saved and ended.
            Stopped: or KeyboardInterrupt: a signal asked one of them or this process to stop.
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
        """Starts the next command of a work, after one with this status; its result at the end."""
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
        """Ends all, after one has ended that was not to, or a signal came."""
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
