"""Writes a safetensors file one tensor at a time."""

import json
import math
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

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
    """Called once, when its turn comes; what it gives is let go before the next."""


class WrittenTensor(NamedTuple):
    """A tensor in a file."""

    begin: int
    """First byte, counted from the beginning of the file."""
    crc32: int


class WrittenFile(NamedTuple):
    """A file, flushed to disk."""

    tensors: list[WrittenTensor]
    bytes: int
    crc32: int


def write_safetensors(
    path: Path, entries: Sequence[Entry], metadata: dict[str, str] | None = None
) -> WrittenFile:
    """Writes a safetensors file and waits until it is on the disk.

    Args:
        path: the file.
        entries: what it holds, in this order.
        metadata: for readers that ask for it.

    Returns:
        Where each tensor came to lie, and checksums.
    """
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for entry in entries:
        begin, end = end, end + math.prod(entry.shape) * entry.dtype.itemsize
        header[entry.key] = {
            "dtype": DTYPE_NAMES[entry.dtype], "shape": entry.shape, "data_offsets": [begin, end]
        }  # fmt: skip
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    written = []
    with path.open("wb") as file:
        whole = 0
        for part in (struct.pack("<Q", len(encoded)), encoded):
            file.write(part)
            whole = zlib.crc32(part, whole)
        for entry in entries:
            flat = entry.values().detach().cpu().contiguous().reshape(-1)
            assert (flat.numel(), flat.dtype) == (math.prod(entry.shape), entry.dtype)
            values = flat.view(torch.uint8).numpy().data
            written.append(WrittenTensor(file.tell(), zlib.crc32(values)))
            whole = zlib.crc32(values, whole)
            file.write(values)
            del flat, values  # or they would live on beside the next ones
        size = file.tell()
        file.flush()
        os.fsync(file.fileno())
    return WrittenFile(written, size, whole)
