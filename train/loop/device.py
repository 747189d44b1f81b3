"""What is set once of a device before a model runs there, and read of it afterwards."""

from collections.abc import Iterator

import torch
from torch import Tensor

from parallel import comm
from train.loop.metrics import peak_memory_bytes


def allow_tf32(allowed: bool, device: torch.device) -> None:
    """Says how a GPU multiplies fp32 matrices from now on; does nothing to a CPU.

    Of torch's three ways this is the one that its compiler understands in every release: after
    `fp32_precision` alone, 2.10 and 2.13 end in an error where they ask for the older setting.

    Args:
        allowed: TF32, with a mantissa of 10 bits; otherwise fp32, with 23.
        device: of this process.
    """
    if device.type == "cuda":  # the same call would change oneDNN's products on a CPU
        torch.set_float32_matmul_precision("high" if allowed else "highest")


class Prefetch:
    """Hands out micro-batches on the device, with the next one on its way there.

    On a GPU the copy runs on a stream of its own, out of pinned memory, while the model computes.
    On a CPU there is nothing to copy, and reading one ahead is all that is left of it. Reading
    ahead moves no position in the data: where a run goes on follows from its step alone.

    Args:
        batches: tensors in order; in pinned memory for a GPU.
        device: where they are wanted.
    """

    def __init__(self, batches: Iterator[Tensor], device: torch.device) -> None:
        self._batches, self._device = batches, device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._begun = False
        self._ahead: Tensor | None = None
        self._end: Exception | None = None

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        """The next micro-batch.

        Raises:
            StopIteration: there is none; or the error of reading it, not before its turn: what was
                read before it is trained on first.
        """
        if not self._begun:
            self._begun = True
            self._fetch()
        if self._end is not None:
            raise self._end
        batch = self._ahead
        assert batch is not None
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            batch.record_stream(current)  # its memory is not free before the model has read it
        self._fetch()
        return batch

    def _fetch(self) -> None:
        try:
            batch = next(self._batches)
        except Exception as error:  # the end among them
            self._ahead, self._end = None, error
            return
        with torch.cuda.stream(self._stream):
            self._ahead = batch.to(self._device, non_blocking=True)


def memory_statistics(world: comm.World) -> dict[str, int | None]:
    """The most memory since the last call, of the process that took the most. All call it together.

    Args:
        world: this process.

    Returns:
        `memory_bytes`: held by tensors on the GPU; on a CPU all of the process, since its start.
        `memory_reserved_bytes`: taken from the GPU, with the allocator's reserve; None on a CPU.
    """
    on_gpu = world.device.type == "cuda"
    reserved = torch.cuda.max_memory_reserved(world.device) if on_gpu else 0
    here = torch.tensor([peak_memory_bytes(world.device), reserved], dtype=torch.int64)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(world.device)
    held, reserved = comm.max_over_ranks(here.to(world.device)).tolist()
    return {"memory_bytes": held, "memory_reserved_bytes": reserved if on_gpu else None}
