"""`manifest.json` of a checkpoint: its files, and digests that reveal damage.

Every file is digested in blocks, so that any process can verify any part. The manifest ends in a
digest of itself. Imports no torch and, unless one is read, no pydantic: the process that writes
snapshots starts with it.
"""

import json
import os
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import xxhash

if TYPE_CHECKING:
    from polyad.parallel.checkpoint.manifest_file import ManifestFile

FORMAT = "polyad-checkpoint"
FORMAT_VERSION = 2
MANIFEST_FILE = "manifest.json"
NEEDED_FILES = ("index.json", "state.json", "config.yaml")
BLOCK_BYTES = 64 * 2**20
PIECE_BYTES = 2**20
"""Read, digested and written at once: a piece stays in a core's cache."""
Digest: TypeAlias = str | int
Watch: TypeAlias = Callable[[str, int, memoryview], None]
"""Takes the name of a file, a position in it, and the bytes that were read there."""
ALGORITHMS = {1: "crc32", 2: "xxh3"}
"""The algorithm of digests in each version of the format."""
PATIENCE = 90.0
"""Seconds that a node waits for a file that another node has seen: NFS trusts what it knows of a
folder for up to 60."""
_SELF = re.compile(rb',\n "xxh3": "([0-9a-f]{16})"\n}\n\Z')


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: one line that names it and says why."""

    exit_status = 2


class DamagedCheckpoint(CheckpointError):
    """A checkpoint that differs from what was written; an older one may be good."""


def damaged(path: Path, what: str) -> DamagedCheckpoint:
    """The error for a file of a checkpoint."""
    return DamagedCheckpoint(f"{path}: damaged: {what}")


def digest(data: Any, algorithm: str = "xxh3") -> Digest:
    """The digest of bytes or of any buffer: XXH3's 64 bits in hex, or the crc32 of version 1."""
    return zlib.crc32(data) if algorithm == "crc32" else xxhash.xxh3_64_hexdigest(data)


@dataclass(frozen=True)
class FileRecord:
    """What a manifest says of a file."""

    bytes: int
    digests: tuple[Digest, ...]
    """Digests of its blocks, in order."""

    def to_json(self) -> dict[str, Any]:
        """The JSON object in a manifest of this version."""
        return {"bytes": self.bytes, "xxh3": list(self.digests)}


class BlockDigests:
    """Digests the blocks of a file whose pieces come one after the other."""

    def __init__(self) -> None:
        self._done: list[Digest] = []
        self._current, self._room, self._bytes = xxhash.xxh3_64(), BLOCK_BYTES, 0

    def update(self, piece: memoryview) -> None:
        """Takes the next piece, of any size."""
        self._bytes += len(piece)
        while len(piece):
            here, piece = piece[: self._room], piece[self._room :]
            self._current.update(here)
            self._room -= len(here)
            if not self._room:
                self._done.append(self._current.hexdigest())
                self._current, self._room = xxhash.xxh3_64(), BLOCK_BYTES

    def record(self) -> FileRecord:
        """The record of the pieces so far."""
        last = [self._current.hexdigest()] if self._room < BLOCK_BYTES or not self._done else []
        return FileRecord(self._bytes, (*self._done, *last))


def record_of(content: bytes) -> FileRecord:
    """The record of a small file."""
    blocks = BlockDigests()
    blocks.update(memoryview(content))
    return blocks.record()


def render(step: int, files: dict[str, FileRecord]) -> bytes:
    """A manifest's bytes.

    Args:
        step: optimizer steps done.
        files: all others of the checkpoint.
    """
    tree = {
        "format": FORMAT, "version": FORMAT_VERSION, "step": step, "block_bytes": BLOCK_BYTES,
        "files": {name: record.to_json() for name, record in files.items()},
    }  # fmt: skip
    body = json.dumps(tree, indent=1)[:-2].encode()
    return body + f',\n "xxh3": "{digest(body)}"\n}}\n'.encode()


class Block(NamedTuple):
    """A part of a file that is verified at once."""

    name: str
    begin: int
    size: int
    digest: Digest


class Manifest:
    """A manifest that was read, and the files that it vouches for.

    Args:
        folder: the checkpoint's.

    Raises:
        CheckpointError: it is newer than this program.
        DamagedCheckpoint: it is missing or damaged; or a file is missing, of another size, or not
            listed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        manifest = self._read(folder / MANIFEST_FILE)
        self.version: int = manifest.version
        self.algorithm = ALGORITHMS[self.version]
        self.step: int = manifest.step
        self._block_bytes: int = manifest.block_bytes
        self.files = {
            name: FileRecord(about.bytes, about.digests) for name, about in manifest.files.items()
        }
        self._check_names()

    def _read(self, path: Path) -> "ManifestFile":
        from polyad.parallel.checkpoint.manifest_file import read_manifest
        from polyad.parallel.checkpoint.records import FormError, fault_of_file

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
        try:
            version, manifest = read_manifest(content, FORMAT, FORMAT_VERSION)
        except FormError as error:
            raise damaged(path, f"it is no manifest of a Polyad checkpoint: {error}") from None
        if manifest is None:
            raise CheckpointError(
                f"{self.folder}: format version {version} is newer than {FORMAT_VERSION}, "
                f"which this Polyad reads"
            )
        if version > 1 and not ending:
            raise damaged(path, "it is no manifest of a Polyad checkpoint: no digest of itself")
        return manifest

    def _check_names(self) -> None:
        for name in NEEDED_FILES:
            if name not in self.files:
                raise damaged(self.folder / MANIFEST_FILE, f"it does not list {name}")
        from polyad.parallel.checkpoint.records import fault_of_file

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
        """Bytes of all files but the manifest itself."""
        return sum(record.bytes for record in self.files.values())

    def blocks(self) -> list[Block]:
        """All blocks, in order."""
        found = []
        for name, record in self.files.items():
            size = self._block_bytes if self.version > 1 else record.bytes
            for number, value in enumerate(record.digests):
                begin = number * size
                found.append(Block(name, begin, min(size, record.bytes - begin), value))
        return found

    def verify(
        self,
        blocks: Iterable[Block] | None = None,
        report: Callable[[int], None] = lambda done: None,
        watch: Watch = lambda name, begin, piece: None,
        patience: float = 0.0,
    ) -> None:
        """Reads blocks and compares their digests.

        Args:
            blocks: some of `blocks()`; None: all of them, the bytes of each file in order.
            report: called with the bytes that are verified so far.
            watch: called with each piece that was read, before its block's digest is compared.
            patience: seconds to wait for a file that is not there.

        Raises:
            DamagedCheckpoint: the first that differs or cannot be read.
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
                    f"the {self.algorithm} of bytes {block.begin:,} to "
                    f"{block.begin + block.size:,} differs from the manifest's",
                )
            done += block.size
            report(done)

    def content(self, name: str) -> bytes:
        """A small file, verified.

        Raises:
            DamagedCheckpoint: it is damaged.
        """
        self.verify(block for block in self.blocks() if block.name == name)
        return (self.folder / name).read_bytes()

    def text(self, name: str) -> str:
        """The text of a small file, verified.

        Raises:
            DamagedCheckpoint: it is not UTF-8, although its digest is right.
        """
        try:
            return self.content(name).decode()
        except UnicodeDecodeError:
            raise damaged(self.folder / name, "it is no text") from None

    def parsed(self, name: str, kind: Any) -> Any:
        """The JSON of a small file, verified and checked.

        Args:
            name: of the file.
            kind: what it holds, as `polyad.parallel.checkpoint.records.parsed` knows it.

        Raises:
            DamagedCheckpoint: it is damaged, or has another form although its digest is right.
        """
        from polyad.parallel.checkpoint.records import FormError, parsed

        try:
            return parsed(kind, self.content(name))
        except FormError as error:
            raise damaged(self.folder / name, str(error)) from None

    def _digest(self, path: Path, block: Block, watch: Watch, patience: float) -> Digest:
        crc32, xxh3, at = 0, xxhash.xxh3_64(), block.begin
        with patiently_opened(path, patience) as file:
            file.seek(block.begin)
            for piece in _pieces(file, block.size):
                if self.algorithm == "crc32":
                    crc32 = zlib.crc32(piece, crc32)
                else:
                    xxh3.update(piece)
                watch(block.name, at, piece)
                at += len(piece)
        return crc32 if self.algorithm == "crc32" else xxh3.hexdigest()


def patiently_opened(path: Path, patience: float) -> Any:
    """Opens a file to read bytes; waits for one that this node does not see yet.

    Args:
        path: of the file.
        patience: seconds.

    Raises:
        OSError: it cannot be opened, or is not there after that time.
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
            return  # the file was cut after its size was checked: the digest will differ
        size -= count
        yield buffer[:count]


def share_of(blocks: Sequence[Block], rank: int, size: int) -> list[Block]:
    """The blocks that one of several processes verifies: about as many bytes as any other."""
    return sorted(blocks, key=lambda block: -block.size)[rank::size]
