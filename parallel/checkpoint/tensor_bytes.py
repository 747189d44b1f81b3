"""Writes a safetensors file from bytes, one tensor at a time.

Imports no torch: the process that writes snapshots starts with it.
"""

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from polyad.parallel.checkpoint.manifest import PIECE_BYTES, BlockDigests, FileRecord
from polyad.parallel.checkpoint.storage import write_file


@dataclass(frozen=True)
class RawTensor:
    """A tensor that will be written."""

    key: str
    dtype: str
    """The type, as safetensors names it."""
    shape: tuple[int, ...]
    nbytes: int
    data: Callable[[], Any]
    """Returns its bytes, or any flat buffer of them; called once, when its turn comes. The result
    is freed before the next call."""


class WrittenTensor(NamedTuple):
    """A tensor in a file."""

    begin: int
    """First byte, counted from the beginning of the file."""
    xxh3: str


class WrittenFile(NamedTuple):
    """A file whose content is on the disk."""

    tensors: list[WrittenTensor]
    record: FileRecord


def write_tensors(
    path: Path, tensors: Sequence[RawTensor], metadata: dict[str, str] | None = None
) -> WrittenFile:
    """Writes a safetensors file and waits until it is on the disk.

    Args:
        path: the file, which is not there yet.
        tensors: what it holds, in this order.
        metadata: for readers that ask for it.

    Returns:
        Where each tensor came to lie, and digests.
    """
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.nbytes
        header[tensor.key] = {
            "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]
        }  # fmt: skip
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    written: list[WrittenTensor] = []
    blocks = BlockDigests()

    def parts() -> Iterator[memoryview]:
        position = 8 + len(encoded)
        yield memoryview(struct.pack("<Q", len(encoded)) + encoded)
        for tensor in tensors:
            data = memoryview(tensor.data())
            assert data.nbytes == tensor.nbytes
            whole = xxhash.xxh3_64()
            for first in range(0, len(data), PIECE_BYTES):
                piece = data[first : first + PIECE_BYTES]
                whole.update(piece)
                yield piece
            written.append(WrittenTensor(position, whole.hexdigest()))
            position += tensor.nbytes
            del data  # or it would stay in memory beside the next one

    def digested() -> Iterator[memoryview]:
        for part in parts():
            blocks.update(part)
            yield part

    write_file(path, digested())
    return WrittenFile(written, blocks.record())


def all_finite(data: memoryview) -> bool:
    """Whether no number is NaN or infinite.

    Args:
        data: of fp32 numbers.
    """
    numbers = np.frombuffer(data, "<f4")
    count = PIECE_BYTES // numbers.itemsize
    with np.errstate(all="ignore"):
        for first in range(0, len(numbers), count):
            some = numbers[first : first + count]
            # A sum is quick, and finite only of finite numbers; of finite ones it may overflow.
            if not np.isfinite(some.sum()) and not np.isfinite(some).all():
                return False
    return True
