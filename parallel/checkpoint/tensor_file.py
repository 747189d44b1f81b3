"""Writes a safetensors file tensor by tensor, and digests it."""

import json
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash

from polyad.parallel.checkpoint.format import BLOCK_BYTES, PIECE_BYTES, FileRecord
from polyad.parallel.checkpoint.storage import write_file

DTYPE_NAMES = {
    torch.float32: "F32", torch.uint8: "U8", torch.int64: "I64", torch.bool: "BOOL",
    torch.bfloat16: "BF16", torch.float16: "F16",
}  # fmt: skip
"""Dtypes of tensors, as safetensors names them."""


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


class WrittenFile(NamedTuple):
    """A file whose content is on disk."""

    begins: list[int]
    """The first byte of each tensor, from the beginning of the file."""
    digests: list[str]
    """The digest of each tensor."""
    record: FileRecord


class BlockDigests:
    """Digests the blocks of a file from consecutive pieces."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._current, self._room, self._bytes = xxhash.xxh3_64(), BLOCK_BYTES, 0

    def update(self, piece: memoryview) -> None:
        """Adds the next piece, of any size."""
        self._bytes += len(piece)
        while len(piece):
            here, piece = piece[: self._room], piece[self._room :]
            self._current.update(here)
            self._room -= len(here)
            if not self._room:
                self._done.append(self._current.hexdigest())
                self._current, self._room = xxhash.xxh3_64(), BLOCK_BYTES

    def record(self) -> FileRecord:
        """Returns the record of the pieces so far."""
        last = [self._current.hexdigest()] if self._room < BLOCK_BYTES or not self._done else []
        return FileRecord(bytes=self._bytes, xxh3=(*self._done, *last))


def record_of(content: bytes) -> FileRecord:
    """Returns the record of a small file."""
    blocks = BlockDigests()
    blocks.update(memoryview(content))
    return blocks.record()


def write_tensors(
    path: Path,
    tensors: Sequence[FileTensor],
    metadata: dict[str, str] | None = None,
    *,
    check: Callable[[int, memoryview], None] = lambda number, piece: None,
) -> WrittenFile:
    """Writes a safetensors file and waits until it is on disk.

    Args:
        path: the file, which must not exist.
        tensors: its tensors in order; one is in memory at a time.
        metadata: metadata for readers.
        check: called with the number of a tensor and some of its bytes before they are written.

    Returns:
        The position of each tensor, and digests.
    """
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.nbytes
        header[tensor.key] = {
            "dtype": DTYPE_NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": [begin, end]
        }  # fmt: skip
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    begins: list[int] = []
    digests: list[str] = []
    blocks = BlockDigests()

    def pieces() -> Iterator[memoryview]:
        position = 8 + len(encoded)
        yield memoryview(struct.pack("<Q", len(encoded)) + encoded)
        for number, tensor in enumerate(tensors):
            data, whole = tensor.data(), xxhash.xxh3_64()
            for first in range(0, len(data), PIECE_BYTES):
                piece = data[first : first + PIECE_BYTES]
                check(number, piece)
                whole.update(piece)
                yield piece
            begins.append(position)
            digests.append(whole.hexdigest())
            position += tensor.nbytes
            del data  # else it would stay in memory together with the next one

    def digested() -> Iterator[memoryview]:
        for piece in pieces():
            blocks.update(piece)
            yield piece

    write_file(path, digested())
    return WrittenFile(begins, digests, blocks.record())
