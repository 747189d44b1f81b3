"""Where the bytes of images are: in files of a folder, or at offsets in larger files.

An image is a row (shard, offset, size, label). The meaning of offset and size depends on the
shard's kind:

    folder    a file of that name in the folder; its size
    range     bytes of a tar, a zip, a table, or the prepared folder's own file, stored unchanged
    zip       the size of a compressed member of that name
    raw       pixels without a format, of the shard's shape
    parquet   only in folders of version 1, which cannot be read
"""

import functools
import io
import os
import re
import zipfile
import zlib
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field

from polyad.data.config import Config
from polyad.data.errors import DataError
from polyad.data.files import DigestedFile, flush_to_disk, writing
from polyad.data.images.decoding import Pixels, decode
from polyad.data.prepared import partial_file

Kind = Literal["folder", "range", "zip", "parquet", "raw"]
ROW = np.dtype([("shard", "<i4"), ("offset", "<i8"), ("size", "<i8"), ("label", "<i4")])
Rows = npt.NDArray[np.void]
MOST_BYTES = 1 << 29
"""Maximum size of one image file, in bytes."""


class Shard(Config):
    """A folder or file that images are read from."""

    path: str
    """Absolute."""
    kind: Kind
    size: Annotated[int, Field(ge=0)] = 0
    """Bytes of the file; 0 for a folder."""
    shape: Annotated[tuple[int, int, int], Field(strict=False)] | None = None
    """Channels, height and width of raw pixels."""
    column: str | None = None
    """The column of images, of parquet in folders of version 1."""


class Entry(NamedTuple):
    """An image that a source found."""

    shard: int
    offset: int
    size: int
    label: int
    name: str
    attributes: npt.NDArray[np.uint8] | None = None
    """0 or 1 for each attribute; None if the image has one class."""
    domain: int | None = None
    """The number of its domain; None if the source has none."""


def too_large(size: int) -> str:
    """Returns the error message for an image file that is too large."""
    return f"has {size:,} bytes, and {MOST_BYTES:,} are allowed for an image"


class Reader:
    """Reads images by their rows; open files are not shared between processes.

    Args:
        shards: The shards, by number.
    """

    def __init__(self, shards: tuple[Shard, ...]) -> None:
        self._shards = shards
        self._files: dict[int, int] = {}
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        """Drops open files: a loader process opens its own."""
        return {"_shards": self._shards, "_files": {}, "_process": 0}

    def __del__(self) -> None:
        """Closes the open files: each validation creates a new reader."""
        if self.__dict__.get("_process") == os.getpid():
            for file in self._files.values():
                os.close(file)

    def pixels(self, row: Any, name: str) -> Pixels:
        """Reads and decodes an image.

        Args:
            row: The row of the index.
            name: The name of the image, relative to its shard.

        Raises:
            DataError: It cannot be read or decoded.
        """
        shard = self._shards[int(row["shard"])]
        try:
            content = self._content(shard, row, name)
        except OSError as error:
            raise DataError(f"{self.place(row, name)}: {error.strerror or error}") from None
        if shard.kind == "raw":
            assert shard.shape is not None
            channels, height, width = shard.shape
            image = np.frombuffer(content, np.uint8).reshape(channels, height, width)
            image = image.transpose(1, 2, 0)
            return np.ascontiguousarray(np.broadcast_to(image, (height, width, 3)))
        return decode(content, self.place(row, name))

    def place(self, row: Any, name: str) -> str:
        """Returns an image's location, for messages."""
        shard = self._shards[int(row["shard"])]
        return str(Path(shard.path) / name) if shard.kind == "folder" else f"{shard.path}: {name}"

    def _content(self, shard: Shard, row: Any, name: str) -> bytes:
        if shard.kind == "folder":
            with (Path(shard.path) / name).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size > MOST_BYTES:
                    raise DataError(f"{self.place(row, name)}: {too_large(size)}")
                return file.read()
        if shard.kind == "zip":
            return _member(shard.path, name)
        content = os.pread(self._file(int(row["shard"])), int(row["size"]), int(row["offset"]))
        if len(content) < int(row["size"]):
            raise DataError(f"{self.place(row, name)}: the file ends before the image does")
        return content

    def _file(self, number: int) -> int:
        if self._process != os.getpid():  # a forked process does not share the parent's files
            self._files, self._process = {}, os.getpid()
        if number not in self._files:
            self._files[number] = os.open(self._shards[number].path, os.O_RDONLY | os.O_CLOEXEC)
        return self._files[number]


def _member(path: str, name: str) -> bytes:
    try:
        with _zip(path, os.getpid()).open(name) as member:
            content = member.read(MOST_BYTES + 1)
            if len(content) > MOST_BYTES:
                raise DataError(f"{path}: {name}: {too_large(len(content))}")
            return content
    except (zipfile.BadZipFile, zlib.error, KeyError, NotImplementedError, RuntimeError) as error:
        raise DataError(f"{path}: {name}: cannot be unpacked: {error}") from None


@functools.lru_cache(maxsize=8)
def _zip(path: str, process: int) -> zipfile.ZipFile:
    """Opens a zip file, one per process: forked processes share the file position."""
    return zipfile.ZipFile(path)


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Encodes an image as a PNG file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


PACKED_FILE = re.compile(r"images(-[0-9a-f]{12})?\.bin")
"""Its name in a prepared folder, with the first digits of its SHA-256: a run that expects other
content does not find the file, rather than read wrong bytes."""
WHAT_TO_DO = "make room there, and run the same command again"
"""Advice where the disk is full."""


class Packed:
    """A file that images are appended to, created with the first image.

    Args:
        folder: The prepared folder.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "images.bin"
        """Its provisional path until it is finished."""
        self._file: DigestedFile | None = None

    def add(self, content: bytes) -> int:
        """Appends an image.

        Returns:
            Its offset.

        Raises:
            DataError: The disk refuses the write.
        """
        with writing(self.path, WHAT_TO_DO):
            if self._file is None:
                self._file = DigestedFile(partial_file(self.path))
            self._file.write(content)
        return self._file.size - len(content)

    def finish(self) -> tuple[str, int, str] | None:
        """Closes the file and flushes it to disk; it is still among the unfinished files.

        Returns:
            Its name, its size in bytes and its SHA-256; None if no image was added.

        Raises:
            DataError: The disk refuses the write.
        """
        if self._file is None:
            return None
        with writing(self.path, WHAT_TO_DO):
            sha256, partial = self._file.finish(), partial_file(self.path)
            flush_to_disk(partial)
        name = f"images-{sha256[:12]}.bin"
        partial.rename(partial.with_name(name))
        return name, self._file.size, sha256

    def close(self) -> None:
        """Closes the file, finished or not."""
        if self._file is not None:
            self._file.close()
