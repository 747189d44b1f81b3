"""ImageNet-1k's classes, the published layouts of the robustness test sets, whose files are read
without an index, and scikit-learn's digits.

A class number is the rank of its WordNet id among the 1,000 in alphabetical order, which is also
the label number on the Hugging Face hub.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from polyad.data.errors import DataError
from polyad.data.images.decoding import Pixels, decode
from polyad.data.images.sources.found import is_image
from polyad.data.prepared import is_hidden

CLASSES_FILE = Path(__file__).with_name("imagenet_classes.txt")

ALEXNET_ERRORS = {
    "gaussian_noise": 0.886428,
    "shot_noise": 0.894468,
    "impulse_noise": 0.922640,
    "defocus_blur": 0.819880,
    "glass_blur": 0.826268,
    "motion_blur": 0.785948,
    "zoom_blur": 0.798360,
    "snow": 0.866816,
    "frost": 0.826572,
    "fog": 0.819324,
    "brightness": 0.564592,
    "contrast": 0.853204,
    "elastic_transform": 0.646056,
    "pixelate": 0.717840,
    "jpeg_compression": 0.606500,
}
"""AlexNet's mean error on each corruption of ImageNet-C (Hendrycks and Dietterich 2019), by
folder name."""
SEVERITIES = range(1, 6)


@functools.cache
def imagenet_classes() -> tuple[str, ...]:
    """Returns the WordNet ids of the 1,000 classes, in the order of their numbers."""
    return tuple(CLASSES_FILE.read_text(encoding="ascii").split())


@dataclass(frozen=True, kw_only=True)
class LabelledFile:
    """An image file and its class."""

    path: Path
    label: int


def by_wordnet_id(folder: Path) -> list[LabelledFile]:
    """Lists the images of a tree with one folder per class, named by its WordNet id.

    Args:
        folder: The folder of ImageNet-A, -R or -O, or of one severity of ImageNet-C.

    Raises:
        DataError: A folder has another name, or there are no images.
    """
    numbers = {wordnet_id: number for number, wordnet_id in enumerate(imagenet_classes())}
    allowed = "WordNet ids of ImageNet-1k, as n01440764"
    if not folder.is_dir():
        raise DataError(f"{folder}: there is no such folder")
    classes = sorted(e for e in folder.iterdir() if e.is_dir() and not is_hidden(e.name))
    for entry in classes:
        if entry.name not in numbers:
            raise DataError(f"{entry}: is not the folder of a class; allowed: {allowed}")
    found = []
    for entry in classes:
        for path in sorted(path for path in entry.iterdir() if not is_hidden(path.name)):
            if not is_image(path.name):
                raise DataError(f"{path}: is not an image, but is in a folder of images")
            found.append(LabelledFile(path=path, label=numbers[entry.name]))
    if not found:
        raise DataError(f"{folder}: has no image in folders of classes; allowed: {allowed}")
    return found


def corruptions(folder: Path) -> Iterator[tuple[str, int, list[LabelledFile]]]:
    """Lists the images of ImageNet-C: CORRUPTION/SEVERITY/WORDNET_ID/FILE.

    Args:
        folder: The folder with all 15 corruptions; the four extra ones are not read.

    Yields:
        Corruption, severity from 1 to 5, and the images.

    Raises:
        DataError: A corruption or severity is missing.
    """
    for name in ALEXNET_ERRORS:
        for severity in SEVERITIES:
            place = folder / name / str(severity)
            if not place.is_dir():
                raise DataError(
                    f"{place}: there is no such folder; ImageNet-C has 15 corruptions with "
                    f"severities 1 to 5 each: {', '.join(ALEXNET_ERRORS)}"
                )
    for name in ALEXNET_ERRORS:
        for severity in SEVERITIES:
            yield name, severity, by_wordnet_id(folder / name / str(severity))


def classes_of(files: Sequence[LabelledFile]) -> list[int]:
    """Returns the class of each file, in order."""
    return sorted({file.label for file in files})


class FileSplit:
    """Image files as a split, in the given order.

    Args:
        files: The files with their classes.
    """

    def __init__(self, files: Sequence[LabelledFile]) -> None:
        self._files = files
        self.labels: npt.NDArray[np.integer] = np.array([file.label for file in files])
        self.domains: npt.NDArray[np.integer] | None = None

    def __len__(self) -> int:
        """Counts the images."""
        return len(self._files)

    def decode(self, number: int) -> Pixels:
        """The pixels of an image [H, W, 3]."""
        path = self._files[number].path
        try:
            return decode(path.read_bytes(), str(path))
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None

    def name_of(self, number: int) -> str:
        """Returns an image's file."""
        return str(self._files[number].path)


def digits() -> tuple[Any, Any]:
    """Loads scikit-learn's handwritten digits: images [N, 8, 8] from 0 to 16, and labels [N]."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return found.images, found.target
