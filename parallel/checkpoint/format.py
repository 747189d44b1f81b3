"""The files of a checkpoint: `manifest.json`, `index.json`, `state.json`, and tensors in boxes.

`../README.md` describes the format. Every file has one digest, in the manifest. Does not
import torch, so that `polyad checkpoint` is fast.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

MASTER, EMA, BUFFER, RANDOM = "master", "ema", "buffer", "random"
"""Fields: a weight in fp32, its moving average, a buffer, a random generator's state. All other
fields are the optimizer's."""
OF_WEIGHTS = (MASTER, EMA)
"""Fields that start as the weights: a source without averages returns the weights for them."""
FORMAT, FORMAT_VERSION = "polyad-checkpoint", 3
MANIFEST_FILE, INDEX_FILE = "manifest.json", "index.json"
STATE_FILE, CONFIG_FILE = "state.json", "config.yaml"
PIECE_BYTES = 2**20
"""Bytes that are read, digested and written at a time: such a piece fits into a core's cache."""

_SELF = re.compile(rb',\n "xxh3": "([0-9a-f]{16})"\n}\n\Z')
_VERSION = re.compile(rb'{\s*"format": "polyad-checkpoint",\s*"version": (\d+)')


class Record(BaseModel):
    """The base class of what JSON files hold: nothing is converted, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def fault_of(error: ValidationError) -> str:
    """Returns the first fault that pydantic found, on one line: key, value, what is expected."""
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return "is not JSON: " + first["msg"].removeprefix("Invalid JSON: ")
    where = ".".join(str(part) for part in first["loc"] if part != "[key]")
    if first["type"] == "missing":
        return f"{where}: is missing"
    text = first["msg"].removeprefix("Value error, ")
    return f"{where}: {first['input']!r:.60}: {text}".removeprefix(": ")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: a one-line error with its name and the reason."""

    exit_status = 2


class DamagedCheckpoint(CheckpointError):
    """A checkpoint that differs from what was written; an older one may be intact."""


class NotFiniteError(RuntimeError):
    """Weights that hold NaN or inf: one line that names the first such tensor."""

    exit_status = 1


def damaged(path: Path, what: str) -> DamagedCheckpoint:
    """Returns the error for a damaged file of a checkpoint."""
    return DamagedCheckpoint(f"{path}: damaged: {what}")


class Box(NamedTuple):
    """A box of one field of a global tensor, independent of the layout: the unit in which sources
    are read and checkpoints are stored."""

    name: str
    """The name of the parameter or buffer."""
    field: str
    shape: tuple[int, ...]
    """The shape of the whole tensor, without padding."""
    offset: tuple[int, ...]
    """The position of the first element."""
    size: tuple[int, ...]

    @classmethod
    def whole(cls, name: str, field: str, shape: tuple[int, ...]) -> "Box":
        """Returns the box that is a whole tensor."""
        return cls(name, field, shape, (0,) * len(shape), shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that selects the box in the whole tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.offset, self.size, strict=True))

    @property
    def key(self) -> str:
        """The name of the box in a tensor file."""
        return f"{self.name}/{self.field}/{','.join(map(str, self.offset))}"


class FileRecord(Record):
    """A manifest's entry for a file."""

    bytes: int
    xxh3: str
    """The digest of the file: XXH3's 64 bits in hexadecimal."""


class Manifest(Record):
    """The whole content of `manifest.json`."""

    format: Literal["polyad-checkpoint"]
    version: int
    step: int
    """Number of completed optimizer steps."""
    files: dict[str, FileRecord]
    """All other files of the checkpoint."""
    xxh3: str
    """The digest of everything that precedes it in the file."""


class StoredBox(Record):
    """A box stored in a file, its elements in row-major order."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    step: float
    """Number of optimizer steps of the parameter."""
    file: str
    begin: int
    """First byte, from the beginning of the file."""


class StoredTensor(Record):
    """One field of a tensor: its global shape, and boxes that cover it exactly once."""

    shape: tuple[int, ...]
    dtype: Literal["F32", "U8", "I64", "BOOL"]
    chunks: tuple[StoredBox, ...]


class Index(Record):
    """The whole content of `index.json`."""

    tensors: dict[str, dict[str, StoredTensor]]
    """Tensors by name and field."""


class State(Record):
    """The keys of `state.json` that are read by themselves.

    `polyad.train.state.TrainState` adds the others.
    """

    model_config = ConfigDict(extra="allow", allow_inf_nan=True)

    step: int = 0
    unfinished: dict[str, Any] | None = None
    """The record of a step whose validation is pending."""
    data_fingerprint: str = ""
    tokenizer_fingerprint: str | None = None
    end_of_text: str | None = None
    """The token that ends each document of the data."""
    base_digest: str | None = None
    """A digest of the frozen weights in a run with LoRA."""
    teacher_step: int | None = None
    """The step of the teacher's checkpoint, if there is one."""
    world_size: int = 1
    """Number of processes that wrote this."""
    saved_at: float | None = None
    huggingface: dict[str, Any] | None = None
    """The `Origin` of initial weights from another library's folder, as JSON."""


@dataclass(frozen=True)
class Contents:
    """The small files of a checkpoint, verified; its tensors are verified by `verify`."""

    folder: Path
    step: int
    files: dict[str, FileRecord]
    tensors: dict[str, dict[str, StoredTensor]]
    """Tensors by name and field."""
    state: State
    config_yaml: str
    """The text, not parsed: `train` and `model` know its keys."""

    def verify(
        self,
        names: Iterable[str] | None = None,
        report: Callable[[int], None] = lambda done: None,
    ) -> None:
        """Reads files and compares their digests.

        Args:
            names: some of `files`; None for all.
            report: called with the number of bytes verified so far.

        Raises:
            DamagedCheckpoint: the first file that differs or cannot be read.
        """
        done = 0
        for name in self.files if names is None else names:
            running, path = xxhash.xxh3_64(), self.folder / name
            try:
                with path.open("rb", buffering=0) as file:
                    while piece := file.read(PIECE_BYTES):
                        running.update(piece)
                        done += len(piece)
                        report(done)
            except OSError as error:
                raise damaged(path, f"cannot be read: {error.strerror}") from None
            if running.hexdigest() != self.files[name].xxh3:
                raise damaged(path, "its xxh3 differs from the manifest's")


def record_of(content: bytes) -> FileRecord:
    """Returns the record of a small file."""
    return FileRecord(bytes=len(content), xxh3=xxhash.xxh3_64_hexdigest(content))


def render(step: int, files: dict[str, FileRecord]) -> bytes:
    """Returns the bytes of a manifest.

    Args:
        step: number of completed optimizer steps.
        files: all other files of the checkpoint.
    """
    listed = {name: record.model_dump() for name, record in files.items()}
    tree = {"format": FORMAT, "version": FORMAT_VERSION, "step": step, "files": listed}
    body = json.dumps(tree, indent=1)[:-2].encode()
    return body + f',\n "xxh3": "{xxhash.xxh3_64_hexdigest(body)}"\n}}\n'.encode()


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST_FILE
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedCheckpoint(
            f"{folder}: is not a complete checkpoint: no {MANIFEST_FILE}"
        ) from None
    except OSError as error:
        raise damaged(path, f"cannot be read: {error.strerror}") from None
    ending, version = _SELF.search(content), _VERSION.match(content)
    if ending and xxhash.xxh3_64_hexdigest(content[: ending.start()]) != ending[1].decode():
        raise damaged(path, "its digest of itself differs")
    if version and int(version[1]) != FORMAT_VERSION:
        kind = "newer" if int(version[1]) > FORMAT_VERSION else "older"
        raise CheckpointError(
            f"{folder}: format version {int(version[1])} is {kind} than {FORMAT_VERSION}, which "
            f"this Polyad reads: continue with the Polyad that wrote it, or start anew in another "
            f"run.folder"
        )
    if not ending:
        raise damaged(path, "it is not the manifest of a Polyad checkpoint")
    return Manifest.model_validate_json(content)


def read_contents(folder: Path) -> Contents:
    """Reads the small files of a checkpoint, verified, and compares the sizes of all.

    Args:
        folder: the folder of the checkpoint.

    Raises:
        CheckpointError: it has another version than this program's.
        DamagedCheckpoint: something is missing, damaged, or of another size or form.
    """
    manifest = _read_manifest(folder)
    for name, record in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError:
            raise damaged(folder / name, "missing, though the manifest lists it") from None
        if size != record.bytes:
            raise damaged(folder / name, f"{size:,} bytes, the manifest says {record.bytes:,}")
    contents = Contents(folder, manifest.step, manifest.files, {}, State(), "")
    contents.verify([INDEX_FILE, STATE_FILE, CONFIG_FILE])
    try:
        return replace(
            contents,
            tensors=Index.model_validate_json((folder / INDEX_FILE).read_bytes()).tensors,
            state=State.model_validate_json((folder / STATE_FILE).read_bytes()),
            config_yaml=(folder / CONFIG_FILE).read_text(errors="replace"),
        )
    except ValidationError as error:
        raise damaged(folder, fault_of(error)) from None


def verify_contents(folder: Path, report: Callable[[int], None] = lambda done: None) -> Contents:
    """Returns `read_contents` after comparing every byte with the digests of the manifest.

    Args:
        folder: the folder of the checkpoint.
        report: called with the number of bytes verified so far.

    Raises:
        CheckpointError: as in `read_contents`, or a digest differs.
    """
    contents = read_contents(folder)
    contents.verify(report=report)
    return contents


def all_finite(data: memoryview) -> bool:
    """Returns whether no value is NaN or infinite.

    Args:
        data: fp32 values.
    """
    return bool(np.isfinite(np.frombuffer(data, "<f4")).all())
