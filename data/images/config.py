"""The keys under `data:` for images."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from polyad.data.config import Config, DataSettings
from polyad.data.errors import check_path

Share = Annotated[float, Field(ge=0, le=1)]


def _sorted(names: list[str] | None) -> list[str] | None:
    return None if names is None else sorted(set(names))


LeaveOut = Annotated[list[str] | None, Field(min_length=1), AfterValidator(_sorted)]
"""Names of domains, sorted because their order has no meaning; or None."""

NORMALIZATIONS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "none": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
}
"""Mean and standard deviation of red, green and blue, for pixels from 0 to 1."""


class RandAugmentConfig(Config):
    """RandAugment (Cubuk et al. 2020) as in torchvision; needs the extra `images` to be
    installed."""

    operations: Annotated[int, Field(ge=1, le=14)] = 2
    """Number of operations, out of 14, that are applied to an image."""
    magnitude: Annotated[int, Field(ge=0, le=30)] = 15
    """Strength of the operations, from 0 to 30."""


class AugmentationConfig(Config):
    """Augmentation of training images; its random numbers depend on (seed, epoch, image) alone."""

    crop_scale: Annotated[tuple[Share, Share], Field(strict=False)] | None = (0.05, 1.0)
    """Smallest and largest area of the random crop, as a fraction of the image, with an aspect
    ratio from 3:4 to 4:3; null: the central crop that evaluation uses."""
    flip: bool = True
    """Whether images are mirrored horizontally with probability 1/2."""
    randaugment: RandAugmentConfig | None = None
    """RandAugment with the keys `operations` and `magnitude`; null: none."""
    erasing: Share = 0.0
    """Probability that a random box of the image is filled with the mean colour (random erasing,
    Zhong et al. 2020)."""
    mixup: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Alpha of the Beta(alpha, alpha) distribution of mixup; 0: no mixup. If cutmix is on too, each
    gets half of the pairs."""
    cutmix: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Alpha of the Beta(alpha, alpha) distribution of CutMix; 0: no CutMix."""

    @field_validator("crop_scale")
    @classmethod
    def _is_a_range(cls, scale: tuple[float, float] | None) -> tuple[float, float] | None:
        if scale is not None and not 0 < scale[0] <= scale[1]:
            raise ValueError("two shares of the image, as in [0.05, 1.0], or null")
        return scale


class ImageDataConfig(DataSettings):
    """Images with classes, and how they are read."""

    kind: Literal["images"] = "images"
    """Images, each with one class."""

    path: Annotated[str, AfterValidator(check_path)]
    """A folder with one folder per class, perhaps inside train, val and test; .parquet files or
    WebDataset's .tar files, or a folder of them; a folder saved by Hugging Face's datasets;
    hub:OWNER/NAME[:CONFIG]; or digits."""

    domains: bool = False
    """Whether `path` is a folder with one folder per domain, each with one folder per class."""

    held_out: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Fraction of the training images (of each domain, if there are domains) that becomes the
    validation split; null: 0.01 if there is no validation split besides a test split."""

    leave_out: LeaveOut = None
    """Domains to hold out entirely: all of their images become the `test` split, and the other
    domains provide train and validation; null: no domain is held out."""

    normalization: Literal["imagenet", "half", "clip", "none"] = "imagenet"
    """How pixel values are normalized: with the mean and standard deviation of `imagenet` or
    `clip`; `half`: scaled to -1 to 1; `none`: left at 0 to 1."""

    evaluation_resize: Annotated[float, Field(ge=1, le=4)] = 256 / 224
    """Length to which the shorter side of a held-out image is resized before the central crop, as a
    multiple of the model's image_size."""

    augmentation: AugmentationConfig = AugmentationConfig()
    """Augmentation of the training images."""

    loss: Literal["softmax", "sigmoid"] = "softmax"
    """`softmax`: cross-entropy; `sigmoid`: binary cross-entropy, summed over the classes."""

    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of every target that is spread evenly over all classes; 0 turns label smoothing
    off."""

    @property
    def mixes(self) -> bool:
        """Whether images are mixed in pairs."""
        return self.augmentation.mixup > 0 or self.augmentation.cutmix > 0

    @property
    def mean(self) -> tuple[float, ...]:
        """Mean of red, green and blue, of pixels from 0 to 1."""
        return NORMALIZATIONS[self.normalization][0]

    @property
    def std(self) -> tuple[float, ...]:
        """Standard deviation of red, green and blue, of pixels from 0 to 1."""
        return NORMALIZATIONS[self.normalization][1]


class AttributeDataConfig(ImageDataConfig):
    """Images with attributes, and how they are read."""

    kind: Literal["attributes"] = "attributes"  # type: ignore[assignment]
    """Images, each with any number of named attributes (multi-label)."""

    loss: Literal["sigmoid"] = "sigmoid"
    """Binary cross-entropy, summed over the attributes."""

    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of every target that is spread evenly over yes and no; 0 turns label smoothing
    off."""
