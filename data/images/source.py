"""Where images are read from: folders of classes, tables that `datasets` opens, and digits.

Nothing is prepared: a source is listed when a run starts, and an image is read when it is needed.
Each source numbers classes by its own names; `polyad.data.images.dataset` makes them one list.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from polyad.data.errors import DataError, listed
from polyad.data.images.decoding import Pixels, decode
from polyad.data.names import SPLIT_NAMES, each_once
from polyad.data.prepared import is_hidden

Labels = npt.NDArray[np.integer]
LABELS = ("label", "fine_label", "labels", "class", "cls")
"""Columns that may hold the class, in order of preference: CIFAR-100 has fine and coarse ones."""
IMAGES = ("image", "img")
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


class ImageSource(Protocol):
    """Images of one origin, by number."""

    @property
    def class_names(self) -> Sequence[str] | None:
        """The names of the numbers in `labels`, or of its columns; None: numbers have no names."""

    labels: Labels
    """The class of each image, -1 for none; 0 or 1 for each of its attributes, [images, K]."""
    domains: Labels | None
    """The domain number of each image; None if there are no domains."""

    def decode(self, number: int) -> Pixels:
        """The pixels of an image [H, W, 3].

        Raises:
            DataError: It cannot be read or decoded.
        """

    def name_of(self, number: int) -> str:
        """Returns an image's location, for messages."""

    def digest(self) -> xxhash.xxh3_128:
        """A digest of the names of the images, in order."""


class Files:
    """Image files with classes.

    Args:
        root: The folder of the files.
        names: The path of each file in the folder.
        labels: The class of each.
        class_names: The names of the classes.
        domains: The domain number of each; None if there are no domains.
    """

    def __init__(
        self,
        root: Path,
        names: Sequence[str],
        labels: Sequence[int],
        class_names: Sequence[str],
        domains: Sequence[int] | None = None,
    ) -> None:
        encoded = [os.fsencode(name) for name in names]
        self._root = root
        # A list of a million strings would take four times as much memory in each loader process.
        self._names = b"".join(encoded)
        self._ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)
        self.class_names: Sequence[str] = class_names
        self.labels: Labels = np.array(labels, dtype=np.int32)
        self.domains: Labels | None = None
        if domains is not None:
            self.domains = np.array(domains, dtype=np.int32)

    def decode(self, number: int) -> Pixels:
        """The pixels of an image [H, W, 3]; see `ImageSource`."""
        path = self.name_of(number)
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None
        return decode(content, path)

    def name_of(self, number: int) -> str:
        """Returns an image's file."""
        begin = int(self._ends[number - 1]) if number else 0
        return str(self._root / os.fsdecode(self._names[begin : int(self._ends[number])]))

    def digest(self) -> xxhash.xxh3_128:
        """A digest of the names of the files, in order."""
        digest = xxhash.xxh3_128(self._names)
        digest.update(self._ends.tobytes())
        return digest


def open_folders(root: Path, *, domains: bool) -> tuple[dict[str, ImageSource], list[str], int]:
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
            source, others = list_files(root, _domains(root))
            return {"train": source}, _domains(root), others
        tops = _folders(root)
        splits = _splits(tops)
        # Beside others, a folder that holds no folders is a class, as of vehicles.
        if splits and len(splits) < len(tops) and not _folders(root / splits["train"]):
            splits = {}
        splits = splits or {"train": "."}
        listings = {split: list_files(root / name) for split, name in splits.items()}
    except OSError as error:
        raise DataError(f"data.path: {error.filename}: cannot be read: {error.strerror}") from None
    sources: dict[str, ImageSource] = {
        split: source for split, (source, _) in listings.items() if len(source.labels)
    }
    return sources, [], sum(others for _, others in listings.values())


def list_files(root: Path, domains: Sequence[str] = ()) -> tuple[Files, int]:
    """Lists the images of a split by domain, class and path, and counts other files."""
    tops = domains or ["."]
    inside = {top: _folders(root / top) for top in tops}
    class_names = sorted({name for names in inside.values() for name in names})
    names: list[str] = []
    labels: list[int] = []
    numbers: list[int] = []
    others = 0
    for number, top in enumerate(tops):
        for name in inside[top]:
            paths = sorted(_paths(root / top / name))
            images = [path for path in paths if is_image(path)]
            others += len(paths) - len(images)
            start = f"{top}/{name}" if domains else name
            names += [f"{start}/{path}" for path in images]
            labels += [class_names.index(name)] * len(images)
            numbers += [number] * len(images)
    return Files(root, names, labels, class_names, numbers if domains else None), others


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
    found: dict[str, str] = {}
    for name in names:
        split = SPLIT_NAMES.get(name.lower())
        if split in found:
            raise DataError(f"data.path: {name!r} and {found[split]!r} are both the {split} split")
        if split is not None:
            found[split] = name
    return found if "train" in found else {}


class TableImages:
    """Images of a table, with a column of classes, or a boolean column for each attribute.

    Args:
        rows: A split, as `datasets` opens it.
        place: Names it in messages.

    Raises:
        DataError: It has no column of images or of labels, or their type is another one.
    """

    def __init__(self, rows: Any, place: str) -> None:
        import datasets
        import pyarrow

        self._place = place
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
            self._rows = rows.select_columns([image]).cast_column(
                image, datasets.Image(decode=False)
            )
        except (pyarrow.ArrowException, TypeError, ValueError) as error:
            raise DataError(f"{place}: the column {image!r}: {error}") from None
        self._image = image
        self.class_names: Sequence[str] | None = None
        self.domains: Labels | None = None
        if label is None:
            self.class_names = bits
            columns = [_column(rows, name, place, missing=None) for name in bits]
            self.labels: Labels = np.stack(columns, axis=1).astype(np.uint8)
        elif getattr(features[label], "dtype", None) == "string":
            words = rows.select_columns([label])[:][label]
            self.class_names = sorted({word for word in words if word is not None})
            number_of = {word: number for number, word in enumerate(self.class_names)}
            self.labels = np.array([number_of.get(word, -1) for word in words], dtype=np.int32)
        else:
            if isinstance(features[label], datasets.ClassLabel):
                self.class_names = each_once(features[label].names)
            self.labels = _column(rows, label, place, missing=-1)

    def decode(self, number: int) -> Pixels:
        """The pixels of an image [H, W, 3]; see `ImageSource`."""
        image = self._rows[number][self._image] or {}
        content = image.get("bytes")
        if content is None and image.get("path"):
            try:
                content = Path(image["path"]).read_bytes()
            except OSError as error:
                raise DataError(f"{image['path']}: cannot be read: {error.strerror}") from None
        return decode(content or b"", self.name_of(number))

    def name_of(self, number: int) -> str:
        """Returns an image's table and row."""
        return f"{self._place}: row {number}"

    def digest(self) -> xxhash.xxh3_128:
        """A digest of the number of rows; their labels tell tables apart."""
        return xxhash.xxh3_128(str(len(self._rows)).encode())


def _column(rows: Any, name: str, place: str, missing: int | None) -> Labels:
    """Reads a column of whole numbers, or of true and false."""
    import pyarrow

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


class Digits:
    """scikit-learn's handwritten digits, of 8 x 8 pixels, ordered by class."""

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        data = load_digits()
        self._order = np.argsort(data.target, kind="stable")
        grey_NHW = np.clip(data.images * 255 / 16, 0, 255).round().astype(np.uint8)
        self._grey_NHW = grey_NHW[self._order]
        self.class_names: Sequence[str] | None = [str(digit) for digit in range(10)]
        self.labels: Labels = data.target[self._order]
        self.domains: Labels | None = None

    def decode(self, number: int) -> Pixels:
        """The pixels of an image [H, W, 3]."""
        return np.repeat(self._grey_NHW[number][..., None], 3, axis=-1)

    def name_of(self, number: int) -> str:
        """Returns an image's class and number."""
        return f"digits/{self.labels[number]}/{self._order[number]:04}"

    def digest(self) -> xxhash.xxh3_128:
        """A digest of the images."""
        return xxhash.xxh3_128(self._grey_NHW.tobytes())
