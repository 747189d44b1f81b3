"""Verifies that a checkpoint is what was written: its manifest, its small files, and every byte.

Every file is digested in blocks, so that any process can verify any part. All commands that open a
checkpoint read its small files here, and so reach the same verdict. Does not import torch.
"""

import itertools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import xxhash

from polyad.parallel.checkpoint.box import Box
from polyad.parallel.checkpoint.format import (
    CONFIG_FILE,
    FORMAT,
    FORMAT_VERSION,
    INDEX_FILE,
    MANIFEST_FILE,
    PIECE_BYTES,
    STATE_FILE,
    CheckpointError,
    DamagedCheckpoint,
    Header,
    Index,
    ManifestFile,
    ManifestHead,
    State,
    StoredBox,
    damaged,
    digest,
)
from polyad.parallel.records import FormError, fault_of_file, parsed

Watch: TypeAlias = Callable[[str, int, memoryview], None]
"""Called with the name of a file, a position in it, and the bytes read there."""
PATIENCE = 90.0
"""Seconds that a node waits for a file that another node has seen: NFS caches the content of a
folder for up to 60."""
_SELF = re.compile(rb',\n "xxh3": "([0-9a-f]{16})"\n}\n\Z')


class Block(NamedTuple):
    """A part of a file that is verified as a unit."""

    name: str
    begin: int
    size: int
    digest: str


class Manifest:
    """A manifest, and the files that it lists.

    Args:
        folder: the folder of the checkpoint.

    Raises:
        CheckpointError: it has another version than this program's.
        DamagedCheckpoint: it is missing or damaged; or a file is missing, has another size, or is
            not listed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        manifest = self._read(folder / MANIFEST_FILE)
        self.step = manifest.step
        self.files = manifest.files
        self._block_bytes = manifest.block_bytes
        self._check_names()

    def _read(self, path: Path) -> ManifestFile:
        if path.is_symlink() and (fault := fault_of_file(self.folder, path.name)):
            raise damaged(path, fault)
        try:
            content = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise DamagedCheckpoint(
                f"{self.folder}: is not a complete checkpoint: no {MANIFEST_FILE}"
            ) from None
        except OSError as error:
            raise damaged(path, f"cannot be read: {error.strerror}") from None
        ending = _SELF.search(content)
        if ending and digest(content[: ending.start()]) != ending[1].decode():
            raise damaged(path, "its digest of itself differs")
        what = "it is not the manifest of a Polyad checkpoint"
        try:
            head: ManifestHead = parsed(ManifestHead, content)
            if head.format != FORMAT:
                raise FormError(f"format: {head.format!r:.60}: {FORMAT!r} is needed")
            if head.version > FORMAT_VERSION:
                raise CheckpointError(
                    f"{self.folder}: format version {head.version} is newer than "
                    f"{FORMAT_VERSION}, which this Polyad reads"
                )
            if head.version < FORMAT_VERSION:
                raise CheckpointError(
                    f"{self.folder}: format version {head.version} is older than "
                    f"{FORMAT_VERSION}, which this Polyad reads; no release wrote it"
                )
            manifest: ManifestFile = parsed(ManifestFile, content)
        except FormError as error:
            raise damaged(path, f"{what}: {error}") from None
        if not ending:
            raise damaged(path, f"{what}: no digest of itself")
        return manifest

    def _check_names(self) -> None:
        for name in (INDEX_FILE, STATE_FILE, CONFIG_FILE):
            if name not in self.files:
                raise damaged(self.folder / MANIFEST_FILE, f"it does not list {name}")
        with os.scandir(self.folder) as entries:
            found = {entry.name: entry for entry in entries}
        for name, about in self.files.items():
            if name not in found:
                raise damaged(self.folder / name, "missing, though the manifest lists it")
            if fault := fault_of_file(self.folder, name):
                raise damaged(self.folder / name, fault)
            size = found[name].stat().st_size
            if size != about.bytes:
                raise damaged(
                    self.folder / name, f"{size:,} bytes, the manifest says {about.bytes:,}"
                )
        if extra := sorted(found.keys() - self.files.keys() - {MANIFEST_FILE}):
            raise damaged(
                self.folder / extra[0],
                "is not of the checkpoint, the manifest does not list it; move it away",
            )

    @property
    def total_bytes(self) -> int:
        """Total size in bytes of all files except the manifest itself."""
        return sum(record.bytes for record in self.files.values())

    def blocks(self) -> list[Block]:
        """Returns all blocks, in order."""
        size = self._block_bytes
        return [
            Block(name, begin, min(size, record.bytes - begin), value)
            for name, record in self.files.items()
            for begin, value in zip(itertools.count(0, size), record.xxh3, strict=False)
        ]

    def verify(
        self,
        blocks: Iterable[Block] | None = None,
        report: Callable[[int], None] = lambda done: None,
        watch: Watch = lambda name, begin, piece: None,
        patience: float = 0.0,
    ) -> None:
        """Reads blocks and compares their digests.

        Args:
            blocks: some of `blocks()`; None for all, with the bytes of each file in order.
            report: called with the number of bytes verified so far.
            watch: called with each piece that was read, before the digest of its block is compared.
            patience: seconds to wait for a missing file.

        Raises:
            DamagedCheckpoint: the first block that differs or cannot be read.
        """
        done = 0
        for block in self.blocks() if blocks is None else blocks:
            path = self.folder / block.name
            try:
                actual = self._digest(path, block, watch, patience)
            except OSError as error:
                raise damaged(path, f"cannot be read: {error.strerror}") from None
            if actual != block.digest:
                raise damaged(
                    path,
                    f"the xxh3 of bytes {block.begin:,} to "
                    f"{block.begin + block.size:,} differs from the manifest's",
                )
            done += block.size
            report(done)

    def content(self, name: str) -> bytes:
        """Reads a small file, verified.

        Raises:
            DamagedCheckpoint: it is damaged.
        """
        self.verify(block for block in self.blocks() if block.name == name)
        return (self.folder / name).read_bytes()

    def text(self, name: str) -> str:
        """Reads a small text file, verified.

        Raises:
            DamagedCheckpoint: it is not UTF-8, although its digest is right.
        """
        try:
            return self.content(name).decode()
        except UnicodeDecodeError:
            raise damaged(self.folder / name, "it is not text") from None

    def parsed(self, name: str, kind: Any) -> Any:
        """Reads a small JSON file, verified and validated.

        Args:
            name: the name of the file.
            kind: its form, as in `polyad.parallel.records.parsed`.

        Raises:
            DamagedCheckpoint: it is damaged, or has another form although its digest is right.
        """
        try:
            return parsed(kind, self.content(name))
        except FormError as error:
            raise damaged(self.folder / name, str(error)) from None

    def _digest(self, path: Path, block: Block, watch: Watch, patience: float) -> str:
        running, at = xxhash.xxh3_64(), block.begin
        with patiently_opened(path, patience) as file:
            file.seek(block.begin)
            for piece in _pieces(file, block.size):
                running.update(piece)
                watch(block.name, at, piece)
                at += len(piece)
        return running.hexdigest()


def patiently_opened(path: Path, patience: float) -> Any:
    """Opens a file to read bytes; waits for one that this node does not see yet.

    Args:
        path: the file.
        patience: maximum waiting time in seconds.

    Raises:
        OSError: it cannot be opened, or is still missing after that time.
    """
    end = time.monotonic() + patience
    while True:
        try:
            return path.open("rb", buffering=0)
        except FileNotFoundError:
            if time.monotonic() >= end:
                raise
            time.sleep(0.5)


def _pieces(file: Any, size: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(PIECE_BYTES, size)))
    while size:
        count = file.readinto(buffer[: min(len(buffer), size)])
        if not count:
            return  # truncated after its size was checked: the digest will differ
        size -= count
        yield buffer[:count]


def share_of(blocks: Sequence[Block], rank: int, size: int) -> list[Block]:
    """Returns the blocks that one of several ranks verifies: about equally many bytes for each."""
    return sorted(blocks, key=lambda block: -block.size)[rank::size]


@dataclass(frozen=True)
class Contents:
    """The small files of a checkpoint, consistent with one another and with the tensor files."""

    manifest: Manifest
    index: Index
    state: State
    config_yaml: str
    """The text, not parsed: `train` and `model` know its keys."""

    @property
    def is_judged(self) -> bool:
        """Whether no validation of its weights was interrupted; such weights may not be finite."""
        return self.state.unfinished is None


def read_contents(folder: Path) -> Contents:
    """Reads the small files of a checkpoint, verified, and the headers of its tensor files.

    Args:
        folder: the folder of the checkpoint.

    Raises:
        CheckpointError: it has another version than this program's.
        DamagedCheckpoint: something is missing, damaged, of another form, or inconsistent.
    """
    manifest = Manifest(folder)
    index: Index = manifest.parsed(INDEX_FILE, Index)
    state: State = manifest.parsed(STATE_FILE, State)
    config_yaml = manifest.text(CONFIG_FILE)
    if "step" in state.model_fields_set and state.step != manifest.step:
        raise damaged(
            folder / STATE_FILE, f"step: {state.step:,}: the manifest says {manifest.step:,}"
        )
    headers = {}
    for name, record in manifest.files.items():
        if name.endswith(".safetensors"):
            try:
                headers[name] = Header(folder / name, record.bytes)
            except FormError as error:
                raise damaged(folder / name, str(error)) from None
            except OSError as error:
                raise damaged(folder / name, f"cannot be read: {error.strerror}") from None
    try:
        _check_index(index, headers)
    except FormError as error:
        raise damaged(folder / INDEX_FILE, str(error)) from None
    return Contents(manifest, index, state, config_yaml)


def _check_index(index: Index, headers: Mapping[str, Header]) -> None:
    """Compares an index with the files: each box must be a tensor of its file, at its position.

    Args:
        index: the index of a checkpoint.
        headers: the headers of its tensor files, by name.

    Raises:
        FormError: the first box that differs.
    """
    for name, fields in index.tensors.items():
        for field, tensor in fields.items():
            for box in tensor.chunks:
                where = f"the chunk at {list(box.offset)} of {field} of {name}"
                header = headers.get(box.file)
                if header is None:
                    raise FormError(
                        f"{where}: {box.file!r} is no tensor file that the manifest lists"
                    )
                key = Box(name, field, tensor.shape, box.offset, box.size).key
                if fault := header.fault(key, tensor.dtype, box.size, box.begin):
                    raise FormError(
                        f"{where}: {tensor.dtype} {list(box.size)} at byte {box.begin:,} of "
                        f"{box.file}: {fault}"
                    )


def all_finite(data: memoryview) -> bool:
    """Returns whether no value is NaN or infinite.

    Args:
        data: fp32 values.
    """
    numbers = np.frombuffer(data, "<f4")
    count = PIECE_BYTES // numbers.itemsize
    with np.errstate(all="ignore"):
        for first in range(0, len(numbers), count):
            some = numbers[first : first + count]
            # The sum is fast, and finite only if all values are; for finite values it may overflow.
            if not np.isfinite(some.sum()) and not np.isfinite(some).all():
                return False
    return True


def _bytes(path: Path, begin: int, size: int) -> memoryview:
    """Maps a part of a file."""
    if not size:
        return memoryview(b"")
    with path.open("rb") as file:
        return np.memmap(file, "u1", "r", begin, size).data


def verify_contents(folder: Path, report: Callable[[int], None] = lambda done: None) -> Contents:
    """Returns `read_contents` after comparing every byte with the digests of files and index.

    Args:
        folder: the folder of the checkpoint.
        report: called with the number of bytes verified so far.

    Raises:
        CheckpointError: as in `read_contents`, or a digest differs.
    """
    contents = read_contents(folder)
    contents.manifest.verify(report=report, watch=_BoxDigests(contents))
    return contents


class _BoxDigests:
    """Digests the boxes of an index from the pieces of its files, each file's pieces in order."""

    def __init__(self, contents: Contents) -> None:
        self._manifest = contents.manifest
        self._waiting: dict[str, list[tuple[int, int, StoredBox]]] = {}
        for fields in contents.index.tensors.values():
            for tensor in fields.values():
                for box in tensor.chunks:
                    end = box.begin + tensor.bytes_of(box)
                    if end > box.begin:
                        self._waiting.setdefault(box.file, []).append((box.begin, end, box))
        for place in self._waiting.values():
            place.sort(key=lambda each: -each[0])  # the next one is last
        self._digest = xxhash.xxh3_64()

    def __call__(self, name: str, at: int, piece: memoryview) -> None:
        waiting, stop = self._waiting.get(name, []), at + len(piece)
        while waiting and waiting[-1][0] < stop:
            begin, end, box = waiting[-1]
            self._digest.update(piece[max(begin - at, 0) : end - at])
            if end > stop:
                return
            waiting.pop()
            if self._digest.hexdigest() != box.xxh3:
                raise box_differs(self._manifest.folder, box)
            self._digest.reset()


def box_differs(folder: Path, box: StoredBox) -> DamagedCheckpoint:
    """Returns the error for a box whose digest differs from the index."""
    return damaged(folder / box.file, f"the xxh3 of the chunk at byte {box.begin:,} differs")
