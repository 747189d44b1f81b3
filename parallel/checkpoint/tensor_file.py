"""Writes a safetensors file of torch's tensors, one at a time."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from polyad.parallel.checkpoint.tensor_bytes import RawTensor, WrittenFile, write_tensors

# Names as safetensors has them.
DTYPE_NAMES = {
    torch.float32: "F32", torch.uint8: "U8", torch.int64: "I64", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A tensor that will be written."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    values: Callable[[], torch.Tensor]
    """Called once, when its turn comes; the result is freed before the next call."""

    def raw(self) -> RawTensor:
        """The entry with its values as bytes."""
        nbytes = math.prod(self.shape) * self.dtype.itemsize

        def data() -> memoryview:
            flat = self.values().detach().cpu().contiguous().reshape(-1)
            assert flat.dtype == self.dtype
            return flat.view(torch.uint8).numpy().data

        return RawTensor(self.key, DTYPE_NAMES[self.dtype], self.shape, nbytes, data)


def write_safetensors(
    path: Path, entries: Sequence[Entry], metadata: dict[str, str] | None = None
) -> WrittenFile:
    """Writes a safetensors file and waits until it is on the disk.

    Args:
        path: the file, which is not there yet.
        entries: what it holds, in this order.
        metadata: for readers that ask for it.

    Returns:
        Where each tensor came to lie, and digests.
    """
    return write_tensors(path, [entry.raw() for entry in entries], metadata)
