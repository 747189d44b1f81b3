"""Noise on held-out images: what a model of images is attacked with."""

import numpy as np

from polyad.data.errors import DataError
from polyad.data.images.decoding import Pixels


class GaussianNoise:
    """Adds Gaussian noise to each number of each pixel, as ImageNet-C does.

    Its five severities are 0.08, 0.12, 0.18, 0.26 and 0.38 (Hendrycks and Dietterich 2019).

    The noise of an image follows from the seed and the image's number alone; with another rate it
    is the same noise, stronger or weaker.

    Args:
        rate: Its standard deviation, of pixels from 0 to 1.
        seed: Not negative.

    Raises:
        DataError: A number is out of its range.
    """

    def __init__(self, rate: float, seed: int = 0) -> None:
        if not 0 <= rate <= 1:  # NaN is not
            raise DataError(f"rate: {rate} is not allowed; a number from 0 to 1")
        if seed < 0:
            raise DataError(f"seed: {seed} is not allowed; at least 0")
        self.rate, self.seed = rate, seed

    def __call__(self, pixels: Pixels, number: int) -> Pixels:
        """The pixels of an image with noise, cut off at black and white.

        Args:
            pixels: uint8, of any shape.
            number: Of the image in its split.
        """
        generator = np.random.Generator(np.random.PCG64((self.seed, number)))
        noise = generator.standard_normal(pixels.shape, dtype=np.float32)
        return np.clip(np.rint(pixels + 255 * self.rate * noise), 0, 255).astype(np.uint8)
