"""Opens a folder of prepared images for reading."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from polyad.data.errors import DataError, listed, user_path
from polyad.data.images.decoding import Pixels
from polyad.data.images.manifest import ImageManifest
from polyad.data.images.shards import ROW, Reader, Rows
from polyad.data.json_reader import read_json
from polyad.data.names import check_classes, check_leave_out
from polyad.data.prepared import MANIFEST_FILE, PreparedFolder

TEST = "test"


class ImageSplit:
    """The images of one split.

    Args:
        folder: The folder of the prepared images.
        name: The name of the split.
        manifest: The manifest of the folder.
    """

    def __init__(self, folder: Path, name: str, manifest: ImageManifest) -> None:
        images = (manifest.splits[name].images,)
        self._rows: Rows = _mapped(folder / f"{name}.npy", ROW, images)
        self._ends: npt.NDArray[np.int64] = _mapped(
            folder / f"{name}.ends.npy", np.dtype("<i8"), images
        )
        self._names = _bytes(folder / f"{name}.names")
        self._reader = Reader(tuple(manifest.shards))
        labels: npt.NDArray[np.integer] = np.array(self._rows["label"])
        if manifest.has_attributes:
            each = (*images, len(manifest.class_names))
            labels = _mapped(folder / f"{name}.attributes.npy", np.dtype("u1"), each)
        self.labels = labels
        """The class of each image; for images with attributes, 0 or 1 for each, [images, K]."""
        self.domains: npt.NDArray[np.integer] | None = None
        """The domain number of each image; None if the data has no domains."""
        if manifest.domain_names:
            self.domains = _mapped(folder / f"{name}.domains.npy", np.dtype("<i4"), images)

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
        """Returns an image's file, or its shard and name."""
        return self._reader.place(self._rows[number], self._name(number))

    def _name(self, number: int) -> str:
        begin = int(self._ends[number - 1]) + 1 if number else 0
        return bytes(self._names[begin : int(self._ends[number])]).decode(
            "utf-8", "surrogateescape"
        )


class ChosenImages:
    """Some images of several splits, one split after the other.

    Args:
        splits: The splits of one folder that has domains.
        left_out: Numbers of domains.
        inside: Whether to take the images of these domains, or those of all other domains.
    """

    def __init__(
        self, splits: Sequence[ImageSplit], left_out: Sequence[int], *, inside: bool
    ) -> None:
        self._splits = splits
        numbers, labels, domains = [], [], []
        for split in splits:
            assert split.domains is not None
            taken = np.flatnonzero(np.isin(split.domains, left_out, invert=not inside))
            numbers.append(taken)
            labels.append(split.labels[taken])
            domains.append(split.domains[taken])
        self._split_of = np.repeat(np.arange(len(splits)), [len(taken) for taken in numbers])
        self._number_of = np.concatenate(numbers)
        self.labels: npt.NDArray[np.integer] = np.concatenate(labels)
        self.domains: npt.NDArray[np.integer] = np.concatenate(domains)

    def __len__(self) -> int:
        """Counts the images."""
        return len(self._number_of)

    def decode(self, number: int) -> Pixels:
        """The pixels of an image [H, W, 3]."""
        return self._split(number).decode(int(self._number_of[number]))

    def name_of(self, number: int) -> str:
        """Returns an image's file, or its shard and name."""
        return self._split(number).name_of(int(self._number_of[number]))

    def _split(self, number: int) -> ImageSplit:
        return self._splits[int(self._split_of[number])]


def _bytes(path: Path) -> npt.NDArray[np.uint8]:
    try:
        return np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:  # the file is missing or empty
        raise DataError(f"{path}: cannot be read: {error}") from None


def _mapped(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    try:
        array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, EOFError):
        raise DataError(f"{path}: is damaged: it is not the index of a split") from None
    if array.dtype != dtype or array.shape != shape:
        raise DataError(f"{path}: is damaged: it is not the index of a split")
    return array


class ImageData(PreparedFolder):
    """A folder made by `polyad prepare --images`.

    Args:
        path: The folder.
        manifest: Its manifest.
        leave_out: Domains that are not trained on and form the test split; empty for none.
    """

    def __init__(self, path: Path, manifest: ImageManifest, leave_out: Sequence[str] = ()) -> None:
        self.path, self.manifest = path, manifest
        self.left_out = [name for name in manifest.domain_names if name in leave_out]
        """Names of the domains left out, in the order of the folder."""

    @classmethod
    def open(cls, path: str | Path, leave_out: Sequence[str] | None = None) -> "ImageData":
        """Opens a folder, and checks that the files it was made from have not changed.

        Args:
            path: The folder.
            leave_out: See the class; None for no domain.

        Raises:
            DataError: It is not a folder of prepared images, a shard is missing or has another
                size, or these domains cannot be left out.
        """
        folder = user_path(path)
        manifest = ImageManifest.read(folder)
        place = f"data.path: {folder}"
        made_by = "images prepared by `polyad prepare --images FOLDER --domains`"
        check_leave_out(leave_out, manifest.domain_names, place, made_by)
        data = cls(folder, manifest, leave_out or ())
        for shard, reason in data._changed_shards():
            raise DataError(f"data.path: {folder}: {shard}: {reason}; prepare it again")
        data._check_classes()
        return data

    @property
    def fingerprint(self) -> str:
        """A digest of the training images, the classes, and the domains left out."""
        known = self.manifest.fingerprint
        if not self.left_out:
            return known
        return hashlib.sha256(json.dumps([known, self.left_out]).encode()).hexdigest()

    @property
    def contents(self) -> str:
        """A digest of the images of all splits, from the files of the index."""
        files = sorted(self.manifest.sha256.items())
        return hashlib.sha256(json.dumps([self.fingerprint, files]).encode()).hexdigest()

    @property
    def splits(self) -> list[str]:
        """Names of the available splits."""
        if self.left_out:
            return [*(name for name in self.manifest.splits if name != TEST), TEST]
        return list(self.manifest.splits)

    def split(self, name: str) -> ImageSplit | ChosenImages:
        """Opens a split. If domains are left out, `test` is all of their images, and the other
        splits have only images of the other domains.

        Raises:
            DataError: There is no split of that name.
        """
        if name not in self.splits:
            raise DataError(f"{self.path}: has no {name} split; it has {listed(self.splits)}")
        if not self.left_out:
            return ImageSplit(self.path, name, self.manifest)
        sources = list(self.manifest.splits) if name == TEST else [name]
        numbers = [self.manifest.domain_names.index(domain) for domain in self.left_out]
        splits = [ImageSplit(self.path, source, self.manifest) for source in sources]
        return ChosenImages(splits, numbers, inside=name == TEST)

    def _check_classes(self) -> None:
        """Checks that the domains left out have no class that the others lack."""
        if not self.left_out:
            return
        names, test = self.manifest.class_names, self.split(TEST)
        trained = [names[label] for label in np.unique(self.split("train").labels)]
        for domain in self.left_out:
            inside = test.domains == self.manifest.domain_names.index(domain)
            classes = [names[label] for label in np.unique(test.labels[inside])]
            check_classes(domain, classes, trained)

    @property
    @override
    def digests(self) -> Mapping[str, str]:
        return self.manifest.sha256

    def _changed_shards(self) -> Iterator[tuple[str, str]]:
        for shard in self.manifest.shards:
            path = Path(shard.path)
            if not path.exists():
                yield shard.path, "is not there any more"
            elif shard.kind == "raw" and path.stat().st_size != shard.size:
                yield shard.path, f"has {path.stat().st_size:,} bytes, it had {shard.size:,}"


def holds_images(folder: Path) -> bool:
    """Returns whether a folder holds prepared images."""
    from polyad.data.images.manifest import is_of_images

    try:
        return is_of_images(read_json(folder / MANIFEST_FILE))
    except DataError:
        return False
