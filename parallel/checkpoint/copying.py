"""Copies tensors in a thread, while the process goes on computing."""

import ctypes
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

THREAD_NAME = "polyad-snapshot"


class Pair(NamedTuple):
    """A copy to make."""

    place: torch.Tensor
    """Contiguous memory of the host, of the type and shape of the values."""
    values: torch.Tensor


class Copying:
    """A thread that copies tensors and then does something with them.

    On a GPU it copies on a stream of its own, which first waits for the work that is queued on the
    current stream.

    Args:
        pairs: the copies. Nothing may change the values before `wait` returns.
        then: called in the thread once all is copied.
        device: of the values.
    """

    def __init__(
        self, pairs: Sequence[Pair], then: Callable[[], None], device: torch.device
    ) -> None:
        self._pairs, self._then = list(pairs), then
        self._error: str | None = None
        self._dropped = False
        self._copied = threading.Event()
        self._stream: AbstractContextManager[object] = nullcontext()
        if device.type == "cuda":
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            self._stream = torch.cuda.stream(stream)  # also sets the device of the thread
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether anything is left to do."""
        return self._thread.is_alive()

    def wait(self) -> None:
        """Waits until the copies are made or have failed; `result` gives the error."""
        self._copied.wait()

    def result(self) -> str | None:
        """Waits until all is done; gives the error in one line, if there was one."""
        self.wait()
        self._thread.join()
        return self._error

    def drop(self) -> None:
        """Cancels `then`, unless it has begun."""
        self._dropped = True

    def _run(self) -> None:
        try:
            try:
                with self._stream:
                    for place, values in self._pairs:
                        copy_tensor(place, values)
            finally:
                self._pairs.clear()
                self._copied.set()
            if not self._dropped:
                self._then()
        except Exception as error:  # the thread that waits tells all processes of it
            lines = str(error).splitlines() or [""]
            self._error = f"{type(error).__name__}: {lines[0]}"


def copy_tensor(place: torch.Tensor, values: torch.Tensor) -> None:
    """Copies a tensor to contiguous memory of the host; other threads run meanwhile."""
    if values.device.type == "cpu" and values.is_contiguous():
        # One thread is faster so than with copy_: libc does not read what it overwrites.
        nbytes = values.numel() * values.element_size()
        ctypes.memmove(place.data_ptr(), values.data_ptr(), nbytes)
    else:
        place.copy_(values)
