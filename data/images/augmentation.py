"""Crops, flips, boxes and noise for one image, each image with its own random generator.

Only RandAugment uses torchvision, and only this module imports it. torchvision's wheel is built
for CUDA; beside a CPU build of torch its import fails, because the libraries of its compiled
operators are missing. Transforms need none of them: their names are declared here and the import
is retried. Without that, `transformers` could not be imported where torchvision is installed.

Shapes: C channels, H x W pixels.
"""

import functools
import importlib
import math
import sys
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from polyad.data.errors import DataError
from polyad.data.images.config import AugmentationConfig, ImageDataConfig, RandAugmentConfig
from polyad.data.images.source import Pixels

ASPECT = (3 / 4, 4 / 3)
"""Aspect ratio (width over height) of a random crop, as in Szegedy et al. 2015."""
ERASED, ERASED_ASPECT = (0.02, 0.33), (0.3, 3.3)
"""Area (a share of the image) and aspect ratio of an erased box (Zhong et al. 2020)."""
TRIES = 10
Box: TypeAlias = tuple[int, int, int, int]


def training_image(
    pixels: Pixels, size: int, settings: ImageDataConfig, seeds: tuple[int, ...]
) -> Tensor:
    """Augments an image.

    Returns:
        uint8 [C, size, size].
    """
    chosen = settings.augmentation
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seeds)))
    if chosen.crop_scale is None:
        image_CHW = evaluation_image(pixels, size, settings.evaluation_resize)
    else:
        top, left, height, width = random_crop(pixels.shape[:2], chosen.crop_scale, generator)
        image_CHW = resized(pixels[top : top + height, left : left + width], size, size)
    if chosen.flip and generator.random() < 0.5:
        image_CHW = image_CHW.flip(-1)
    if chosen.randaugment is not None:
        image_CHW = randaugment(image_CHW, chosen.randaugment, seeds)
    if chosen.erasing and generator.random() < chosen.erasing:
        box = _random_box((size, size), ERASED, ERASED_ASPECT, generator)
        top, left, height, width = box or (0, 0, 0, 0)
        colour = torch.tensor([round(255 * each) for each in settings.mean], dtype=torch.uint8)
        image_CHW[:, top : top + height, left : left + width] = colour.view(-1, 1, 1)
    return image_CHW


def evaluation_image(pixels: Pixels, size: int, resize: float) -> Tensor:
    """Resizes an image and returns its central crop.

    Args:
        pixels: [H, W, 3].
        size: Side of the result.
        resize: Length of the shorter side before the crop, as a multiple of `size`.

    Returns:
        uint8 [C, size, size].
    """
    height, width = pixels.shape[:2]
    shorter = max(size, round(size * resize))
    scale = shorter / min(height, width)
    tall, wide = max(size, round(height * scale)), max(size, round(width * scale))
    image_CHW = resized(pixels, tall, wide)
    top, left = (tall - size) // 2, (wide - size) // 2
    return image_CHW[:, top : top + size, left : left + size].contiguous()


def resized(pixels: Pixels, height: int, width: int) -> Tensor:
    """Resizes an image, bicubic with antialiasing.

    Args:
        pixels: [H, W, 3].
        height: The height of the result.
        width: The width of the result.

    Returns:
        uint8 [C, height, width].
    """
    image_CHW = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)
    if image_CHW.shape[1:] == (height, width):
        return image_CHW.contiguous()
    larger = interpolate(
        image_CHW.unsqueeze(0), size=(height, width), mode="bicubic", antialias=True
    )
    return larger.squeeze(0).contiguous()


def random_crop(
    size: tuple[int, int], scale: tuple[float, float], generator: np.random.Generator
) -> Box:
    """Draws a crop of random area and aspect ratio; after ten that do not fit, a central one.

    Returns:
        Top, left, height and width.
    """
    if box := _random_box(size, scale, ASPECT, generator):
        return box
    height, width = size
    wide = min(width, max(1, round(height * ASPECT[1])))
    tall = min(height, max(1, round(width / ASPECT[0])))
    return (height - tall) // 2, (width - wide) // 2, tall, wide


def _random_box(
    size: tuple[int, int],
    share: tuple[float, float],
    aspects: tuple[float, float],
    generator: np.random.Generator,
) -> Box | None:
    height, width = size
    for _ in range(TRIES):
        area = height * width * generator.uniform(*share)
        aspect = math.exp(generator.uniform(math.log(aspects[0]), math.log(aspects[1])))
        wide, tall = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < tall <= height:
            top = int(generator.integers(height - tall + 1))
            left = int(generator.integers(width - wide + 1))
            return top, left, tall, wide
    return None


def mixing(chosen: AugmentationConfig, size: int, seeds: tuple[int, ...]) -> tuple[float, Box]:
    """Draws how the two images of a pair are mixed.

    Args:
        chosen: The augmentation settings.
        size: Side of both images.
        seeds: Seeds of the random numbers: the run's seed and the number of the pair.

    Returns:
        Weight of each image in the mix, and the box that is taken from its neighbour: top, left,
        bottom and right; empty for mixup.
    """
    nothing = (0, 0, 0, 0)
    if not chosen.mixup and not chosen.cutmix:
        return 1.0, nothing
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seeds)))
    boxes = chosen.cutmix > 0 and (not chosen.mixup or generator.random() < 0.5)
    alpha = chosen.cutmix if boxes else chosen.mixup
    share = float(generator.beta(alpha, alpha))
    if not boxes:
        return share, nothing
    side = size * math.sqrt(1 - share)
    row, column = generator.uniform(0, size, 2)
    top, bottom = (int(min(max(row + s * side / 2, 0), size)) for s in (-1, 1))
    left, right = (int(min(max(column + s * side / 2, 0), size)) for s in (-1, 1))
    return 1 - (bottom - top) * (right - left) / size**2, (top, left, bottom, right)


_MISSING = (
    "data.augmentation.randaugment: needs torchvision, which is not installed; `pip "
    "install -c constraints.txt -e '.[images]'` installs it; or set it to null"
)


@functools.cache
def transforms() -> Any:
    """Imports torchvision's transforms.

    Raises:
        DataError: torchvision is not installed.
    """
    try:
        importlib.import_module("torchvision")
    except ImportError:
        raise DataError(_MISSING) from None
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        _declare_operators()
        importlib.import_module("torchvision")
    return importlib.import_module("torchvision.transforms.v2")


_declared: list[torch.library.Library] = []
"""References that keep the declarations alive."""


def _declare_operators() -> None:
    for name in [n for n in sys.modules if n == "torchvision" or n.startswith("torchvision.")]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        library.define(  # type: ignore[no-untyped-call]
            f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
    _declared.append(library)


def randaugment(image_CHW: Tensor, chosen: RandAugmentConfig, seeds: tuple[int, ...]) -> Tensor:
    """Applies RandAugment.

    torchvision draws from PyTorch's global generator, which is seeded for the image and then left
    as it was.

    Returns:
        uint8 [C, H, W].

    Raises:
        DataError: torchvision is not installed.
    """
    operation = transforms().RandAugment(chosen.operations, chosen.magnitude)
    generator = torch.default_generator
    state = generator.get_state()
    drawn = np.random.SeedSequence((*seeds, 1)).generate_state(1, np.uint64)[0]
    generator.manual_seed(int(drawn >> np.uint64(1)))
    try:
        result: Tensor = operation(image_CHW)
    finally:
        generator.set_state(state)
    return result


@dataclass(frozen=True)
class GaussianNoise:
    """Adds Gaussian noise to each number of each pixel, as ImageNet-C does.

    Its five severities are 0.08, 0.12, 0.18, 0.26 and 0.38 (Hendrycks and Dietterich 2019).

    The noise of an image depends only on the seed and the image's number; another rate scales the
    same noise.
    """

    rate: float
    """Standard deviation, for pixels from 0 to 1; at most 1."""
    seed: int = 0
    """Not negative."""

    def __call__(self, pixels: Pixels, number: int) -> Pixels:
        """Returns the pixels of an image with noise added, clipped to the valid range."""
        generator = np.random.Generator(np.random.PCG64((self.seed, number)))
        noise = generator.standard_normal(pixels.shape, dtype=np.float32)
        return np.clip(np.rint(pixels + 255 * self.rate * noise), 0, 255).astype(np.uint8)
