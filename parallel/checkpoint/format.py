"""The format of a checkpoint's files: `manifest.json`, `index.json`, `state.json`, and headers.

`../CHECKPOINTS.md` describes the format. Untrusted values are validated here; `verification.py`
checks the files against each other. Does not import torch, so that `polyad checkpoint` is fast.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import xxhash
from pydantic import ConfigDict, Field, model_validator

from polyad.parallel.checkpoint.box import BUFFER, MASTER, RANDOM
from polyad.parallel.records import Count, FormError, PlainName, Record, parsed

FORMAT, FORMAT_VERSION = "polyad-checkpoint", 2
MANIFEST_FILE, INDEX_FILE = "manifest.json", "index.json"
STATE_FILE, CONFIG_FILE = "state.json", "config.yaml"
BLOCK_BYTES = 64 * 2**20
PIECE_BYTES = 2**20
"""Bytes that are read, digested and written at a time: such a piece fits into a core's cache."""
ITEM_BYTES = {"F32": 4, "U8": 1, "I64": 8, "BOOL": 1}
"""Bytes per element, by safetensors' names of the dtypes in a checkpoint."""
_LARGEST_HEADER = 100_000_000
"""Maximum header size in bytes, which is also safetensors' limit."""
_MOST_COMPARISONS = 10**8
"""Maximum comparisons between boxes of one tensor: more than any layout needs, takes a second."""
_YEAR_10000 = 253_402_300_800.0

Shape = Annotated[tuple[Count, ...], Field(max_length=64)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
"""XXH3's 64 bits in hexadecimal."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: a one-line error with its name and the reason."""

    exit_status = 2


class DamagedCheckpoint(CheckpointError):
    """A checkpoint that differs from what was written; an older one may be intact."""


def damaged(path: Path, what: str) -> DamagedCheckpoint:
    """Returns the error for a damaged file of a checkpoint."""
    return DamagedCheckpoint(f"{path}: damaged: {what}")


def digest(data: Any) -> str:
    """Returns the digest of bytes, or of a buffer."""
    return xxhash.xxh3_64_hexdigest(data)


class FileRecord(Record):
    """A manifest's entry for a file."""

    bytes: Count
    xxh3: tuple[Digest, ...]
    """The digest of each block."""


class ManifestHead(Record):
    """The keys of manifests of all versions."""

    model_config = ConfigDict(extra="ignore")

    format: str
    version: Annotated[int, Field(ge=1)]


class ManifestFile(Record):
    """The whole content of `manifest.json`."""

    format: str
    version: Literal[2]
    step: Count
    block_bytes: Annotated[Count, Field(ge=1)]
    files: dict[PlainName, FileRecord]
    xxh3: str
    """The digest of everything that precedes it in the file."""

    @model_validator(mode="after")
    def _all_blocks(self) -> "ManifestFile":
        for name, file in self.files.items():
            blocks = max(1, -(-file.bytes // self.block_bytes))
            if len(file.xxh3) != blocks:
                raise ValueError(
                    f"{name}: {len(file.xxh3)} digests for {file.bytes:,} bytes, {blocks} are "
                    f"needed"
                )
        return self


def render(step: int, files: dict[str, FileRecord]) -> bytes:
    """Returns the bytes of a manifest, which end in a digest of the preceding ones.

    Args:
        step: number of completed optimizer steps.
        files: all other files of the checkpoint.
    """
    tree = {
        "format": FORMAT, "version": FORMAT_VERSION, "step": step, "block_bytes": BLOCK_BYTES,
        "files": {name: record.model_dump() for name, record in files.items()},
    }  # fmt: skip
    body = json.dumps(tree, indent=1)[:-2].encode()
    return body + f',\n "xxh3": "{digest(body)}"\n}}\n'.encode()


class StoredBox(Record):
    """A box stored in a file, its elements in row-major order."""

    offset: Shape
    size: Shape
    step: Annotated[float, Field(ge=0)]
    """Number of optimizer steps of the parameter."""
    file: PlainName
    begin: Count
    """First byte, from the beginning of the file."""
    xxh3: Digest


class StoredTensor(Record):
    """One field of a tensor: its global shape, and boxes that cover it exactly once."""

    shape: Shape
    dtype: Literal["F32", "U8", "I64", "BOOL"]
    chunks: Annotated[tuple[StoredBox, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _covered(self) -> "StoredTensor":
        if math.prod(self.shape) * ITEM_BYTES[self.dtype] >= 2**63:
            raise ValueError("its shape has more elements than can be counted")
        for number, box in enumerate(self.chunks):
            if not len(box.offset) == len(box.size) == len(self.shape) or any(
                first + count > whole
                for first, count, whole in zip(box.offset, box.size, self.shape, strict=True)
            ):
                raise ValueError(
                    f"chunk {number} at {list(box.offset)} of size {list(box.size)} is not "
                    f"inside the shape {list(self.shape)}"
                )
        covered = sum(math.prod(box.size) for box in self.chunks)
        if covered != math.prod(self.shape) or _overlap([b for b in self.chunks if all(b.size)]):
            raise ValueError(f"its chunks do not cover the shape {list(self.shape)} exactly once")
        return self

    def bytes_of(self, box: StoredBox) -> int:
        """Returns the size in bytes of one of its boxes."""
        return math.prod(box.size) * ITEM_BYTES[self.dtype]


class Index(Record):
    """The whole content of `index.json`."""

    tensors: Annotated[dict[str, dict[str, StoredTensor]], Field(min_length=1)]
    """Tensors by name and field."""

    @model_validator(mode="after")
    def _fields_agree(self) -> "Index":
        for name, fields in self.tensors.items():
            steps = {
                box.step
                for field, tensor in fields.items()
                for box in tensor.chunks
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


def _overlap(boxes: Sequence[StoredBox]) -> bool:
    """Returns whether two non-empty boxes with equal numbers of axes share an element."""
    if len(boxes) < 2:
        return False
    if not boxes[0].size:  # scalars, twice
        return True
    low_CA = np.array([box.offset for box in boxes], dtype=np.int64)
    high_CA = low_CA + np.array([box.size for box in boxes], dtype=np.int64)
    # Along the axis that separates most of them, few others overlap a box.
    axis = max(range(low_CA.shape[1]), key=lambda each: len(np.unique(low_CA[:, each])))
    order = np.argsort(low_CA[:, axis], kind="stable")
    low_CA, high_CA = low_CA[order], high_CA[order]
    stops = np.searchsorted(low_CA[:, axis], high_CA[:, axis])
    starts = np.arange(len(boxes)) + 1
    if int(np.maximum(stops - starts, 0).sum()) > _MOST_COMPARISONS:
        return True
    for number in np.flatnonzero(stops > starts):
        rest = slice(number + 1, stops[number])
        meets = (low_CA[rest] < high_CA[number]) & (high_CA[rest] > low_CA[number])
        if meets.all(axis=1).any():
            return True
    return False


class _HeaderTensor(Record):
    """The entry of a tensor in a file's header."""

    dtype: str
    shape: tuple[Count, ...]
    data_offsets: tuple[Count, Count]
    """First byte and one past the last, from the end of the header."""


class Header:
    """The header of a safetensors file whose tensors all lie inside the file.

    Args:
        path: a regular file.
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
                what = "a pickle, which could run code" if pickled else "not a safetensors file"
                raise FormError(f"it is {what}")
            if length > _LARGEST_HEADER:
                raise FormError(f"its header has {length:,} bytes")
            content = head[8:] + file.read(length - 1)
        kind = dict[str, _HeaderTensor | dict[str, str]]
        try:
            listed: dict[str, _HeaderTensor | dict[str, str]] = parsed(kind, content)
        except FormError as error:
            raise FormError(f"its header: {error}") from None
        self._start = 8 + length
        self._tensors = {n: t for n, t in listed.items() if isinstance(t, _HeaderTensor)}
        before = 0
        for first, last in sorted(tensor.data_offsets for tensor in self._tensors.values()):
            if not before <= first <= last <= nbytes - self._start:
                raise FormError(f"its header: a tensor at {first:,} to {last:,} cannot be there")
            before = last

    def fault(self, key: str, dtype: str, size: tuple[int, ...], begin: int) -> str | None:
        """Describes how a tensor of the file differs from the index; None if it does not.

        Args:
            key: its name in the file.
            dtype: its dtype, as safetensors names it.
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


Measured = Annotated[float, Field(allow_inf_nan=True)]
"""A measurement of a step; NaN or infinite if the step was not finite."""
Norm = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(ge=0)]


class StepRecord(Record):
    """The record of a step in `metrics.jsonl`, which has further keys."""

    model_config = ConfigDict(extra="allow")

    step: Annotated[Count, Field(ge=1)]
    loss: Measured
    grad_norm: Measured
    learning_rate: float
    step_seconds: Seconds
    mfu: float | None
    skipped: bool
    skipped_steps: Count

    @model_validator(mode="after")
    def _others(self) -> "StepRecord":
        for name, value in (self.__pydantic_extra__ or {}).items():
            if isinstance(value, list):
                good = name.count("/") != 1 and all(map(_is_number, value))
            elif isinstance(value, dict):
                good = "/" not in name
            else:
                good = _is_number(value)
            if not good:
                raise ValueError(f"{name!r:.60} is not what a record of a step has")
        return self


def _is_number(value: Any) -> bool:
    if isinstance(value, int):
        return abs(value) < 2**63
    return isinstance(value, float)


class State(Record):
    """The whole content of `state.json`; older checkpoints lack some keys, newer ones have more.

    `polyad.train.state.TrainState` documents the keys.
    """

    model_config = ConfigDict(extra="allow")

    step: Count = 0
    samples: Count = 0
    tokens: Count = 0
    """The count of language modelling; other tasks have their own key."""
    skipped_steps: Count = 0
    skipped_in_a_row: Count = 0
    recent_losses: tuple[float, ...] = ()
    recent_grad_norms: tuple[Norm, ...] = ()
    spikes: Count = 0
    spikes_in_a_row: Count = 0
    left_out: tuple[Count, ...] = ()
    unfinished: StepRecord | None = None
    best_score: float | None = None
    best_step: Count = 0
    validations_since_best: Count = 0
    first_loss: Measured | None = None
    seconds: Seconds = 0.0
    data_fingerprint: str = ""
    tokenizer_fingerprint: str | None = None
    end_of_text: str | None = None
    base_digest: str | None = None
    teacher_step: Count | None = None
    vocab_size: Count = 0
    world_size: Annotated[Count, Field(ge=1)] = 1
    versions: dict[str, str] = Field(default_factory=dict)
    saved_at: Annotated[float, Field(ge=0, lt=_YEAR_10000)] | None = None
    huggingface: dict[str, Any] | None = None
    """The `Origin` of initial weights from another library's folder, as JSON."""

    @model_validator(mode="after")
    def _agree(self) -> "State":
        if len(self.recent_losses) != len(self.recent_grad_norms):
            raise ValueError(
                f"recent_losses has {len(self.recent_losses)} numbers, recent_grad_norms "
                f"{len(self.recent_grad_norms)}"
            )
        if self.unfinished is not None and self.unfinished.step != self.step:
            raise ValueError(f"unfinished.step is {self.unfinished.step}, step is {self.step}")
        return self
