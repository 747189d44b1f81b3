"""`index.json` of a checkpoint: its tensors, and in which file each piece of them is.

The index is compared with the headers of the files before any tensor is read.
Imports no torch.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from polyad.parallel.checkpoint.box import BUFFER, MASTER, RANDOM
from polyad.parallel.checkpoint.records import (
    ITEM_BYTES,
    Count,
    FormError,
    PlainName,
    Record,
    parsed,
)

_LARGEST_HEADER = 100_000_000
"""Bytes; safetensors itself refuses more."""
_MOST_COMPARISONS = 10**8
"""Comparisons between pieces of one tensor: more than any layout needs, done in a second."""

Shape = Annotated[tuple[Count, ...], Field(max_length=64)]


class Chunk(Record):
    """A box of a tensor, which lies in a file as its elements in row-major order."""

    offset: Shape
    size: Shape
    step: Annotated[float, Field(ge=0)]
    """Optimizer steps that the parameter has seen."""
    file: PlainName
    begin: Count
    """First byte, counted from the beginning of the file."""
    xxh3: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")] | None = None
    crc32: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    """In format version 1, in place of `xxh3`."""

    def digest(self, algorithm: str) -> str | int | None:
        """The digest of its bytes."""
        return self.crc32 if algorithm == "crc32" else self.xxh3


class Tensor(Record):
    """One field of a tensor: its global shape, and boxes that cover it once."""

    shape: Shape
    dtype: Literal["F32", "U8", "I64", "BOOL"]
    chunks: Annotated[tuple[Chunk, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _covered(self) -> "Tensor":
        if math.prod(self.shape) * ITEM_BYTES[self.dtype] >= 2**63:
            raise ValueError("its shape has more elements than can be counted")
        for number, chunk in enumerate(self.chunks):
            if not len(chunk.offset) == len(chunk.size) == len(self.shape) or any(
                first + count > whole
                for first, count, whole in zip(chunk.offset, chunk.size, self.shape, strict=True)
            ):
                raise ValueError(
                    f"chunk {number} at {list(chunk.offset)} of size {list(chunk.size)} is not "
                    f"inside the shape {list(self.shape)}"
                )
        covered = sum(math.prod(chunk.size) for chunk in self.chunks)
        if covered != math.prod(self.shape) or _overlap([c for c in self.chunks if all(c.size)]):
            raise ValueError(f"its chunks do not cover the shape {list(self.shape)} exactly once")
        return self

    def bytes_of(self, chunk: Chunk) -> int:
        """The bytes that one of its chunks takes."""
        return math.prod(chunk.size) * ITEM_BYTES[self.dtype]


class Index(Record):
    """The whole file."""

    tensors: Annotated[dict[str, dict[str, Tensor]], Field(min_length=1)]
    """Tensors by name and field."""

    @model_validator(mode="after")
    def _fields_agree(self) -> "Index":
        for name, fields in self.tensors.items():
            steps = {
                chunk.step
                for field, tensor in fields.items()
                for chunk in tensor.chunks
                if field not in (BUFFER, RANDOM)
            }
            if len(steps) > 1:
                raise ValueError(f"{name}: its chunks are of steps {min(steps)} and {max(steps)}")
            for field, tensor in fields.items():
                wanted = {BUFFER: tensor.dtype, RANDOM: "U8"}.get(field, "F32")
                if tensor.dtype != wanted:
                    raise ValueError(f"{name}: {field} is {tensor.dtype}, {wanted} is needed")
                if field == RANDOM and len(tensor.shape) != 1:
                    raise ValueError(f"{name}: {field} has shape {list(tensor.shape)}")
                others = fields.get(MASTER, tensor)
                if field not in (BUFFER, RANDOM) and tensor.shape != others.shape:
                    raise ValueError(
                        f"{name}: {field} has shape {list(tensor.shape)}, {MASTER} "
                        f"{list(others.shape)}"
                    )
        return self


class HeaderTensor(Record):
    """What the header of a safetensors file says of a tensor."""

    dtype: str
    shape: tuple[Count, ...]
    data_offsets: tuple[Count, Count]
    """First byte and the one after the last, counted from the end of the header."""


class Header:
    """The header of a safetensors file, whose tensors lie inside the file.

    Args:
        path: the file, a regular one.
        nbytes: its size.

    Raises:
        FormError: it is not a safetensors file.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        with path.open("rb") as file:
            head = file.read(9)
            length = int.from_bytes(head[:8], "little")
            if len(head) < 9 or length > nbytes - 8 or head[8:] != b"{":
                pickled = head.startswith((b"PK\x03\x04", b"\x80"))
                what = "a pickle, which could run code" if pickled else "no safetensors file"
                raise FormError(f"it is {what}")
            if length > _LARGEST_HEADER:
                raise FormError(f"its header has {length:,} bytes")
            content = head[8:] + file.read(length - 1)
        kind = dict[str, HeaderTensor | dict[str, str]]
        try:
            listed: dict[str, HeaderTensor | dict[str, str]] = parsed(kind, content)
        except FormError as error:
            raise FormError(f"its header: {error}") from None
        self._start = 8 + length
        self._tensors = {n: t for n, t in listed.items() if isinstance(t, HeaderTensor)}
        before = 0
        for first, last in sorted(tensor.data_offsets for tensor in self._tensors.values()):
            if not before <= first <= last <= nbytes - self._start:
                raise FormError(f"its header: a tensor at {first:,} to {last:,} cannot be there")
            before = last

    def fault(self, key: str, dtype: str, size: tuple[int, ...], begin: int) -> str | None:
        """How a tensor of the file differs from what an index says; None if it does not.

        Args:
            key: its name in the file.
            dtype: as safetensors names it.
            size: its shape.
            begin: its first byte in the file.
        """
        found = self._tensors.get(key)
        if found is None:
            return "is not in that file"
        first, last = found.data_offsets
        if found.dtype != dtype or found.shape != size:
            return f"is {found.dtype} {list(found.shape)} in that file"
        if first + self._start != begin:
            return f"begins at byte {first + self._start:,} of that file"
        if last - first != math.prod(size) * ITEM_BYTES[dtype]:
            return f"has {last - first:,} bytes there"
        return None


def check_index(index: Index, headers: Mapping[str, Header], algorithm: str) -> None:
    """Compares an index with the files: each chunk must be a tensor of its file, at its place.

    Args:
        index: of a checkpoint.
        headers: of its tensor files, by name.
        algorithm: of digests in this version of the format.

    Raises:
        FormError: the first chunk that is not.
    """
    for name, fields in index.tensors.items():
        for field, tensor in fields.items():
            for chunk in tensor.chunks:
                where = f"the chunk at {list(chunk.offset)} of {field} of {name}"
                header = headers.get(chunk.file)
                if header is None:
                    raise FormError(
                        f"{where}: {chunk.file!r} is no tensor file that the manifest lists"
                    )
                key = f"{name}/{field}/{','.join(map(str, chunk.offset))}"
                if fault := header.fault(key, tensor.dtype, chunk.size, chunk.begin):
                    raise FormError(
                        f"{where}: {tensor.dtype} {list(chunk.size)} at byte {chunk.begin:,} of "
                        f"{chunk.file}: {fault}"
                    )
                if chunk.digest(algorithm) is None:
                    raise FormError(f"{where}: has no {algorithm}")


def _overlap(chunks: Sequence[Chunk]) -> bool:
    """Whether two of these boxes share an element; none is empty, and all have as many axes."""
    if len(chunks) < 2:
        return False
    if not chunks[0].size:  # a single number, twice
        return True
    low_CA = np.array([chunk.offset for chunk in chunks], dtype=np.int64)
    high_CA = low_CA + np.array([chunk.size for chunk in chunks], dtype=np.int64)
    # Along the axis that tells most of them apart, few others reach into a box.
    axis = max(range(low_CA.shape[1]), key=lambda each: len(np.unique(low_CA[:, each])))
    order = np.argsort(low_CA[:, axis], kind="stable")
    low_CA, high_CA = low_CA[order], high_CA[order]
    stops = np.searchsorted(low_CA[:, axis], high_CA[:, axis])
    starts = np.arange(len(chunks)) + 1
    if int(np.maximum(stops - starts, 0).sum()) > _MOST_COMPARISONS:
        return True
    for number in np.flatnonzero(stops > starts):
        rest = slice(number + 1, stops[number])
        meets = (low_CA[rest] < high_CA[number]) & (high_CA[rest] > low_CA[number])
        if meets.all(axis=1).any():
            return True
    return False
