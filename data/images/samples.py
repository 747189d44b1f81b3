"""Training samples by their global number, and held-out samples in file order.

Sample g of a run is number g % n of the random order of epoch g // n. Its random numbers depend on
the run's seed, the epoch and the image; those of mixing depend on the seed and the pair g // 2. All
are the same for any number of processes and workers, and after a resume.

Shapes: B images of a batch, C channels, H x W pixels.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from polyad.data.images.augmentation import GaussianNoise, evaluation_image, mixing, training_image
from polyad.data.images.config import ImageDataConfig
from polyad.data.images.source import ImageSplit

_ORDER, _IMAGE, _PAIR = 1, 2, 3
"""Streams of random numbers: the last part of a seed."""


class ImageBatch(NamedTuple):
    """A micro-batch of images. A single sample has the same fields without B."""

    images_BCHW: Tensor
    """Pixels, uint8."""
    labels_B: Tensor
    """Classes, int64; for images with K attributes, 0 or 1 for each, [B, K]."""
    mix_B: Tensor
    """Weight of each image when it is mixed with its neighbour in the batch, number b xor 1; fp32,
    1 if it is not mixed."""
    box_B4: Tensor
    """Top, left, bottom and right of the box taken from the neighbour, int16; empty: all pixels are
    weighted means."""


class ImageSamples(Dataset[ImageBatch]):
    """An infinite sequence of training images after augmentation.

    Args:
        images: The training split.
        settings: The settings of the data.
        size: Side of an image, in pixels.
        seed: The run's seed.
    """

    def __init__(self, images: ImageSplit, settings: ImageDataConfig, size: int, seed: int) -> None:
        self._images, self._settings, self._size, self._seed = images, settings, size, seed

    def number_of(self, sample: int) -> int:
        """Returns the number of a sample's image in the split."""
        epoch, place = divmod(sample, len(self._images))
        return int(_order(len(self._images), self._seed, epoch)[place])

    def __getitem__(self, sample: int) -> ImageBatch:
        """Reads, decodes and augments the image of a sample.

        Raises:
            DataError: The image cannot be decoded.
        """
        epoch, number = sample // len(self._images), self.number_of(sample)
        seeds = (self._seed, epoch, number, _IMAGE)
        share, box = mixing(
            self._settings.augmentation, self._size, (self._seed, sample // 2, _PAIR)
        )
        return ImageBatch(
            training_image(self._images.decode(number), self._size, self._settings, seeds),
            _label(self._images, number),
            torch.tensor(share),
            torch.tensor(box, dtype=torch.int16),
        )


@functools.lru_cache(maxsize=2)  # a batch, and what workers fetch ahead, may straddle two epochs
def _order(images: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    generator = np.random.Generator(np.random.PCG64((seed, epoch, _ORDER)))
    return generator.permutation(images)


@dataclass(eq=False)
class EvaluationImages(Dataset[ImageBatch]):
    """The images of a split in order, resized and center-cropped."""

    images: ImageSplit
    """The split."""
    settings: ImageDataConfig
    """The settings of the data."""
    size: int
    """Side of an image, in pixels."""
    noise: GaussianNoise | None = None
    """Noise to add to each image; None for none."""

    def __len__(self) -> int:
        """Counts the images."""
        return len(self.images)

    def __getitem__(self, number: int) -> ImageBatch:
        """Reads and decodes an image; a damaged one is an error, since no score may skip images."""
        pixels = self.images.decode(number)
        image_CHW = evaluation_image(pixels, self.size, self.settings.evaluation_resize)
        if self.noise is not None:
            image_CHW = torch.from_numpy(self.noise(image_CHW.numpy(), number))
        return ImageBatch(
            image_CHW,
            _label(self.images, number),
            torch.tensor(1.0),
            torch.zeros(4, dtype=torch.int16),
        )


def _label(images: ImageSplit, number: int) -> Tensor:
    return torch.from_numpy(np.asarray(images.labels[number], dtype=np.int64))
