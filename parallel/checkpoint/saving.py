"""Saves a run's checkpoints, either synchronously or from a snapshot while training continues."""

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
    """A snapshot that is not yet a complete checkpoint."""

    step: int
    staging: Path
    others: dict[str, bytes]
    task: "Task"
    """This process's work on it in a thread."""
    committing: bool = False


class Saver:
    """Writes checkpoints one after the other; all ranks call every method together.

    With asynchronous saving, training continues while a thread copies what this rank writes, and
    then writes the copy; anything that changes weights or moments first waits for the copies. A
    checkpoint is committed only once every rank knows that all threads are done.

    Args:
        engine: the engine to save.
        folder: the run's `checkpoints` folder.
        keep: the rule for keeping older checkpoints.
        asynchronous: whether training continues during a save. From then on this needs additional
            memory on the host of the size of this rank's part of a checkpoint.
    """

    def __init__(
        self, engine: Engine, folder: Path, *, keep: Retention, asynchronous: bool = False
    ) -> None:
        self._engine, self._folder, self._keep = engine, folder, keep
        self._pending: _Pending | None = None
        self._memory: SnapshotMemory | None = None
        self.seconds_waited = 0.0
        """Total time that training waited for copies, in seconds."""
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
        """Starts a save after the previous one is done; a synchronous one is done on return.

        In an asynchronous save, weights and moments may still be read after this returns: see
        `Engine.before_change`.

        Args:
            step: number of completed optimizer steps.
            state: JSON values for `state.json`, the same on every rank.
            config_yaml: the resolved configuration.
            files: further files by name, such as a tokenizer.
            best: step of the best checkpoint so far, possibly this one, which is kept; None if none
                is marked.
            judged: whether no validation of these weights is pending.

        Raises:
            SaveError: this save or the previous one failed, on any rank.
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
        """Checks without waiting whether the save is done; called after every step.

        Raises:
            SaveError: it failed, on any rank.
        """
        self._advance(wait=False)

    def finish(self) -> None:
        """Waits until the last save is committed.

        Raises:
            SaveError: it failed, on any rank.
        """
        self._advance(wait=True)

    def close(self) -> None:
        """Frees the memory; an unfinished save is lost. Does not communicate with other ranks.

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
        """Waits until weights and moments are copied. Does not communicate with other ranks."""
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
        """Returns whether the threads of all ranks are done.

        Raises:
            SaveError: on every rank, if one failed on any.
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
    """Writes this rank's part of a checkpoint from its copies."""
    make_folder(staging)
    return write_shard(staging, rank, copies, check=check)


class Copy(NamedTuple):
    """A copy to make."""

    place: torch.Tensor
    """Contiguous CPU memory with the dtype and shape of the values."""
    values: torch.Tensor


class _GivenUp(Exception):
    """The run has ended before its snapshot was written."""


class Task:
    """A thread that copies tensors and then processes the copies, while the process continues.

    On a GPU it copies on a separate stream, which first waits for the work queued on the current
    stream.

    Args:
        work: called in the thread once everything is copied, with a function that it must call from
            time to time, and that raises an exception to end the work if the task is given up.
        copies: nothing may change their values before `wait_for_copies` returns.
        device: the device of the values.
    """

    def __init__(
        self,
        work: Callable[[Callable[[], None]], Any],
        copies: Sequence[Copy] = (),
        device: torch.device | None = None,
    ) -> None:
        self._work, self._copies = work, list(copies)
        self.result: Any = None
        """The result of `work`, once the thread is done."""
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
        """Waits until the copies are made or have failed; `error` then has the reason."""
        self._copied.wait()

    def join(self) -> None:
        """Waits until all is done."""
        self.wait_for_copies()
        self._thread.join()

    def give_up(self) -> None:
        """Ends the work at its next check, or before it starts."""
        self._given_up.set()

    def _check(self) -> None:
        if self._given_up.is_set():
            raise _GivenUp

    def _run(self) -> None:
        try:
            with self._stream:
                for place, values in self._copies:
                    copy_tensor(place, values)
        except Exception as error:  # raised later, when ranks exchange errors
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
    """Copies a tensor to contiguous CPU memory without blocking other threads."""
    if values.device.type == "cpu" and values.is_contiguous():
        # Faster than copy_ with one thread: libc does not read the memory that it overwrites.
        nbytes = values.numel() * values.element_size()
        ctypes.memmove(place.data_ptr(), values.data_ptr(), nbytes)
    else:
        place.copy_(values)


def memory_needed(boxes: Sequence[HeldBox]) -> int:
    """Returns the size of a snapshot in bytes."""
    return sum(map(_room, boxes))


def _room(held: HeldBox) -> int:
    nbytes = math.prod(held.box.size) * held.dtype.itemsize
    return math.ceil(nbytes / ALIGNMENT) * ALIGNMENT


class SnapshotMemory:
    """The memory of one snapshot.

    Args:
        nbytes: size of the memory; it is allocated and touched at once, so that a snapshot only
            costs the copying.
        pinned: whether a GPU copies into it, which requires page-locked memory.
    """

    def __init__(self, nbytes: int, *, pinned: bool = False) -> None:
        self.nbytes = max(nbytes, mmap.PAGESIZE)
        memory = mmap.mmap(-1, self.nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # not supported by this kernel
                memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8).zero_()
        self._is_pinned = pinned and _pin(self._bytes)

    def take(self, boxes: Sequence[HeldBox]) -> tuple[list[HeldBox], list[Copy]]:
        """Assigns memory to each box, and copies what may change at any moment.

        Args:
            boxes: boxes that fit into the memory.

        Returns:
            The boxes with the copies as their values, and the copies that still have to be made.
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
        """Unregisters the memory from a GPU before it is freed: CUDA would keep its pages."""
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
            self._is_pinned = False


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _pin(memory: torch.Tensor) -> bool:
    """Page-locks memory for a GPU; if the system's limit is reached, copies are slower."""
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
