"""Reads everything of a checkpoint but the tensors' bytes, and checks that it agrees.

All commands that open a checkpoint use this file, and so judge it alike. Imports no
torch.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from polyad.parallel.checkpoint.index import Chunk, Header, Index, check_index
from polyad.parallel.checkpoint.manifest import DamagedCheckpoint, Digest, Manifest, damaged
from polyad.parallel.checkpoint.records import FormError
from polyad.parallel.checkpoint.state_file import State
from polyad.parallel.checkpoint.tensor_bytes import all_finite

INDEX_FILE, STATE_FILE, CONFIG_FILE = "index.json", "state.json", "config.yaml"


@dataclass(frozen=True)
class Contents:
    """The small files of a checkpoint, which agree with one another and with the tensor files."""

    manifest: Manifest
    index: Index
    state: State
    config_yaml: str
    """The text, not parsed: `train` and `model` know its keys."""

    @property
    def is_judged(self) -> bool:
        """Whether no validation of its weights was cut short: one that was may be not finite."""
        return self.state.unfinished is None


def read_contents(folder: Path) -> Contents:
    """Reads the small files of a checkpoint, verified, and the headers of its tensor files.

    Args:
        folder: the checkpoint's.

    Raises:
        CheckpointError: it is newer than this program.
        DamagedCheckpoint: something is missing, damaged, of another form, or contradicts the rest.
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
        check_index(index, headers, manifest.algorithm)
    except FormError as error:
        raise damaged(folder / INDEX_FILE, str(error)) from None
    return Contents(manifest, index, state, config_yaml)


def is_good(contents: Contents) -> bool:
    """Whether a run can go on from a checkpoint: it is judged, and all its numbers are finite.

    Args:
        contents: of a checkpoint whose bytes are verified.
    """
    return contents.is_judged and all(
        all_finite(
            _bytes(contents.manifest.folder / chunk.file, chunk.begin, tensor.bytes_of(chunk))
        )
        for fields in contents.index.tensors.values()
        for tensor in fields.values()
        if tensor.dtype == "F32"
        for chunk in tensor.chunks
    )


def _bytes(path: Path, begin: int, size: int) -> memoryview:
    """A part of a file, mapped."""
    if not size:
        return memoryview(b"")
    with path.open("rb") as file:
        return np.memmap(file, "u1", "r", begin, size).data


def verify_contents(folder: Path, report: Callable[[int], None] = lambda done: None) -> Contents:
    """As `read_contents`, and reads every byte once: digests of files and those of the index.

    Args:
        folder: the checkpoint's.
        report: called with the bytes that are verified so far.

    Raises:
        CheckpointError: as `read_contents`, or a digest differs.
    """
    contents = read_contents(folder)
    contents.manifest.verify(report=report, watch=_ChunkDigests(contents))
    return contents


class _ChunkDigests:
    """Digests the chunks of an index from the pieces of its files, each file's in order."""

    def __init__(self, contents: Contents) -> None:
        self._manifest = contents.manifest
        self._waiting: dict[str, list[tuple[int, int, Chunk]]] = {}
        for fields in contents.index.tensors.values():
            for tensor in fields.values():
                for chunk in tensor.chunks:
                    end = chunk.begin + tensor.bytes_of(chunk)
                    if end > chunk.begin:
                        place = self._waiting.setdefault(chunk.file, [])
                        place.append((chunk.begin, end, chunk))
        for place in self._waiting.values():
            place.sort(key=lambda each: -each[0])  # the next one stands at the end
        self._digest = _Running(self._manifest.algorithm)

    def __call__(self, name: str, at: int, piece: memoryview) -> None:
        waiting, stop = self._waiting.get(name, []), at + len(piece)
        while waiting and waiting[-1][0] < stop:
            begin, end, chunk = waiting[-1]
            self._digest.update(piece[max(begin - at, 0) : end - at])
            if end > stop:
                return
            waiting.pop()
            if self._digest.take() != chunk.digest(self._manifest.algorithm):
                raise chunk_differs(self._manifest, chunk)


def chunk_differs(manifest: Manifest, chunk: Chunk) -> DamagedCheckpoint:
    """The error for a chunk whose digest is not that of the index."""
    return damaged(
        manifest.folder / chunk.file,
        f"the {manifest.algorithm} of the chunk at byte {chunk.begin:,} differs",
    )


class _Running:
    """A running digest of bytes that arrive in pieces."""

    def __init__(self, algorithm: str) -> None:
        self._is_old = algorithm == "crc32"
        self._crc32, self._xxh3 = 0, xxhash.xxh3_64()

    def update(self, piece: memoryview) -> None:
        if self._is_old:
            self._crc32 = zlib.crc32(piece, self._crc32)
        else:
            self._xxh3.update(piece)

    def take(self) -> Digest:
        """Returns the digest so far, and starts a new one."""
        done: Digest = self._crc32 if self._is_old else self._xxh3.hexdigest()
        self._crc32, self._xxh3 = 0, xxhash.xxh3_64()
        return done
