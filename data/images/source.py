"""Where images are read from: folders of classes, tables that `datasets` opens, and digits.

Nothing is prepared: a source is listed when a run starts, and an image is read when it is needed.
Each source numbers classes by its own names; `polyad.data.images.dataset` makes them one list.
"""

import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import xxhash

from polyad.data.errors import DataError, listed
from polyad.data.files import is_hidden
from polyad.data.images.decoding import Pixels, decode
from polyad.data.names import SPLIT_NAMES, each_once

Labels = npt.NDArray[np.integer]
LABELS = ("label", "fine_label", "labels", "class", "cls")
"""Columns that may hold the class, in order of preference: CIFAR-100 has fine and coarse ones."""
IMAGES = ("image", "img")
MOST_CLASSES = 1_000_000
"""Maximum number of classes without names; a higher number is probably an id, not a class."""
IMAGE_SUFFIXES = frozenset(
    {
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".dib", ".gif"),
        *(".ppm", ".pgm", ".pbm", ".pnm", ".tif", ".tiff"),
    }
)
"""File extensions of the formats that are decoded, in lower case."""


def is_image(name: str) -> bool:
    """Returns whether a file name is that of an image."""
    return PurePosixPath(name).suffix.lower() in IMAGE_SUFFIXES


@dataclass
class ImageSplit:
    """Images with classes, by number."""

    place: str
    """The folder of the files, or the name of the table."""
    images: Callable[[int], Mapping[str, Any]]
    """Returns the `bytes` or the `path` of an image's file, by its number in the source."""
    labels: Labels
    """The class of each image, -1 for none; 0 or 1 for each of its attributes, [images, K]."""
    class_names: Sequence[str]
    """The names of the numbers in `labels`, or of its columns."""
    domains: Labels | None = None
    """The domain number of each image; None if there are no domains."""
    names: str = ""
    """A digest of the names of all images of the source, if they have names."""
    numbers: Labels | None = None
    """The number of each image in the source; None for all."""

    def __len__(self) -> int:
        """Counts the images."""
        return len(self.labels)

    def select(self, numbers: Labels) -> "ImageSplit":
        """Returns some of the images, in the order of their numbers in this split."""
        return replace(
            self,
            labels=self.labels[numbers],
            domains=None if self.domains is None else self.domains[numbers],
            numbers=numbers if self.numbers is None else self.numbers[numbers],
        )

    def decode(self, number: int) -> Pixels:
        """The pixels of an image [H, W, 3].

        Raises:
            DataError: It cannot be read or decoded.
        """
        image, name = self.images(self._number_of(number)), self.name_of(number)
        content = image.get("bytes")
        if content is None and image.get("path"):
            try:
                content = Path(self.place, image["path"]).read_bytes()
            except OSError as error:
                raise DataError(f"{name}: cannot be read: {error.strerror}") from None
        return decode(content or b"", name)

    def name_of(self, number: int) -> str:
        """Returns an image's file, or its table and row."""
        number = self._number_of(number)
        if not self.names:
            return f"{self.place}: row {number}"
        return str(Path(self.place, self.images(number)["path"]))

    def _number_of(self, number: int) -> int:
        return number if self.numbers is None else int(self.numbers[number])

    def digest(self) -> str:
        """A digest of the names and labels of the images, in order."""
        digest = xxhash.xxh3_128(self.names.encode())
        for array in (self.numbers, self.labels, self.domains):
            if array is not None:
                digest.update(np.ascontiguousarray(array, dtype=np.int64).tobytes())
        return digest.hexdigest()


def open_folders(root: Path, *, domains: bool) -> tuple[dict[str, ImageSplit], list[str], int]:
    """Lists folders of classes: [SPLIT/]CLASS/image or DOMAIN/CLASS/image, images at any depth.

    Links are followed, and hidden files left out. No file is opened.

    Args:
        root: The folder.
        domains: Whether its folders are domains.

    Returns:
        The images by split, the names of the domains, and how many files are not images.

    Raises:
        DataError: The folder has another layout, or cannot be read.
    """
    try:
        while not domains and len(tops := _folders(root)) == 1 and not _splits(tops):
            if not _folders(root / tops[0]):
                break
            root = root / tops[0]  # an archive unpacked into a folder of its own
        if domains:
            images, others = list_files(root, _domains(root))
            return {"train": images}, _domains(root), others
        tops = _folders(root)
        splits = _splits(tops)
        # Beside others, a folder that holds no folders is a class, as of vehicles.
        if splits and len(splits) < len(tops) and not _folders(root / splits["train"]):
            splits = {}
        splits = splits or {"train": "."}
        listings = {split: list_files(root / name) for split, name in splits.items()}
    except OSError as error:
        raise DataError(f"data.path: {error.filename}: cannot be read: {error.strerror}") from None
    by_split = {split: images for split, (images, _) in listings.items() if len(images)}
    return by_split, [], sum(others for _, others in listings.values())


def list_files(root: Path, domains: Sequence[str] = ()) -> tuple[ImageSplit, int]:
    """Lists the images of a split by domain, class and path, and counts other files."""
    tops = domains or ["."]
    inside = {top: _folders(root / top) for top in tops}
    class_names = sorted({name for names in inside.values() for name in names})
    names: list[bytes] = []
    labels: list[int] = []
    numbers: list[int] = []
    others = 0
    for number, top in enumerate(tops):
        for name in inside[top]:
            paths = sorted(_paths(root / top / name))
            chosen = [path for path in paths if is_image(path)]
            others += len(paths) - len(chosen)
            start = f"{top}/{name}" if domains else name
            names += [os.fsencode(f"{start}/{path}") for path in chosen]
            labels += [class_names.index(name)] * len(chosen)
            numbers += [number] * len(chosen)
    images = ImageSplit(
        str(root),
        # A list of a million strings would take four times as much memory in each loader process.
        partial(_file, pyarrow.array(names, pyarrow.large_binary())),
        np.array(labels, dtype=np.int32),
        class_names,
        np.array(numbers, dtype=np.int32) if domains else None,
        xxhash.xxh3_128_hexdigest(b"\0".join(names)),
    )
    return images, others


def _file(names: Any, number: int) -> dict[str, Any]:
    return {"path": os.fsdecode(names[number].as_py())}


def _domains(root: Path) -> list[str]:
    names = _folders(root)
    why = None
    if _splits(names):
        why = f"{listed(names)} are splits, not domains"
    elif len(names) < 2:
        why = f"has only {listed(names)}"
    else:
        why = next((f"{name} has no folders of classes" for name in names
                    if not _folders(root / name)), None)  # fmt: skip
    if why is not None:
        raise DataError(f"data.domains: {root}: is not a folder of DOMAIN/CLASS/image: {why}")
    return names


def _folders(place: Path) -> list[str]:
    """Lists the names of the folders in a folder."""
    with os.scandir(place) as entries:
        return sorted(each.name for each in entries if not is_hidden(each.name) and each.is_dir())


def _paths(folder: Path) -> Iterator[str]:
    """Lists the files in a folder, at any depth."""
    with os.scandir(folder) as entries:
        for each in entries:
            if is_hidden(each.name):
                continue
            if each.is_dir():
                yield from (f"{each.name}/{path}" for path in _paths(folder / each.name))
            else:
                yield each.name


def _splits(names: Iterable[str]) -> dict[str, str]:
    """Maps each split to its folder, if one of the names is that of a training split.

    Raises:
        DataError: Two folders are the same split.
    """
    folders: dict[str, str] = {}
    for name in names:
        split = SPLIT_NAMES.get(name.lower())
        if split in folders:
            other = folders[split]
            raise DataError(f"data.path: {name!r} and {other!r} are both the {split} split")
        if split is not None:
            folders[split] = name
    return folders if "train" in folders else {}


def table_images(rows: Any, place: str) -> ImageSplit:
    """Images of a table, with a column of classes, or a boolean column for each attribute.

    Args:
        rows: A split, as `datasets` opens it.
        place: Names it in messages.

    Raises:
        DataError: It has no column of images or of labels, or their type is another one.
    """
    import datasets

    features = rows.features
    image = next((n for n, f in features.items() if isinstance(f, datasets.Image)), None)
    image = image or next((name for name in IMAGES if name in features), None)
    label = next((name for name in LABELS if name in features), None)
    bits = [n for n, f in features.items() if getattr(f, "dtype", None) == "bool"]
    for column, what in ((image, f"images: {' or '.join(IMAGES)}"), (label or bits, "labels: "
            f"{' or '.join(LABELS)}, and none of true and false")):  # fmt: skip
        if not column:
            raise DataError(f"{place}: has no column of {what}; it has {listed(features)}")
    try:
        encoded = rows.select_columns([image]).cast_column(image, datasets.Image(decode=False))
    except (pyarrow.ArrowException, TypeError, ValueError) as error:
        raise DataError(f"{place}: the column {image!r}: {error}") from None
    labels: Labels
    if label is None:
        columns = [_column(rows, name, place, missing=None) for name in bits]
        labels, names = np.stack(columns, axis=1).astype(np.uint8), bits
    elif getattr(features[label], "dtype", None) == "string":
        words = rows.select_columns([label])[:][label]
        names = sorted({word for word in words if word is not None})
        number_of = {word: number for number, word in enumerate(names)}
        labels = np.array([number_of.get(word, -1) for word in words])
    else:
        labels = _column(rows, label, place, missing=-1)
        if isinstance(features[label], datasets.ClassLabel):
            names = each_once(features[label].names)
        else:
            highest = int(labels.max(initial=0))
            names = [str(number) for number in range(min(highest + 1, MOST_CLASSES))]
    return ImageSplit(place, partial(_row, encoded, image), labels, names)


def _row(rows: Any, column: str | None, number: int) -> Mapping[str, Any]:
    return rows[number][column] or {}


def _column(rows: Any, name: str, place: str, missing: int | None) -> Labels:
    """Reads a column of whole numbers, or of true and false."""
    column = rows.select_columns([name]).with_format("arrow")[:][name]
    kind = column.type
    if not (pyarrow.types.is_integer(kind) or pyarrow.types.is_boolean(kind)):
        raise DataError(f"{place}: the column {name!r} holds {kind}, not numbers of classes")
    if missing is None and column.null_count:
        raise DataError(f"{place}: {column.null_count:,} rows have no {name!r}")
    column = column.cast(pyarrow.int64())
    if missing is not None:
        column = column.fill_null(missing)
    return np.asarray(column.to_numpy(), dtype=np.int64)


def digits() -> ImageSplit:
    """scikit-learn's handwritten digits, of 8 x 8 pixels, ordered by class."""
    from PIL import Image
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.argsort(data.target, kind="stable")
    files = []
    for grey_HW in np.clip(data.images[order] * 255 / 16, 0, 255).round().astype(np.uint8):
        Image.fromarray(grey_HW).save(file := io.BytesIO(), "PNG")
        files.append({"bytes": file.getvalue()})
    names = [str(digit) for digit in range(10)]
    return ImageSplit("digits", files.__getitem__, data.target[order], names)
