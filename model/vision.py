"""Parts that all image models share: patches, stochastic depth, the classification head.

Shapes: B images, C channels, H x W pixels, P side of a patch, T tokens (patches, and a class token
if there is one), D width, K classes, L blocks.
"""

import math
from abc import ABC, abstractmethod
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import linear

from polyad.model.config import Config, Count, SectionError, divisors, nearest_two
from polyad.model.feedforward import Activation
from polyad.model.heads import HEAD
from polyad.model.initialization import ZEROS, Initializer, constant, normal
from polyad.model.layers import Linear
from polyad.model.mumoe.layer import MuMoEHead, MuMoEHeadConfig
from polyad.model.output import RoutingStats
from polyad.model.settings import ModelSettings


class LinearHeadConfig(Config):
    """A single linear layer."""

    kind: Literal["linear"] = "linear"
    """The kind of head."""

    def of_model(self, width: int, classes: int) -> "LinearHeadConfig":
        """Returns the head unchanged: this kind derives nothing from the model."""
        return self


HeadConfig: TypeAlias = Annotated[LinearHeadConfig | MuMoEHeadConfig, Field(discriminator="kind")]


class ImageSettings(ModelSettings):
    """The keys of every model of images with classes."""

    image_size: Count = 224
    """Side of the square input image, in pixels; a multiple of patch_size."""
    channels: Count = 3
    """Number of values per pixel: 3 for red, green and blue."""
    num_classes: Count | None = None
    """Number of output classes K; null: derived from the data."""

    def from_data(self) -> dict[str, int | None]:
        """The number of classes."""
        return {"num_classes": self.num_classes}

    def gives_log_probabilities(self) -> bool:
        """Whether its logits are log-probabilities, to which a sigmoid cannot be applied."""
        return False

    def begins_anew_from(self, theirs: ModelSettings) -> tuple[str, ...]:
        """Returns name prefixes of parameters to reinitialize when loading weights of another run.

        Args:
            theirs: The model of the other run.
        """
        return ()


class ImageModelSettings(ImageSettings):
    """The keys of every model that cuts images into patches."""

    patch_size: Count = 16
    """Side of a square patch, in pixels; each patch becomes one token."""
    num_layers: Annotated[int, Field(ge=1, le=10_000)] = 12
    """Number of transformer blocks L."""
    hidden_size: Count = 768
    """Width D of the residual stream, in units."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability for the output of every residual branch."""
    drop_path: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Stochastic depth: the probability that a residual branch of the last block is skipped for an
    image; in block i of L it is i / (L - 1) times this."""
    bias: bool = True
    """Whether linear layers and LayerNorms have a bias."""
    layer_norm_epsilon: Annotated[float, Field(gt=0, le=1e6)] = 1e-6
    """Epsilon that is added to the variance in every LayerNorm."""
    activation: Activation = "gelu"
    """Activation of dense feed-forwards: `gelu` (exact), `gelu_tanh` (its tanh approximation),
    `quick_gelu` (x sigmoid(1.702 x)) or `relu`. Sparse experts have their own key,
    model.feed_forward.activation."""
    initializer_range: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Standard deviation of the initial weights; null: Xavier initialization, sqrt(2 / (inputs +
    outputs))."""
    head: HeadConfig = LinearHeadConfig()
    """The output head."""
    head_bias: Annotated[float, Field(ge=-1e6, le=1e6)] = 0.0
    """Initial value of the biases of a linear head, 0 for other heads; -ln(number of classes) suits
    the sigmoid loss."""

    @model_validator(mode="after")
    def _head_and_patches_fit(self) -> Self:
        if self.head_bias and self.head.kind != "linear":
            raise ValueError(
                f"model.head_bias: {self.head_bias:g} is not allowed with model.head.kind: "
                f"{self.head.kind}, which has no such bias; allowed: 0"
            )
        if self.image_size % self.patch_size:
            near = nearest_two(divisors(self.image_size), self.patch_size)
            raise ValueError(
                f"model.patch_size: {self.patch_size} does not divide model.image_size: "
                f"{self.image_size}; nearest that do: {near}"
            )
        return self

    @property
    def num_patches(self) -> int:
        """Number of patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    def begins_anew_from(self, theirs: ModelSettings) -> tuple[str, ...]:
        """The head, if the other model differs in its number of classes or its kind of head."""
        if not isinstance(theirs, ImageModelSettings):
            return ()
        same = (theirs.num_classes, theirs.head) == (self.num_classes, self.head)
        return () if same else (HEAD,)

    def head_width(self) -> int:
        """Returns the width of the head's input."""
        return self.hidden_size

    def known_head(self) -> LinearHeadConfig | MuMoEHeadConfig:
        """Returns the head with its rank filled in; the number of classes must be known."""
        try:
            return self.head.of_model(self.head_width(), self.number("num_classes"))
        except SectionError as error:
            raise ValueError(error.within("model.head")) from None

    def filled(self) -> Self:
        """Fills in all defaults, and the head if the number of classes is known."""
        head = {} if self.num_classes is None else {"head": self.known_head()}
        return super().filled().model_copy(update=head)

    def weight_std(self, inputs: int, outputs: int) -> float:
        """Returns the standard deviation of the initial weight of a layer."""
        return self.initializer_range or math.sqrt(2 / (inputs + outputs))

    def drop_path_of(self, block: int) -> float | None:
        """Returns the probability that an image skips a branch of a block; None for every block
        without stochastic depth."""
        if not self.drop_path:
            return None
        return self.drop_path * block / max(1, self.num_layers - 1)


class PatchEmbedding(nn.Conv2d):
    """A linear map of every patch.

    The weight has the shape of a convolution's, as in other libraries.

    Args:
        config: The model's configuration.
    """

    def __init__(self, config: ImageModelSettings) -> None:
        side = config.patch_size
        super().__init__(config.channels, config.hidden_size, side, stride=side)
        self.side, self._config = side, config

    def initializers(self) -> dict[str, Initializer]:
        """Returns the initializer of the weight: LeCun normal, with variance 1 / inputs."""
        std = self._config.initializer_range or self.weight[0].numel() ** -0.5
        return {"weight": normal(std), "bias": ZEROS}

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Cuts images into patches.

        Args:
            images_BCHW: Normalized images, of any float type.

        Returns:
            [B, T, D], patches in row order.
        """
        batch, channels, height, width = images_BCHW.shape
        side = self.side
        cut = images_BCHW.to(self.weight.dtype).reshape(
            batch, channels, height // side, side, width // side, side
        )
        patches = cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        return linear(patches, self.weight.flatten(1), self.bias)


def build_head(config: ImageModelSettings) -> nn.Module:
    """Builds the output layer of a model.

    Args:
        config: The model's configuration, with the number of classes.
    """
    width, classes, head = config.head_width(), config.number("num_classes"), config.known_head()
    if isinstance(head, MuMoEHeadConfig):
        return MuMoEHead(head, width, classes)
    # All classes are equally likely, except for the bias.
    return Linear(width, classes, ZEROS, start_bias=constant(config.head_bias))


def classified(head: nn.Module, z_BD: Tensor) -> tuple[Tensor, tuple[RoutingStats, ...]]:
    """Applies a head: returns logits [B, K], and the statistics of a head that routes.

    Args:
        head: From `build_head`.
        z_BD: The representation of each image.
    """
    if isinstance(head, MuMoEHead):
        logits_BK, stats = head(z_BD)
        return logits_BK, (stats,)
    return head(z_BD), ()


class Classifier(nn.Module, ABC):
    """The base class of models of blocks and a head."""

    blocks: nn.ModuleList
    head: nn.Module

    @abstractmethod
    def pool(self, x_BTD: Tensor) -> Tensor:
        """Computes the input of the head [B, D] from the last block's output."""

    def tail(self, x_BTD: Tensor, first_block: int) -> Tensor:
        """Computes logits [B, K] from the input of a block."""
        for block in self.blocks[first_block:]:
            x_BTD, *_ = block(x_BTD)
        return self.score(x_BTD)[0]

    def score(self, x_BTD: Tensor) -> tuple[Tensor, tuple[RoutingStats, ...]]:
        """Computes logits [B, K] from the last block's output, and statistics of a routing head."""
        return classified(self.head, self.pool(x_BTD))
