"""Snapshots: copies of what a rank writes, made in a thread while training continues."""

import contextlib
import math
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch

from polyad.data.errors import say
from polyad.parallel.checkpoint.format import Box, NotFiniteError
from polyad.parallel.checkpoint.manage import reason_of

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
