"""Where the bytes of images are: in files of a folder, or at offsets in a larger file.

An image is a row (shard, offset, size, label). The meaning of offset and size depends on the
shard's kind:

    folder    a file of that name in the folder; its size
    range     bytes of `images.bin` in the prepared folder, copied unchanged from a table
    raw       pixels without a format, of the shard's shape
"""

import io
import os
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field

from polyad.data.config import Config
from polyad.data.errors import DataError
from polyad.data.files import writing
from polyad.data.images.decoding import Pixels, decode

Kind = Literal["folder", "range", "raw"]
ROW = np.dtype([("shard", "<i4"), ("offset", "<i8"), ("size", "<i8"), ("label", "<i4")])
Rows = npt.NDArray[np.void]


class Shard(Config):
    """A folder or file that images are read from."""

    path: str
    """Absolute."""
    kind: Kind
    size: Annotated[int, Field(ge=0)] = 0
    """Bytes of a raw file; 0 for the others."""
    shape: Annotated[tuple[int, int, int], Field(strict=False)] | None = None
    """Channels, height and width of raw pixels."""
    source: str = ""
    """The table that its images were copied from."""


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


class Reader:
    """Reads images by their rows; open files are not shared between processes.

    Args:
        shards: The shards, by number.
    """

    def __init__(self, shards: tuple[Shard, ...]) -> None:
        self._shards = shards
        self._files: dict[str, int] = {}
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
        if shard.kind == "folder":
            return str(Path(shard.path) / name)
        return f"{shard.source or shard.path}: {name}"

    def _content(self, shard: Shard, row: Any, name: str) -> bytes:
        if shard.kind == "folder":
            return (Path(shard.path) / name).read_bytes()
        content = os.pread(self._file(shard.path), int(row["size"]), int(row["offset"]))
        if len(content) < int(row["size"]):
            raise DataError(f"{self.place(row, name)}: the file ends before the image does")
        return content

    def _file(self, path: str) -> int:
        if self._process != os.getpid():  # a forked process does not share the parent's files
            self._files, self._process = {}, os.getpid()
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._files[path]


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Encodes an image as a PNG file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


class Packed:
    """The file that images of tables are copied to, created with the first one.

    Args:
        folder: The folder that is being prepared.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "images.bin"
        self._file: io.BufferedWriter | None = None
        self._size = 0

    def add(self, content: bytes) -> int:
        """Appends an image.

        Returns:
            Its offset.

        Raises:
            DataError: The disk refuses the write.
        """
        with writing(self.path):
            if self._file is None:
                self._file = self.path.open("wb")
            self._file.write(content)
        self._size += len(content)
        return self._size - len(content)

    def close(self) -> None:
        """Closes the file.

        Raises:
            DataError: The disk refuses the write.
        """
        if self._file is not None:
            with writing(self.path):
                self._file.close()
