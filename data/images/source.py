"""Where images are read from: folders of classes, tables that `datasets` opens, and digits.

Nothing is prepared: a source is listed when a run starts, and an image is read when it is needed.
Each source numbers classes by its own names; `polyad.data.images.dataset` makes them one list.

JPEGs are decoded by simplejpeg where it is installed, everything else by Pillow; both give the
same pixels. Orientation tags are ignored, as in the usual ImageNet pipelines.
"""

import contextlib
import io
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import xxhash

from polyad.data.errors import DataError, listed, one_line
from polyad.data.files import is_hidden, read_bytes
from polyad.data.tables import SPLIT_NAMES, each_once

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

Labels = npt.NDArray[np.integer]
Pixels = npt.NDArray[np.uint8]
"""[H, W, 3]."""
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "PPM", "TIFF")
"""Formats that Pillow may read: some of the others start external programs."""
_JPEG = b"\xff\xd8\xff"
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
            content = read_bytes(Path(self.place, image["path"]))
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
        if domains:
            names = _domains(root)
            images, others = list_files(root, names)
            return {"train": images}, names, others
        while len(tops := _folders(root)) == 1 and not _splits(tops) and _folders(root / tops[0]):
            root = root / tops[0]  # an archive unpacked into a folder of its own
        splits = _splits(tops) or {"train": "."}
        listings = {split: list_files(root / name) for split, name in splits.items()}
    except OSError as error:
        raise DataError(f"data.path: {error.filename}: cannot be read: {error.strerror}") from None
    by_split = {split: images for split, (images, _) in listings.items() if len(images)}
    return by_split, [], sum(others for _, others in listings.values())


def list_files(root: Path, domains: Sequence[str] = ()) -> tuple[ImageSplit, int]:
    """Lists the images of a split by domain, class and path, and counts other files."""
    tops = {f"{name}/": number for number, name in enumerate(domains)} or {"": 0}
    files = [
        (f"{top}{label}/{path}", label, number)
        for top, number in tops.items()
        for label in _folders(root / top)
        for path in sorted(_paths(root / top / label))
    ]
    chosen = [file for file in files if is_image(file[0])]
    class_names = sorted({label for top in tops for label in _folders(root / top)})
    number_of = {label: number for number, label in enumerate(class_names)}
    names = [os.fsencode(path) for path, _, _ in chosen]
    images = ImageSplit(
        str(root),
        # A list of a million strings would take four times as much memory in each loader process.
        partial(_file, pyarrow.array(names, pyarrow.large_binary())),
        np.array([number_of[label] for _, label, _ in chosen], dtype=np.int32),
        class_names,
        np.array([number for _, _, number in chosen], dtype=np.int32) if domains else None,
        xxhash.xxh3_128_hexdigest(b"\0".join(names)),
    )
    return images, len(files) - len(chosen)


def _file(names: Any, number: int) -> dict[str, Any]:
    return {"path": os.fsdecode(names[number].as_py())}


def _domains(root: Path) -> list[str]:
    names = _folders(root)
    if len(names) < 2 or _splits(names) or not all(_folders(root / name) for name in names):
        raise DataError(
            f"data.domains: {root}: is not a folder of DOMAIN/CLASS/image: it has {listed(names)}, "
            "and needs two domains or more, not splits, each with a folder for each class"
        )
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
    if image is None:
        raise DataError(
            f"{place}: has no column of images: {' or '.join(IMAGES)}; it has {listed(features)}"
        )
    if label is None and not bits:
        raise DataError(
            f"{place}: has no column of labels: {' or '.join(LABELS)}, and none of true and false; "
            f"it has {listed(features)}"
        )
    try:
        encoded = rows.select_columns([image]).cast_column(image, datasets.Image(decode=False))
    except (pyarrow.ArrowException, TypeError, ValueError) as error:
        raise DataError(f"{place}: the column {image!r}: {error}") from None
    labels: Labels
    if label is None:
        labels, names = np.stack([_column(rows, name, place) for name in bits], axis=1), bits
        if len(missing := np.argwhere(labels < 0)):
            row, column = missing[0]
            raise DataError(f"{place}: row {row} has no {bits[column]!r}")
        labels = labels.astype(np.uint8)
    elif getattr(features[label], "dtype", None) == "string":
        words = rows.select_columns([label])[:][label]
        names = sorted({word for word in words if word is not None})
        number_of = {word: number for number, word in enumerate(names)}
        labels = np.array([number_of.get(word, -1) for word in words])
    else:
        labels = _column(rows, label, place)
        if isinstance(features[label], datasets.ClassLabel):
            names = each_once(features[label].names)
        else:
            highest = int(labels.max(initial=0))
            names = [str(number) for number in range(min(highest + 1, MOST_CLASSES))]
    return ImageSplit(place, partial(_row, encoded, image), labels, names)


def _row(rows: Any, column: str, number: int) -> Mapping[str, Any]:
    return rows[number][column] or {}


def _column(rows: Any, name: str, place: str) -> Labels:
    """Reads a column of whole numbers, or of true and false; -1 where there is no value."""
    column = rows.select_columns([name]).with_format("arrow")[:][name]
    if not (pyarrow.types.is_integer(column.type) or pyarrow.types.is_boolean(column.type)):
        raise DataError(f"{place}: the column {name!r} holds {column.type}, not numbers of classes")
    return np.asarray(column.cast(pyarrow.int64()).fill_null(-1).to_numpy(), dtype=np.int64)


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


def decode(content: bytes, name: str) -> Pixels:
    """Decodes an image of any mode to RGB.

    Args:
        content: The content of the file.
        name: The name of the image, for error messages.

    Returns:
        uint8 [H, W, 3].

    Raises:
        DataError: It is truncated, empty, damaged or not an image.
    """
    if not content:
        raise DataError(f"{name}: is empty")
    if simplejpeg is not None and content.startswith(_JPEG):
        with contextlib.suppress(ValueError):  # Pillow names the fault
            if simplejpeg.decode_jpeg_header(content)[2] in ("YCbCr", "Gray", "RGB"):
                pixels: Pixels = simplejpeg.decode_jpeg(content, colorspace="RGB")
                return pixels
    from PIL import Image

    warnings.simplefilter("ignore", Image.DecompressionBombWarning)
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            if image.mode.startswith(("I", "F")):
                raise DataError(f"{name}: holds grey of more than 8 bits; save it with 8 bits")
            return np.array(image.convert("RGB"))
    except DataError:
        raise
    except Exception as error:  # Pillow's readers raise exceptions of many types
        reason = one_line(error, 120)
        if "cannot identify image file" in reason:
            reason = "no image format is known that begins like this"
        raise DataError(f"{name}: cannot be decoded: {reason}") from None
