"""A folder of prepared images, open for reading."""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data.errors import DataError, listed, user_path
from data.images.decoding import Pixels
from data.images.manifest import MANIFEST_FILE, ImageManifest
from data.images.shards import ROW, Reader, Rows

WINDOW = 16
"""Row groups of compressed parquet that are read, and shuffled, together."""


class ImageSplit:
    """The images of one split.

    Args:
        folder: Of the prepared images.
        name: Of the split.
        manifest: Of the folder.
    """

    def __init__(self, folder: Path, name: str, manifest: ImageManifest) -> None:
        self._about = manifest.splits[name]
        self._path = (folder / f"{name}.npy").resolve()
        self._rows: Rows = _mapped(folder / f"{name}.npy", ROW)
        self._ends: npt.NDArray[np.int64] = _mapped(folder / f"{name}.ends.npy", np.dtype("<i8"))
        self._names = _bytes(folder / f"{name}.names")
        self._reader = Reader(tuple(manifest.shards))
        if not len(self._rows) == len(self._ends) == self._about.images:
            raise DataError(
                f"{folder / name}.npy: is damaged: it has {len(self._rows):,} images, the manifest "
                f"says {self._about.images:,}"
            )
        labels: npt.NDArray[np.integer] = np.array(self._rows["label"])
        classes = len(manifest.class_names)
        if len(self._names) <= int(self._ends[-1]) or not (
            0 <= labels.min() <= labels.max() < classes
        ):
            raise DataError(f"{folder / name}.npy: is damaged; prepare the images again")
        if manifest.has_attributes:
            labels = _attributes(folder, name, len(labels), classes)
        self.labels = labels
        """The class of each image; of images with attributes 0 or 1 of each, [images, K]."""

    @property
    def identity(self) -> tuple[str, int, int]:
        """Differs where the places of images do: the path of the index, its size and time."""
        status = self._path.stat()
        return str(self._path), status.st_size, status.st_mtime_ns

    def __len__(self) -> int:
        """Counts the images."""
        return len(self._rows)

    def decode(self, number: int) -> Pixels:
        """The pixels of an image [H, W, 3].

        Raises:
            DataError: It cannot be read or decoded.
        """
        return self._reader.pixels(self._rows[number], self._name(number))

    def name_of(self, number: int) -> str:
        """An image's file, or its shard and name."""
        return self._reader.place(self._rows[number], self._name(number))

    def order(self, generator: np.random.Generator) -> npt.NDArray[np.integer]:
        """All numbers in the random order of an epoch.

        Of compressed parquet whole row groups are shuffled, and the images of 16 groups at a time:
        each group is then read about once in an epoch.
        """
        if not self._about.grouped:
            shuffled: npt.NDArray[np.integer] = generator.permutation(len(self))
            return shuffled
        keys = np.stack([self._rows["shard"], self._rows["offset"]], axis=1)
        _, group = np.unique(keys, axis=0, return_inverse=True)
        place = generator.permutation(int(group.max()) + 1)[group.reshape(-1)]
        by_window: npt.NDArray[np.int64]
        by_window = np.lexsort((generator.random(len(self)), place // WINDOW))
        return by_window

    def _name(self, number: int) -> str:
        begin = int(self._ends[number - 1]) + 1 if number else 0
        return bytes(self._names[begin : int(self._ends[number])]).decode(
            "utf-8", "surrogateescape"
        )


def _bytes(path: Path) -> npt.NDArray[np.uint8]:
    try:
        return np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:  # there is none, or it is empty
        raise DataError(f"{path}: cannot be read: {error}") from None


def _attributes(folder: Path, name: str, images: int, classes: int) -> npt.NDArray[np.integer]:
    path = folder / f"{name}.attributes.npy"
    values: npt.NDArray[np.integer] = _mapped(path, np.dtype("u1"), dimensions=2)
    if values.shape != (images, classes):
        raise DataError(f"{path}: is damaged; prepare the images again")
    return values


def _mapped(path: Path, dtype: np.dtype[Any], dimensions: int = 1) -> npt.NDArray[Any]:
    try:
        array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, EOFError):
        raise DataError(f"{path}: is damaged: it is not the index of a split") from None
    if array.dtype != dtype or array.ndim != dimensions:
        raise DataError(f"{path}: is damaged: it is not the index of a split")
    return array


class ImageData:
    """A folder made by `polyad prepare --images`.

    Args:
        path: The folder.
        manifest: What it holds.
    """

    def __init__(self, path: Path, manifest: ImageManifest) -> None:
        self.path, self.manifest = path, manifest

    @classmethod
    def open(cls, path: str | Path) -> "ImageData":
        """Opens a folder, and checks that what it was made of is there as it was.

        Raises:
            DataError: It is not such a folder, or a shard is missing or has another size.
        """
        folder = user_path(path)
        data = cls(folder, ImageManifest.read(folder))
        for shard, reason in data._changed_shards():
            raise DataError(f"data.path: {folder}: {shard}: {reason}; prepare it again")
        return data

    @property
    def fingerprint(self) -> str:
        """A digest of the training images and the classes."""
        return self.manifest.fingerprint

    def split(self, name: str) -> ImageSplit:
        """Opens a split.

        Raises:
            DataError: There is none of that name.
        """
        if name not in self.manifest.splits:
            raise DataError(
                f"{self.path}: has no {name} split; it has {listed(self.manifest.splits)}"
            )
        return ImageSplit(self.path, name, self.manifest)

    def bytes_to_verify(self) -> int:
        """Bytes of the index."""
        return sum(record.bytes for record in self.manifest.files.values())

    def faults(self, read: Callable[[int], None]) -> Iterator[tuple[str, str]]:
        """Reads the index, and looks at the size of each shard.

        Args:
            read: Is told the bytes read since the last time.

        Yields:
            The name of a damaged file, and what is wrong with it.
        """
        for name, record in self.manifest.files.items():
            digest = hashlib.sha256()
            try:
                with (self.path / name).open("rb") as file:
                    while chunk := file.read(1 << 20):
                        digest.update(chunk)
                        read(len(chunk))
            except OSError as error:
                yield name, f"cannot be read: {error.strerror}"
                continue
            if digest.hexdigest() != record.sha256:
                yield name, f"is damaged: its SHA-256 is not what {MANIFEST_FILE} says"
        yield from self._changed_shards()

    def _changed_shards(self) -> Iterator[tuple[str, str]]:
        for shard in self.manifest.shards:
            path = Path(shard.path)
            if not path.exists():
                yield shard.path, "is not there any more"
            elif shard.kind != "folder" and path.stat().st_size != shard.size:
                yield shard.path, f"has {path.stat().st_size:,} bytes, it had {shard.size:,}"


def holds_images(folder: Path) -> bool:
    """Whether a folder is of prepared images."""
    from data.images.manifest import is_of_images

    try:
        return is_of_images(json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return False
