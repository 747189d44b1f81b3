"""A copy of what a process would write, in memory that another process writes to the disk."""

import contextlib
import json
import math
import mmap
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import polyad
from polyad.parallel.checkpoint.copying import Copying, Pair, copy_tensor
from polyad.parallel.checkpoint.tensor_file import DTYPE_NAMES
from polyad.parallel.checkpoint.writer import Chunk

ALIGNMENT = 64
"""The alignment of each tensor in the memory, in bytes."""
FOR_THE_TRAINER = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
"""Signals to all processes of a job; the writer ignores them, and finishes the snapshot."""


def memory_needed(chunks: Sequence[Chunk]) -> int:
    """Bytes that a snapshot takes."""
    return sum(_room(chunk) for chunk in chunks)


class SnapshotWriter:
    """The memory of one snapshot, and the process that writes it.

    Must be made in the main thread: the process dies with the thread that started it.

    Args:
        nbytes: size of the memory; it is taken at once, and touched, so that copying is all that a
            snapshot costs.
        pinned: whether a GPU copies into it, which takes memory that stays where it is.
    """

    def __init__(self, nbytes: int, *, pinned: bool = False) -> None:
        self.nbytes = max(nbytes, mmap.PAGESIZE)
        descriptor = os.memfd_create("polyad-snapshot")
        try:
            os.ftruncate(descriptor, self.nbytes)
            memory = mmap.mmap(descriptor, self.nbytes)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # a kernel without them
                    memory.madvise(mmap.MADV_HUGEPAGE)
            self._bytes = torch.frombuffer(memory, dtype=torch.uint8).zero_()
            self._is_pinned = pinned and _pin(self._bytes)
            self._process = _start(descriptor)
        finally:
            os.close(descriptor)
        self._unread = b""
        self._copying: Copying | None = None
        """The copies of the last snapshot, until its answer is read."""

    @property
    def process_id(self) -> int:
        """The id of the writing process."""
        return self._process.pid

    def take(self, chunks: Sequence[Chunk], order: dict[str, Any], device: torch.device) -> None:
        """Begins to copy tensors; once all are there, orders the process to write them.

        What may change at any moment is copied before this returns. The rest a thread copies, and
        `settle` has to be called before anything changes it.

        Args:
            chunks: the tensors.
            order: is given `tensors`, where each came to lie, and what it is.
            device: of the model.
        """
        listed, later, at = [], [], 0
        for chunk in chunks:
            values = chunk.values.detach()
            nbytes = values.numel() * values.element_size()
            place = self._bytes[at : at + nbytes].view(values.dtype).view(values.shape)
            if chunk.by_optimizer:
                later.append(Pair(place, values))
            else:
                copy_tensor(place, values)
            dtype = DTYPE_NAMES[values.dtype]
            listed.append([at, chunk.entry().key, dtype, chunk.size, nbytes, chunk.piece()])
            at += _room(chunk)
        order = order | {"tensors": listed}
        self._copying = Copying(later, lambda: self.order(order), device)

    def settle(self) -> None:
        """Waits until all tensors are copied or copying has failed; `answer` tells of errors."""
        if self._copying is not None:
            self._copying.wait()

    def order(self, what: dict[str, Any]) -> None:
        """Tells the process what to do; `answer` gives what came of it."""
        pipe = self._process.stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps(what).encode() + b"\n")
            pipe.flush()
        except BrokenPipeError:
            pass  # it is dead, as the answer will say

    def answer(self, *, wait: bool) -> dict[str, Any] | None:
        """The answer to the last order; None if it is not there and was not waited for."""
        if self._copying is not None:
            if self._copying.running and not wait:
                return None
            if (error := self._copying.result()) is not None:
                return {"error": error}
            self._copying = None
        pipe = self._process.stdout
        assert pipe is not None
        arrival = select.poll()  # a large job has more descriptors than select can look at
        arrival.register(pipe, select.POLLIN)
        while b"\n" not in self._unread:
            if not wait and not arrival.poll(0):
                return None
            part = os.read(pipe.fileno(), 2**20)
            if not part:
                return {"error": f"its writing process ended with status {self._process.wait()}"}
            self._unread += part
        line, self._unread = self._unread.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self, *, kill: bool = False) -> None:
        """Ends the process, which has nothing to do, or is not to go on with it.

        After it returns, no tensor is read.
        """
        if self._copying is not None:
            self._copying.drop()
            self._copying.wait()
        if kill:
            self._process.kill()
        if self._copying is not None:  # it may have been giving the order
            self._copying.result()
            self._copying = None
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # an order that a dead process did not read
                pipe.close()
        self._process.wait()
        if self._is_pinned:  # before the memory is let go: CUDA would keep its pages
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
            self._is_pinned = False


def _start(descriptor: int) -> subprocess.Popen[bytes]:
    root = str(Path(polyad.__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([root, inherited] if inherited else [root])
    # -P: nothing is imported from wherever the run was started.
    command = [sys.executable, "-P", "-m", "polyad.parallel.checkpoint.snapshot_process"]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_TRAINER)  # inherited
    try:
        return subprocess.Popen(
            [*command, str(os.getpid()), str(descriptor)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[descriptor],
            env=os.environ | {"PYTHONPATH": path},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _pin(memory: torch.Tensor) -> bool:
    """Page-locks memory for a GPU; where the system allows no more, copies are slower."""
    register = torch.cuda.cudart().cudaHostRegister
    if not int(register(memory.data_ptr(), memory.numel(), 0)):
        return True
    line = f"{memory.numel() / 1e9:.1f} GB for snapshots cannot be page-locked"
    print(f"polyad: warning: {line}; they take longer", file=sys.stderr, flush=True)
    with contextlib.suppress(RuntimeError):  # CUDA keeps the error, and the next kernel has it
        torch.zeros(1, device="cuda")
    return False


def _room(chunk: Chunk) -> int:
    nbytes = chunk.values.numel() * chunk.values.element_size()
    return math.ceil(nbytes / ALIGNMENT) * ALIGNMENT
