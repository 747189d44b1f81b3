"""Writes checkpoints: every rank writes its own boxes, nothing is gathered; either synchronously or
from a snapshot while training continues.

`../README.md` describes the format, and the order of writes that makes it crash-safe.
"""

import contextlib
import json
import math
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch

from polyad.data.errors import say
from polyad.data.files import flush_to_disk
from polyad.parallel import comm
from polyad.parallel.checkpoint import manage
from polyad.parallel.checkpoint.format import (
    BUFFER,
    CONFIG_FILE,
    INDEX_FILE,
    MANIFEST_FILE,
    MASTER,
    RANDOM,
    STATE_FILE,
    Box,
    FileRecord,
    NotFiniteError,
    all_finite,
    record_of,
    render,
)
from polyad.parallel.checkpoint.manage import (
    BEST_FILE,
    LATEST_FILE,
    Retention,
    reason_of,
    step_folder,
)
from polyad.parallel.fragments import persistent_buffers, written
from polyad.parallel.tensor_file import DTYPE_NAMES, FileTensor, write_tensors
from polyad.parallel.zero import Engine

THREAD_NAME = "polyad-snapshot"
ALIGNMENT = 64
"""The alignment of each tensor in a snapshot, in bytes."""


class HeldBox(NamedTuple):
    """A box that this rank writes."""

    box: Box
    dtype: torch.dtype
    values: Callable[[], torch.Tensor]
    """Returns the values; called when they are copied or written."""
    step: float = 0.0
    """Number of optimizer steps of the parameter."""
    by_optimizer: bool = False
    """Whether `Engine.about_to_change` is called before every change of the values."""


Copy: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""A copy to make: contiguous CPU memory with the dtype and shape of the values, and the values."""


class _GivenUp(Exception):
    """The run has ended before its snapshot was written."""


class Task(threading.Thread):
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
        super().__init__(name=THREAD_NAME, daemon=True)
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
        self.start()

    def wait_for_copies(self) -> None:
        """Waits until the copies are made or have failed; `error` then has the reason."""
        self._copied.wait()

    def give_up(self) -> None:
        """Ends the work at its next check, or before it starts."""
        self._given_up.set()

    def _check(self) -> None:
        if self._given_up.is_set():
            raise _GivenUp

    def run(self) -> None:
        """Does the work, in the thread."""
        try:
            try:
                with self._stream:
                    for place, values in self._copies:
                        copy_tensor(place, values)
            finally:
                self._copies.clear()
                self._copied.set()
            self._check()
            self.result = self._work(self._check)
        except OSError as error:
            self.error = reason_of(error)
        except (NotFiniteError, _GivenUp) as error:
            self.error = str(error)
        except Exception as error:  # raised later, when ranks exchange errors
            traceback.print_exc()
            first = (str(error).splitlines() or [""])[0]
            self.error = f"{type(error).__name__}: {first}"


def copy_tensor(place: torch.Tensor, values: torch.Tensor) -> None:
    """Copies a tensor to contiguous CPU memory without blocking other threads."""
    place.copy_(values)


def _room(held: HeldBox) -> int:
    nbytes = math.prod(held.box.size) * held.dtype.itemsize
    return math.ceil(nbytes / ALIGNMENT) * ALIGNMENT


class SnapshotMemory:
    """The memory of one snapshot.

    Args:
        boxes: boxes of the sizes of those to take; the memory is allocated and touched at once, so
            that a snapshot only costs the copying.
        pinned: whether a GPU copies into it, which requires page-locked memory.
    """

    def __init__(self, boxes: Iterable[HeldBox], *, pinned: bool = False) -> None:
        self._bytes = torch.zeros(sum(map(_room, boxes)), dtype=torch.uint8)
        self._is_pinned = pinned and _pin(self._bytes)

    def take(self, boxes: Sequence[HeldBox]) -> tuple[list[HeldBox], list[Copy]]:
        """Assigns memory to each box, and copies what may change at any moment.

        Args:
            boxes: the boxes.

        Returns:
            The boxes with the copies as their values, and the copies that still have to be made.
        """
        copied, later, at = [], [], 0
        for each in boxes:
            values = each.values().detach()
            nbytes = values.numel() * values.element_size()
            place = self._bytes[at : at + nbytes].view(values.dtype).view(values.shape)
            if each.by_optimizer:
                later.append((place, values))
            else:
                copy_tensor(place, values)
            copied.append(each._replace(values=place.detach))
            at += _room(each)
        return copied, later

    def close(self) -> None:
        """Unregisters the memory from a GPU before it is freed: CUDA would keep its pages."""
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
            self._is_pinned = False


def _pin(memory: torch.Tensor) -> bool:
    """Page-locks memory for a GPU; if the system's limit is reached, copies are slower."""
    register = torch.cuda.cudart().cudaHostRegister
    if not int(register(memory.data_ptr(), memory.numel(), 0)):
        return True
    size = f"{memory.numel() / 1e9:.1f} GB"
    say(f"warning: {size} for snapshots cannot be page-locked, so they pause training for longer")
    with contextlib.suppress(RuntimeError):  # CUDA keeps the error, and the next kernel has it
        torch.zeros(1, device="cuda")
    return False


class SaveError(RuntimeError):
    """A checkpoint that could not be written: a one-line reason, the same on every rank."""

    exit_status = 1


class Shard(NamedTuple):
    """The part that one rank wrote; it is sent to the rank that writes the index."""

    boxes: list[tuple[Box, str, float, int]]
    """Each box, its dtype as safetensors names it, the number of optimizer steps of its parameter,
    and its first byte in the file."""
    name: str
    record: FileRecord


def save_weights(
    folder: Path,
    shapes: dict[str, tuple[int, ...]],
    read: Callable[[str], torch.Tensor],
    *,
    buffers: Mapping[str, torch.Tensor],
    state: dict[str, Any],
    config_yaml: str,
    files: Mapping[str, bytes],
) -> None:
    """Writes a checkpoint of weights only, at step 0, from this process and without an engine.

    Args:
        folder: the folder of the checkpoint, which exists and is empty.
        shapes: shapes of the weights, by name.
        read: returns a whole weight, fp32; one is in memory at a time.
        buffers: buffers of the model, by name.
        state: JSON values for `state.json`.
        config_yaml: the configuration.
        files: further files by name, such as the tokenizer of the model.
    """
    boxes = [
        HeldBox(Box.whole(name, MASTER, shape), torch.float32, partial(read, name))
        for name, shape in shapes.items()
    ]
    boxes += [_held_buffer(name, buffer) for name, buffer in buffers.items()]
    # Converted values are not checked here; the converter reports those that are not finite.
    shard = write_shard(folder, 0, boxes, check_finite=False)
    write_rest(folder, 0, [shard], small_files(state, config_yaml, files))


def small_files(
    state: dict[str, Any], config_yaml: str, files: Mapping[str, bytes]
) -> dict[str, bytes]:
    """Returns the contents of the small files beside the tensors, by name."""
    return {
        STATE_FILE: json.dumps(state, indent=1).encode(),
        CONFIG_FILE: config_yaml.encode(),
        **files,
    }


def write_shard(
    staging: Path,
    rank: int,
    boxes: Sequence[HeldBox],
    check: Callable[[], None] = lambda: None,
    *,
    check_finite: bool = True,
) -> Shard:
    """Writes the file of one rank, with one box in memory at a time.

    Args:
        staging: the folder; it is made if it does not exist.
        rank: the rank.
        boxes: the content.
        check: called repeatedly; an exception that it raises ends the writing.
        check_finite: whether fp32 values must be finite.

    Raises:
        NotFiniteError: a value is NaN or infinite: such weights must not replace a good checkpoint.
    """

    def check_piece(number: int, piece: memoryview) -> None:
        check()
        held = boxes[number]
        if check_finite and held.dtype == torch.float32 and not all_finite(piece):
            raise NotFiniteError(
                f"{held.box.name} ({held.box.field}) has numbers that are not finite"
            )

    manage.make_folder(staging)
    path = staging / f"rank-{rank:05d}.safetensors"
    tensors = [FileTensor(held.box.key, held.dtype, held.box.size, held.values) for held in boxes]
    begins, record = write_tensors(path, tensors, check=check_piece)
    stored = [
        (held.box, DTYPE_NAMES[held.dtype], held.step, begin)
        for held, begin in zip(boxes, begins, strict=True)
    ]
    return Shard(stored, path.name, record)


def write_rest(staging: Path, step: int, shards: Sequence[Shard], others: dict[str, bytes]) -> None:
    """Writes the index of all shards, and the other files; the manifest last."""
    tensors: dict[str, dict[str, Any]] = {}  # by name and field
    for shard in shards:
        for box, dtype, step_of_box, begin in shard.boxes:
            fields = tensors.setdefault(box.name, {})
            about = fields.setdefault(box.field, {"shape": box.shape, "dtype": dtype, "chunks": []})
            place = {"offset": box.offset, "size": box.size, "step": step_of_box}
            about["chunks"].append(place | {"file": shard.name, "begin": begin})
    index = json.dumps({"tensors": tensors}).encode()
    files = {shard.name: shard.record for shard in shards}
    for name, content in ({INDEX_FILE: index} | others).items():
        manage.write_file(staging / name, [content])
        files[name] = record_of(content)
    manage.write_file(staging / MANIFEST_FILE, [render(step, files)])
    flush_to_disk(staging)


def commit(
    staging: Path, step: int, shards: Sequence[Shard], others: dict[str, bytes], keep: Retention
) -> None:
    """Turns a staging folder whose shards are all on disk into a checkpoint.

    Args:
        staging: the folder, beside the checkpoints.
        step: number of completed optimizer steps.
        shards: the shards of all ranks.
        others: the small files, by name.
        keep: the rule for keeping checkpoints.
    """
    folder = staging.parent
    final = folder / step_folder(step)
    write_rest(staging, step, shards, others)
    # The folder exists if this step was saved before, and was damaged, not judged, or the run went
    # back. Until the new one has its name, the old one can be restored: see `put_back`.
    replaced = manage.set_aside(final, "replaced") if final.exists() else None
    try:
        manage.rename(staging, final)
    except OSError:
        if replaced is not None and not final.exists():
            with contextlib.suppress(OSError):  # done at the next start of the run
                manage.rename(replaced, final)
        raise
    manage.replace_file(folder / LATEST_FILE, f"{final.name}\n".encode())
    if keep.best is not None and (folder / step_folder(keep.best) / MANIFEST_FILE).is_file():
        manage.replace_file(folder / BEST_FILE, f"{step_folder(keep.best)}\n".encode())
    elif (folder / BEST_FILE).is_file():  # a checkpoint that is no longer the best, or was not kept
        manage.remove_file(folder / BEST_FILE)
    if replaced is not None:
        manage.remove_or_warn(replaced, manage.remove_tree)
    manage.prune(folder, step, keep)


def held_boxes(engine: Engine) -> Iterator[HeldBox]:
    """Yields the boxes that this rank writes; each element is written by exactly one rank."""
    for part in written(engine):
        steps = 0.0 if part.counter is None else float(part.counter)
        for box, view in part.boxes():
            yield HeldBox(box, view.dtype, view.detach, steps, by_optimizer=True)
    if comm.rank() == 0:
        for name, buffer in persistent_buffers(engine.module):
            yield _held_buffer(name, buffer)
    states = {"torch": torch.get_rng_state()}  # training draws from both
    if engine.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(engine.device)
    for name, state in states.items():
        full_name = f"rank-{comm.rank():05d}.{name}"
        yield HeldBox(Box.whole(full_name, RANDOM, (state.numel(),)), state.dtype, state.detach)


def _held_buffer(name: str, buffer: torch.Tensor) -> HeldBox:
    return HeldBox(Box.whole(name, BUFFER, tuple(buffer.shape)), buffer.dtype, buffer.detach)


@dataclass
class _Pending:
    """A snapshot that is not yet a complete checkpoint."""

    step: int
    staging: Path
    others: dict[str, bytes]
    task: Task
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
        if asynchronous:  # boxes of all saves have the same sizes
            pinned = engine.device.type == "cuda"
            self._memory = SnapshotMemory(held_boxes(engine), pinned=pinned)

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

        The order makes a crash harmless: shards, then index and manifest in a staging folder, all
        flushed to disk; then the rename that makes it a checkpoint; then the pointer `latest`; then
        the removal of older checkpoints. In an asynchronous save, weights and moments may still be
        read after this returns: see `Engine.before_change`.

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
        boxes, copies = list(held_boxes(self._engine)), list[Copy]()  # views
        if self._memory is not None:
            boxes, copies = self._memory.take(boxes)
            self._engine.before_change(self._settle)
        staging = comm.from_main(manage.staging_folder(self._folder, step))
        task = Task(partial(write_shard, staging, comm.rank(), boxes), copies, self._engine.device)
        self._pending = _Pending(step, staging, small_files(state, config_yaml, files), task)
        if self._memory is None:
            self.finish()

    def finish(self) -> None:
        """Waits until the last save is committed.

        Raises:
            SaveError: it failed, on any rank.
        """
        self.poll(wait=True)

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

    def poll(self, *, wait: bool = False) -> None:
        """Commits the save once all ranks have written their parts; called after every step.

        Args:
            wait: whether to wait until it is committed.

        Raises:
            SaveError: it failed, on any rank.
        """
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
        running, reason = pending.task.is_alive(), pending.task.error
        mine = torch.tensor(
            [running, reason is not None], dtype=torch.float32, device=self._engine.device
        )
        missing, failed = comm.max_over_ranks(mine).tolist()
        if failed:
            self._fail(pending, reason)
        return not missing

    def _fail(self, pending: _Pending, reason: str | None) -> NoReturn:
        reasons = {rank: text for rank, text in enumerate(comm.from_all(reason)) if text}
        self.close()
        if comm.rank() == 0:
            with contextlib.suppress(OSError):
                manage.remove_tree(pending.staging)
        first = min(reasons)
        raise SaveError(f"step {pending.step} could not be saved: rank {first}: {reasons[first]}")
