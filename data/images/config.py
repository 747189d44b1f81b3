"""The keys under `data:` for images."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from polyad.data.config import Config, DataSettings
from polyad.data.errors import check_path
from polyad.data.names import LeaveOut

Share = Annotated[float, Field(ge=0, le=1)]

NORMALIZATIONS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "none": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
}
"""Mean and standard deviation of red, green and blue, of pixels from 0 to 1."""


class RandAugmentConfig(Config):
    """RandAugment (Cubuk et al. 2020), torchvision's; it needs the extra `images`."""

    operations: Annotated[int, Field(ge=1, le=14)] = 2
    """How many of the 14 operations an image goes through."""
    magnitude: Annotated[int, Field(ge=0, le=30)] = 15
    """How strong they are, of 30."""


class AugmentationConfig(Config):
    """What happens to a training image; numbers are drawn from (seed, epoch, image)."""

    crop_scale: tuple[float, float] | None = (0.05, 1.0)
    """Share of the image that a random crop has, at least and at most, with sides of 3:4 to 4:3;
    null: the central crop of evaluation."""
    flip: bool = True
    """Whether half of the images are mirrored."""
    randaugment: RandAugmentConfig | None = None
    """Two keys, `operations` and `magnitude`; null: none."""
    erasing: Share = 0.0
    """Probability that a box of the image becomes the mean colour (Zhong et al. 2020)."""
    mixup: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Alpha of mixup's Beta(alpha, alpha); 0: none. With cutmix each has half of the pairs."""
    cutmix: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Alpha of CutMix's Beta(alpha, alpha); 0: none."""

    @field_validator("crop_scale", mode="before")
    @classmethod
    def _is_two_shares(cls, value: object) -> object:
        if value is None:
            return None
        numbers = list(value) if isinstance(value, list | tuple) else []
        good = len(numbers) == 2 and all(type(n) in (int, float) for n in numbers)
        if not good or not 0 < numbers[0] <= numbers[1] <= 1:
            raise ValueError("two shares of the image, as in [0.05, 1.0], or null")
        return float(numbers[0]), float(numbers[1])


class ImageDataConfig(DataSettings):
    """Which prepared images a run reads, and how."""

    kind: Literal["images"] = "images"
    """Images with classes."""

    path: str
    """Folder made by `polyad prepare --images`: an index of the images, and their classes."""

    leave_out: LeaveOut = None
    """Domains that are not trained on: `test` is then all of their images, and train and validation
    are those of the others; null: none."""

    verify: bool = True
    """Whether training also checks in the background that the index and the files that it was made
    of are as they were."""

    max_damaged: Annotated[int, Field(ge=0)] = 0
    """Images that cannot be decoded and are replaced by the next one, in each loader process; one
    more ends the run."""

    normalization: Literal["imagenet", "half", "clip", "none"] = "imagenet"
    """Mean and standard deviation that are taken out: ImageNet's; half: pixels from -1 to 1;
    CLIP's; or none: from 0 to 1."""

    evaluation_resize: Annotated[float, Field(ge=1, le=4)] = 256 / 224
    """Shorter side of a held-out image before the central crop, as a multiple of the model's
    image_size."""

    augmentation: AugmentationConfig = AugmentationConfig()
    """What happens to training images."""

    loss: Literal["softmax", "sigmoid"] = "softmax"
    """softmax: cross-entropy; sigmoid: the sum over classes of binary cross-entropies."""

    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of every target that is spread evenly over all classes."""

    @field_validator("path")
    @classmethod
    def _path_can_be(cls, path: str) -> str:
        check_path(path)
        return path

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
    """Which prepared images with attributes a run reads, and how."""

    kind: Literal["attributes"] = "attributes"  # type: ignore[assignment]
    """Images with any number of named attributes."""

    loss: Literal["sigmoid"] = "sigmoid"
    """The sum over attributes of binary cross-entropies."""

    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of every target that is spread evenly over yes and no."""
