"""ImageNet-1k's classes, and the published layouts of the robustness test sets.

A class number is the rank of its WordNet id among the 1,000 in alphabetical order, which is also
the label number on the Hugging Face hub.
"""

import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from polyad.data.errors import DataError
from polyad.data.images.source import ImageSplit, list_files

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


def by_wordnet_id(folder: Path) -> ImageSplit:
    """Lists the images of a tree with one folder per class, named by its WordNet id.

    Args:
        folder: The folder of ImageNet-A, -R or -O, or of one severity of ImageNet-C.

    Raises:
        DataError: A folder has another name, or there are no images.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: there is no such folder")
    files, others = list_files(folder)
    names = files.class_names
    numbers = {wordnet_id: number for number, wordnet_id in enumerate(imagenet_classes())}
    strange = next((name for name in names if name not in numbers), None)
    if strange is not None or not len(files) or others:
        why = f"{strange} is not the folder of a class" if strange else "has no images"
        if others:
            why = f"holds {others:,} files that are not images"
        raise DataError(
            f"{folder}: {why}; it must have folders of images named by WordNet ids of "
            "ImageNet-1k, as n01440764"
        )
    files.labels = np.array([numbers[name] for name in names])[files.labels]
    return files


def corruptions(folder: Path) -> Iterator[tuple[str, int, ImageSplit]]:
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
            yield name, severity, by_wordnet_id(folder / name / str(severity))
