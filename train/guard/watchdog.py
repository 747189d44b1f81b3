"""Finds the process that a stalled run waits for, and reports its stack.

A thread of every process regularly writes a heartbeat into the run's folder: what its main thread
is doing, how many collectives it has started in each group, and its stack. Ranks 0 and 1 read them
all, rank 1 in case rank 0 stalls. If a process has made no progress for the time allowed, the
processes to blame are

- those whose heartbeats have stopped: the process is stopped or frozen, or its host is down;
- else those that make no progress and wait for no other process: in no group have they started
  more collectives than another process. A process that waits in a collective has started it.

The reader reports them and the collective that the others wait in, and writes all stacks to
`stalls.txt`; every process whose thread still runs writes its last collectives to `collectives/`
and exits with the status listed in `train/errors.py`.
"""

import contextlib
import faulthandler
import json
import os
import shutil
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NoReturn, TypeVar

from polyad.data.files import write_whole
from polyad.parallel import comm
from polyad.train.errors import STALLED

T = TypeVar("T")
WATCH_FOLDER = ".watch"
STALLS_FILE = "stalls.txt"
COLLECTIVES_FOLDER = "collectives"
"""Subfolder of the run's for dumps of PyTorch's flight recorder, one per process at a stall."""
VERDICT_FILE = "verdict"
NAMED = 8
"""Maximum number of processes named in a line; the file has all stacks."""


@dataclass(kw_only=True)
class Beat:
    """A heartbeat: the state of a process at one moment."""

    rank: int
    host: str
    pid: int
    number: int
    """The number of the heartbeat, counted from the start of the process."""
    place: str
    moves: int
    """How often the place has changed, which is progress."""
    begun: dict[str, int]
    """Number of collectives started, by group."""
    stack: list[str] = field(default_factory=list)
    """The stack of the main thread, the innermost call last."""
    waits: list[str] = field(default_factory=list)
    """Collectives started but not finished, in words."""


class Watchdog:
    """Watches this process, and as rank 0 or 1 all of them; use as a context.

    Args:
        folder: the run's folder, which all processes share.
        world: this process.
        stall_minutes: minutes without progress that count as a stall; 0 turns the watchdog off.
    """

    def __init__(self, folder: Path, world: comm.World, stall_minutes: float) -> None:
        self._folder, self._watch, self._world = folder, folder / WATCH_FOLDER, world
        self._limit = 60 * stall_minutes
        self._interval = min(self._limit / 8, 60.0)
        self._main = threading.get_ident()
        self._place, self._moves, self._number = "its start", 0, 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Watchdog":
        if not self._limit:
            return self
        if self._world.is_main:  # removes the files of an earlier start
            shutil.rmtree(self._watch, ignore_errors=True)
            self._watch.mkdir(parents=True)
        comm.barrier()
        self._thread = threading.Thread(target=self._run, name="polyad-watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=10)  # may be waiting for a dead disk
            faulthandler.cancel_dump_traceback_later()
            with contextlib.suppress(OSError):
                (self._watch / _name(self._world.rank)).unlink(missing_ok=True)
                self._stack_file().unlink(missing_ok=True)
                self._watch.rmdir()  # succeeds only for the last process, when it is empty

    def at(self, place: str) -> None:
        """Records what the main thread does next; each call counts as progress.

        Args:
            place: as in "step 12: reading data".
        """
        self._place, self._moves = place, self._moves + 1

    def over(self, items: Iterator[T]) -> Iterator[T]:
        """Yields the items, and records when one is being read."""
        while True:
            place = self._place
            self.at(f"reading data for {place}")
            try:
                item = next(items)
            except StopIteration:
                return
            self.at(place)
            yield item

    def _run(self) -> None:
        judge = Judge(self._world.size, self._limit)
        reads = self._world.rank < 2
        with self._stack_file().open("w") as stacks:
            while not self._ended.wait(self._interval if self._number else 0):
                # If C code hangs while holding the GIL, this thread cannot run. Then faulthandler's
                # thread, which does not need the GIL, writes all stacks.
                faulthandler.dump_traceback_later(self._limit, file=stacks)
                with contextlib.suppress(OSError):  # the main thread reports a full disk
                    self._beat()
                if (self._watch / VERDICT_FILE).exists():
                    self._dump()
                    os._exit(STALLED)
                if reads:
                    blamed = judge.blame(
                        read_beats(self._watch, self._world.size), time.monotonic()
                    )
                    speaks = not self._world.rank or any(beat.rank == 0 for beat in blamed)
                    if blamed and speaks and not self._ended.is_set():
                        self._end(blamed, judge)

    def _beat(self) -> None:
        self._number += 1
        frame = sys._current_frames().get(self._main)
        beat = Beat(
            rank=self._world.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            number=self._number,
            place=self._place,
            moves=self._moves,
            begun=comm.collectives_begun(),
            stack=[line.rstrip() for line in traceback.format_stack(frame)] if frame else [],
            waits=comm.collectives_waited_for(comm.collectives_recorded()),
        )
        write_whole(self._watch / _name(self._world.rank), json.dumps(asdict(beat)))

    def _end(self, blamed: list[Beat], judge: "Judge") -> NoReturn:
        with contextlib.suppress(OSError):
            (self._watch / VERDICT_FILE).touch()
        text = judge.report(blamed, self._watch)
        with contextlib.suppress(OSError), (self._folder / STALLS_FILE).open("a") as file:
            others = [beat for beat in judge.beats if beat not in blamed[:NAMED]]
            waiting = "\n".join(stack_of(beat, self._watch) for beat in others)
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{text}\n{waiting}\n\n")
        print(text, file=sys.stderr, flush=True)
        self._dump()
        os._exit(STALLED)

    def _dump(self) -> None:
        """Writes this process's collectives to the run's folder."""
        folder = self._folder / COLLECTIVES_FOLDER
        with contextlib.suppress(OSError):
            folder.mkdir(exist_ok=True)
            (folder / f"{_name(self._world.rank)}.json").write_bytes(comm.collectives_recorded())

    def _stack_file(self) -> Path:
        return self._watch / f"{_name(self._world.rank)}.stack"


class Judge:
    """Compares heartbeats over time, by this host's clock, since hosts' clocks may differ.

    Args:
        size: number of processes.
        limit: seconds without progress that count as a stall.
    """

    def __init__(self, size: int, limit: float) -> None:
        self._size, self._limit = size, limit
        self._heard: dict[int, tuple[int, float]] = {}
        self._moved: dict[int, tuple[object, float]] = {}
        self.beats: list[Beat] = []

    def blame(self, beats: list[Beat], now: float) -> list[Beat]:
        """Finds the processes that the run waits for.

        Args:
            beats: the newest heartbeat of each process that has written one.
            now: the time in seconds.

        Returns:
            The last heartbeats of these processes; empty if all make progress.
        """
        self.beats = beats
        for beat in beats:
            if self._heard.get(beat.rank, (None, 0.0))[0] != beat.number:
                self._heard[beat.rank] = beat.number, now
            progress = beat.moves, sorted(beat.begun.items())
            if self._moved.get(beat.rank, (None, 0.0))[0] != progress:
                self._moved[beat.rank] = progress, now
        silent = [b for b in beats if now - self._heard[b.rank][1] > self._limit]
        if silent:
            return silent
        still = [b for b in beats if now - self._moved[b.rank][1] > self._limit]
        return [b for b in still if not any(_waits_for(b, other) for other in beats)]

    def report(self, blamed: list[Beat], folder: Path) -> str:
        """Returns the error about blamed processes: one line, and the stack of each.

        Args:
            blamed: as returned by `blame`.
            folder: folder of the heartbeats.
        """
        names = ", ".join(f"rank {b.rank} ({b.host}, process {b.pid})" for b in blamed[:NAMED])
        names += f" and {len(blamed) - NAMED} more" if len(blamed) > NAMED else ""
        places = " and ".join(sorted({b.place for b in blamed}))
        now = max(seen for _, seen in self._heard.values())
        silent = any(now - self._heard[b.rank][1] > self._limit for b in blamed)
        if silent:
            what = f"without a sign of life, stopped or its host gone; last seen in {places}"
        elif len(blamed) == self._size > 1:
            what = f"in {places}; no process is behind the others"
        else:
            what = f"in {places}"
        waiting = Counter(w for beat in self.beats if beat not in blamed for w in beat.waits[:1])
        for operation, count in waiting.most_common(1):
            what += f"; {count} other{'s wait' if count > 1 else ' waits'} in {operation}"
        line = f"polyad: error: stalled for {self._limit:g} s: {names}, {what}"
        return "\n".join([line, *(stack_of(beat, folder) for beat in blamed[:NAMED])])


def stack_of(beat: Beat, folder: Path) -> str:
    """The current stack of a process, or that of its last heartbeat."""
    dumped = ""
    with contextlib.suppress(OSError):
        dumped = (folder / f"{_name(beat.rank)}.stack").read_text(errors="replace")
    stack = dumped.splitlines() or [line for entry in beat.stack for line in entry.splitlines()]
    return "\n".join([f"rank {beat.rank} in {beat.place}:", *(f"  {line}" for line in stack)])


def read_beats(folder: Path, size: int) -> list[Beat]:
    """The newest heartbeat of each process that has written one."""
    beats = []
    for rank in range(size):
        with contextlib.suppress(OSError, ValueError, TypeError):
            beats.append(Beat(**json.loads((folder / _name(rank)).read_text(encoding="utf-8"))))
    return beats


def _waits_for(one: Beat, other: Beat) -> bool:
    return any(one.begun[g] > other.begun[g] for g in one.begun.keys() & other.begun.keys())


def _name(rank: int) -> str:
    return f"rank-{rank:05d}"
