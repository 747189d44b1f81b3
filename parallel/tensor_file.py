"""Writes a safetensors file tensor by tensor, and digests it; maps the tensors of a file."""

import json
import math
import struct
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from polyad.parallel.checkpoint.format import PIECE_BYTES, FileRecord
from polyad.parallel.checkpoint.manage import write_file

DTYPE_NAMES = {
    torch.float32: "F32", torch.uint8: "U8", torch.int64: "I64", torch.bool: "BOOL",
    torch.bfloat16: "BF16", torch.float16: "F16",
}  # fmt: skip
"""Dtypes of tensors, as safetensors names them."""
TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def mapped(path: Path, dtype: str, shape: Sequence[int], begin: int) -> torch.Tensor:
    """Returns a tensor of a file as a view of it; the file is mapped as long as a view exists.

    safetensors' own mapping reserves memory for a copy, which a large file may not get.

    Args:
        path: the file.
        dtype: the dtype, as safetensors names it.
        shape: the shape.
        begin: its first byte in the file.

    Returns:
        The tensor; writing to it would end the process.

    Raises:
        OSError, ValueError: the file cannot be read, or ends earlier.
    """
    nbytes = math.prod(shape) * TORCH_DTYPES[dtype].itemsize
    if not nbytes:
        return torch.empty(tuple(shape), dtype=TORCH_DTYPES[dtype])
    content = np.memmap(path, np.uint8, "r", begin, (nbytes,))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(content).view(TORCH_DTYPES[dtype]).view(tuple(shape))


class FileTensor(NamedTuple):
    """A tensor to write."""

    key: str
    """Its name in the file."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    values: Callable[[], torch.Tensor]
    """Called once, when the tensor is written; the result is freed before the next call."""

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def data(self) -> memoryview:
        """Returns its values as bytes."""
        flat = self.values().detach().cpu().contiguous().reshape(-1)
        assert flat.dtype == self.dtype
        data: memoryview = flat.view(torch.uint8).numpy().data
        assert data.nbytes == self.nbytes
        return data


def write_tensors(
    path: Path,
    tensors: Sequence[FileTensor],
    metadata: dict[str, str] | None = None,
    *,
    check: Callable[[int, memoryview], None] = lambda number, piece: None,
) -> tuple[list[int], FileRecord]:
    """Writes a safetensors file and waits until it is on disk.

    Args:
        path: the file, which must not exist.
        tensors: its tensors in order; one is in memory at a time.
        metadata: metadata for readers.
        check: called with the number of a tensor and some of its bytes before they are written.

    Returns:
        The first byte of each tensor, from the beginning of the file, and the file's record.
    """
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    ends = list(accumulate((tensor.nbytes for tensor in tensors), initial=0))
    for tensor, begin, end in zip(tensors, ends, ends[1:], strict=False):
        header[tensor.key] = {
            "dtype": DTYPE_NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": [begin, end]
        }  # fmt: skip
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    head = memoryview(struct.pack("<Q", len(encoded)) + encoded)
    digest = xxhash.xxh3_64()

    def pieces() -> Iterator[memoryview]:
        digest.update(head)
        yield head
        for number, tensor in enumerate(tensors):
            data = tensor.data()
            for first in range(0, len(data), PIECE_BYTES):
                piece = data[first : first + PIECE_BYTES]
                check(number, piece)
                digest.update(piece)
                yield piece
            del data  # else it would stay in memory together with the next one

    write_file(path, pieces())
    begins = [len(head) + begin for begin in ends[:-1]]
    return begins, FileRecord(bytes=len(head) + ends[-1], xxh3=digest.hexdigest())
