"""Saves a run's checkpoints: while training waits, or from a snapshot while it goes on."""

import contextlib
import ctypes
import math
import mmap
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from polyad.parallel import comm
from polyad.parallel.checkpoint.keeping import Retention, staging_folder
from polyad.parallel.checkpoint.storage import make_folder, reason_of
from polyad.parallel.checkpoint.writing import (
    HeldBox,
    NotFiniteError,
    SaveError,
    Shard,
    commit,
    held_boxes,
    raise_together,
    remove_quietly,
    save,
    small_files,
    write_shard,
)
from polyad.parallel.zero import Engine

THREAD_NAME = "polyad-snapshot"
ALIGNMENT = 64
"""The alignment of each tensor in a snapshot, in bytes."""


@dataclass
class _Pending:
    """A snapshot that is not a complete checkpoint yet."""

    step: int
    staging: Path
    others: dict[str, bytes]
    task: "Task"
    """What this process does for it in a thread."""
    committing: bool = False


class Saver:
    """Writes one checkpoint after the other; all processes call every method together.

    Asynchronous saving goes on while a thread copies what this process would write, and then writes
    the copy; whatever changes weights or moments first waits for the copies. Nothing is committed
    before every process knows that all threads are done.

    Args:
        engine: what is saved.
        folder: the run's `checkpoints` folder.
        keep: which older checkpoints stay.
        asynchronous: whether training goes on meanwhile. It takes as much memory more on the host
            as this process's part of a checkpoint, from now on.
    """

    def __init__(
        self, engine: Engine, folder: Path, *, keep: Retention, asynchronous: bool = False
    ) -> None:
        self._engine, self._folder, self._keep = engine, folder, keep
        self._pending: _Pending | None = None
        self._memory: SnapshotMemory | None = None
        self.seconds_waited = 0.0
        """Seconds that training waited for copies, over all saves."""
        if asynchronous:
            self._memory = self._new_memory(memory_needed(list(held_boxes(engine))))

    def save(
        self,
        step: int,
        state: dict[str, Any],
        config_yaml: str,
        files: Mapping[str, bytes],
        best: int | None = None,
        *,
        judged: bool = True,
    ) -> None:
        """Begins to save, after the save before is done; a synchronous one is done when it returns.

        Of an asynchronous save weights and moments may still be read when this returns: see
        `Engine.before_change`.

        Args:
            step: optimizer steps done.
            state: JSON values for `state.json`, the same on every process.
            config_yaml: the resolved configuration.
            files: what else lies in it by name, as a tokenizer.
            best: the step of the best checkpoint so far, perhaps of this one, which stays; None:
                none is marked.
            judged: whether no validation of these weights is due.

        Raises:
            SaveError: this save or the one before failed, on any process.
        """
        self.finish()
        self._keep = replace(self._keep, best=best, judged=judged)
        if self._memory is None:
            save(
                self._engine, self._folder, step, state=state, config_yaml=config_yaml,
                files=files, keep=self._keep,
            )  # fmt: skip
            return
        boxes = list(held_boxes(self._engine))
        if (needed := memory_needed(boxes)) > self._memory.nbytes:
            self._memory.close()
            self._memory = self._new_memory(needed)
        staging = comm.from_main(staging_folder(self._folder, step))
        copies, later = self._memory.take(boxes)
        task = Task(partial(_write, staging, comm.rank(), copies), later, self._engine.device)
        self._engine.before_change(self._settle)
        others = small_files(state, config_yaml, files)
        self._pending = _Pending(step, staging, others, task)

    def _new_memory(self, nbytes: int) -> "SnapshotMemory":
        return SnapshotMemory(nbytes, pinned=self._engine.device.type == "cuda")

    def poll(self) -> None:
        """Checks, without waiting, whether the save is done; called after every step.

        Raises:
            SaveError: it failed, on any process.
        """
        self._advance(wait=False)

    def finish(self) -> None:
        """Waits until the last save is committed.

        Raises:
            SaveError: it failed, on any process.
        """
        self._advance(wait=True)

    def close(self) -> None:
        """Lets the memory go; an unfinished save is lost. Exchanges nothing with other processes.

        After it returns, no tensor is read, and nothing is written.
        """
        if self._pending is not None:
            self._pending.task.give_up()
            self._pending.task.join()
            self._pending = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _settle(self) -> None:
        """Waits until weights and moments are copied. Exchanges nothing with other processes."""
        if self._pending is not None:
            started = time.perf_counter()
            self._pending.task.wait_for_copies()
            self.seconds_waited += time.perf_counter() - started

    def _advance(self, *, wait: bool) -> None:
        pending = self._pending
        if pending is None:
            return
        if not pending.committing:
            if not self._all_done(pending, wait=wait):
                return
            shards = comm.gather_to_main(pending.task.result)
            pending.committing = True
            if shards:
                work = partial(
                    commit, pending.staging, pending.step, shards, pending.others, self._keep
                )
                pending.task = Task(lambda check: work())
        if self._all_done(pending, wait=wait):
            self._pending = None

    def _all_done(self, pending: _Pending, *, wait: bool) -> bool:
        """Whether the threads of all processes are done.

        Raises:
            SaveError: on every process, if one failed on any.
        """
        if wait:
            pending.task.join()
        running, reason = pending.task.running, pending.task.error
        mine = torch.tensor(
            [running, reason is not None], dtype=torch.float32, device=self._engine.device
        )
        missing, failed = comm.max_over_ranks(mine).tolist()
        if failed:
            self._fail(pending, reason)
        return not missing

    def _fail(self, pending: _Pending, reason: str | None) -> None:
        try:
            raise_together(pending.step, reason)
        except SaveError:
            self.close()
            if comm.rank() == 0:
                remove_quietly(pending.staging)
            raise


def _write(staging: Path, rank: int, copies: list[HeldBox], check: Callable[[], None]) -> Shard:
    """Writes this process's part of a checkpoint from its copies."""
    make_folder(staging)
    return write_shard(staging, rank, copies, check=check)


class Copy(NamedTuple):
    """A copy to make."""

    place: torch.Tensor
    """Contiguous memory of the host, of the type and shape of the values."""
    values: torch.Tensor


class _GivenUp(Exception):
    """The run has ended before its snapshot was written."""


class Task:
    """A thread that copies tensors and then does something with them, while the process goes on.

    On a GPU it copies on a stream of its own, which first waits for the work that is queued on the
    current stream.

    Args:
        work: called in the thread once all is copied; it is given a function to call now and then,
            which raises what ends the work when the task is given up.
        copies: nothing may change their values before `wait_for_copies` returns.
        device: of the values.
    """

    def __init__(
        self,
        work: Callable[[Callable[[], None]], Any],
        copies: Sequence[Copy] = (),
        device: torch.device | None = None,
    ) -> None:
        self._work, self._copies = work, list(copies)
        self.result: Any = None
        """What `work` returned, once the thread is done."""
        self.error: str | None = None
        """Why the thread failed, in one line."""
        self._copied, self._given_up = threading.Event(), threading.Event()
        self._stream: AbstractContextManager[object] = nullcontext()
        if device is not None and device.type == "cuda":
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            self._stream = torch.cuda.stream(stream)  # also sets the device of the thread
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether anything is left to do."""
        return self._thread.is_alive()

    def wait_for_copies(self) -> None:
        """Waits until the copies are made or have failed; `error` says why they have."""
        self._copied.wait()

    def join(self) -> None:
        """Waits until all is done."""
        self.wait_for_copies()
        self._thread.join()

    def give_up(self) -> None:
        """Ends the work as soon as it asks, before it has begun at the latest."""
        self._given_up.set()

    def _check(self) -> None:
        if self._given_up.is_set():
            raise _GivenUp

    def _run(self) -> None:
        try:
            with self._stream:
                for place, values in self._copies:
                    copy_tensor(place, values)
        except Exception as error:  # raised later, where ranks exchange errors
            self.error = _in_one_line(error)
            return
        finally:
            self._copies.clear()
            self._copied.set()
        try:
            self._check()
            self.result = self._work(self._check)
        except _GivenUp:
            pass
        except OSError as error:
            self.error = reason_of(error)
        except NotFiniteError as error:
            self.error = str(error)
        except Exception as error:
            traceback.print_exc()
            self.error = _in_one_line(error)


def _in_one_line(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def copy_tensor(place: torch.Tensor, values: torch.Tensor) -> None:
    """Copies a tensor to contiguous memory of the host; other threads run meanwhile."""
    if values.device.type == "cpu" and values.is_contiguous():
        # One thread is faster so than with copy_: libc does not read what it overwrites.
        nbytes = values.numel() * values.element_size()
        ctypes.memmove(place.data_ptr(), values.data_ptr(), nbytes)
    else:
        place.copy_(values)


def memory_needed(boxes: Sequence[HeldBox]) -> int:
    """Bytes that a snapshot takes."""
    return sum(map(_room, boxes))


def _room(held: HeldBox) -> int:
    nbytes = math.prod(held.box.size) * held.dtype.itemsize
    return math.ceil(nbytes / ALIGNMENT) * ALIGNMENT


class SnapshotMemory:
    """The memory of one snapshot.

    Args:
        nbytes: size of the memory; it is taken at once, and touched, so that copying is all that a
            snapshot costs.
        pinned: whether a GPU copies into it, which takes memory that stays where it is.
    """

    def __init__(self, nbytes: int, *, pinned: bool = False) -> None:
        self.nbytes = max(nbytes, mmap.PAGESIZE)
        memory = mmap.mmap(-1, self.nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8).zero_()
        self._is_pinned = pinned and _pin(self._bytes)

    def take(self, boxes: Sequence[HeldBox]) -> tuple[list[HeldBox], list[Copy]]:
        """Finds a place for each box, and copies what may change at any moment.

        Args:
            boxes: they fit into the memory.

        Returns:
            The boxes with the copies as their values, and the copies that are still to be made.
        """
        copied, later, at = [], [], 0
        for each in boxes:
            values = each.values().detach()
            nbytes = values.numel() * values.element_size()
            place = self._bytes[at : at + nbytes].view(values.dtype).view(values.shape)
            if each.by_optimizer:
                later.append(Copy(place, values))
            else:
                copy_tensor(place, values)
            copied.append(each._replace(values=partial(_itself, place)))
            at += _room(each)
        return copied, later

    def close(self) -> None:
        """Lets a GPU forget the memory, before it is let go: CUDA would keep its pages."""
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
            self._is_pinned = False


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _pin(memory: torch.Tensor) -> bool:
    """Page-locks memory for a GPU; where the system allows no more, copies are slower."""
    register = torch.cuda.cudart().cudaHostRegister
    if not int(register(memory.data_ptr(), memory.numel(), 0)):
        return True
    line = f"{memory.numel() / 1e9:.1f} GB for snapshots cannot be page-locked"
    print(
        f"polyad: warning: {line}, so they pause training for longer", file=sys.stderr, flush=True
    )
    with contextlib.suppress(RuntimeError):  # CUDA keeps the error, and the next kernel has it
        torch.zeros(1, device="cuda")
    return False
