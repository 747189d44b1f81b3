"""A small network on pixels: optional convolutions, hidden layers, an optional output layer.

    convolution, BatchNorm if configured, ReLU, max-pooling over 2 x 2        once for each
    linear, ReLU                                                              once for each
    linear

Without convolutions it is a perceptron on the pixels. Source of the shapes: Krishnamurthy et al.
2023, "Improving expert specialization in mixture of experts", appendix B.

Shapes: B images, C channels, H x W pixels, N channels of all BatchNorms side by side, D width of
the last hidden layer, O outputs.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear, max_pool2d, relu

from polyad.model.config import Config, SectionError
from polyad.model.initialization import ONES, ZEROS, Initializer, uniform
from polyad.model.mumoe.gating import BatchNorm
from polyad.model.settings import Count

POOL = 2
"""Side and stride of the max-pooling."""


class NetworkConfig(Config):
    """A small network of convolutions and hidden layers."""

    convolutions: Annotated[tuple[Count, ...], Field(strict=False)] = ()
    """Number of output channels of each convolution; []: no convolutions, the hidden layers read
    the pixels."""
    kernel_size: Count = 3
    """Kernel size of the convolutions, in pixels."""
    padding: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Zero padding of each convolution's input, in pixels on each side."""
    batch_norm: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)] = ()
    """Numbers, from 0, of the convolutions that are followed by a BatchNorm."""
    hidden_sizes: Annotated[tuple[Count, ...], Field(strict=False, min_length=1)] = (128, 32)
    """Width of each hidden layer, in units. An attentive gate reads the last one before its
    ReLU."""

    def check(self, image_size: int) -> None:
        """Checks that the convolutions leave some pixels for the hidden layers.

        Args:
            image_size: Side of the image, in pixels.

        Raises:
            SectionError: None are left, or a BatchNorm has no convolution.
        """
        if strange := [n for n in self.batch_norm if n >= len(self.convolutions)]:
            raise SectionError(
                f"@batch_norm: there is no convolution {strange[0]}; @convolutions has "
                f"{len(self.convolutions)}, numbered from 0"
            )
        if len(set(self.batch_norm)) < len(self.batch_norm):
            raise SectionError(f"@batch_norm: {list(self.batch_norm)} names a convolution twice")
        for number, (convolved, pooled) in enumerate(self.sides(image_size)):
            if convolved < 1 or pooled < 1:
                raise SectionError(
                    f"@convolutions: of {image_size} x {image_size} pixels none are left after "
                    f"convolution {number} and its pooling; use fewer convolutions, a smaller "
                    "@kernel_size or more @padding"
                )

    def sides(self, image_size: int) -> Iterator[tuple[int, int]]:
        """Yields the side of the image after each convolution and after its pooling, in pixels.

        Args:
            image_size: Side before the first convolution.
        """
        side = image_size
        for _ in self.convolutions:
            convolved = side + 2 * self.padding - self.kernel_size + 1
            side = convolved // POOL
            yield convolved, side

    def widths(self, image_size: int, channels: int) -> list[int]:
        """Returns the input width of the first hidden layer and the width of each, in units."""
        side = image_size
        for _, pooled in self.sides(image_size):
            side = pooled
        channels = self.convolutions[-1] if self.convolutions else channels
        return [channels * side**2, *self.hidden_sizes]


class NetworkOutput(NamedTuple):
    """The output of a small network."""

    hidden_BD: Tensor
    """The last hidden layer before its ReLU."""
    output_BO: Tensor | None
    """The output, or None for a network without an output layer."""
    norm_mean_N: Tensor
    """Mean over images and pixels of each BatchNorm's input; empty without BatchNorm."""
    norm_square_N: Tensor
    """Mean of the squares."""


class SmallNetwork(nn.Module):
    """A small network.

    If all of its parameters are frozen it stays in evaluation mode, so that its BatchNorms do not
    change either.

    Args:
        config: Its sizes.
        image_size: Side of the images, in pixels.
        channels: Number of values per pixel.
        outputs: O; None: the network ends with its last hidden layer.
    """

    def __init__(
        self, config: NetworkConfig, image_size: int, channels: int, outputs: int | None
    ) -> None:
        super().__init__()
        sizes = pairwise((channels, *config.convolutions))
        self.convolutions = nn.ModuleList(
            Convolution(read, made, config, norm=number in config.batch_norm)
            for number, (read, made) in enumerate(sizes)
        )
        widths = config.widths(image_size, channels)
        self.hidden = nn.ModuleList(Linear(*sizes) for sizes in pairwise(widths))
        self.output = None if outputs is None else Linear(widths[-1], outputs)

    def forward(self, x_BCHW: Tensor) -> NetworkOutput:
        """Runs the network.

        Args:
            x_BCHW: Images.
        """
        means, squares = [x_BCHW.new_empty(0)], [x_BCHW.new_empty(0)]
        for convolution in self.convolutions:
            x_BCHW, mean_C, square_C = convolution(x_BCHW)
            means.append(mean_C)
            squares.append(square_C)
        hidden_BD = x_BCHW.flatten(1)
        for number, layer in enumerate(self.hidden):
            hidden_BD = layer(relu(hidden_BD) if number else hidden_BD)
        output_BO = None if self.output is None else self.output(relu(hidden_BD))
        return NetworkOutput(hidden_BD, output_BO, torch.cat(means), torch.cat(squares))

    def train(self, mode: bool = True) -> "SmallNetwork":
        """Sets training mode, unless everything is frozen."""
        return super().train(mode and any(p.requires_grad for p in self.parameters()))

    def norms(self) -> list[BatchNorm]:
        """Returns its BatchNorms, in the order of `NetworkOutput.norm_mean_N`."""
        return [norm for norm in self.modules() if isinstance(norm, BatchNorm)]


class Convolution(nn.Module):
    """A convolution, BatchNorm with a scale and a shift per channel, ReLU, and max-pooling.

    BatchNorm works as in the gates of a muMoE: in training it normalizes over the images of all
    data-parallel ranks, and its running statistics are updated from those of the step.

    Args:
        read: Number of input channels.
        made: Number of output channels.
        config: The network's configuration.
        norm: Whether it has a BatchNorm.
    """

    norm: BatchNorm | None

    def __init__(self, read: int, made: int, config: NetworkConfig, *, norm: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(made, read, config.kernel_size, config.kernel_size))
        self.bias = nn.Parameter(torch.empty(made))
        self.padding = config.padding
        self.norm = BatchNorm([made]) if norm else None
        if norm:
            self.scale = nn.Parameter(torch.empty(made))
            self.shift = nn.Parameter(torch.empty(made))

    def initializers(self) -> dict[str, Initializer]:
        """Initializes like PyTorch: uniform, bounded by one over the square root of the inputs."""
        bound = self.weight[0].numel() ** -0.5
        own = {"weight": uniform(bound), "bias": uniform(bound)}
        return own if self.norm is None else own | {"scale": ONES, "shift": ZEROS}

    def forward(self, x_BCHW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Convolves.

        Args:
            x_BCHW: Images, or the output of the previous convolution.

        Returns:
            The output, and for each channel the mean and the mean square of BatchNorm's input;
            empty without BatchNorm.
        """
        y_BCHW = conv2d(x_BCHW, self.weight, self.bias, padding=self.padding)
        mean_C = square_C = y_BCHW.new_empty(0)
        if self.norm is not None:
            wide = torch.promote_types(y_BCHW.dtype, torch.float32)
            y_BHWC = y_BCHW.to(wide).permute(0, 2, 3, 1)
            levels, mean, square = self.norm(y_BHWC.flatten(0, 2))
            assert mean is not None
            assert square is not None
            mean_C, square_C = mean, square
            y_BHWC = levels[0].view(y_BHWC.shape) * self.scale + self.shift
            y_BCHW = y_BHWC.permute(0, 3, 1, 2).to(y_BCHW.dtype)
        return max_pool2d(relu(y_BCHW), POOL), mean_C, square_C


class Linear(nn.Linear):
    """A linear layer with PyTorch's initialization."""

    def initializers(self) -> dict[str, Initializer]:
        """Initializes uniformly, bounded by one over the square root of the inputs."""
        start = uniform(self.in_features**-0.5)
        return {"weight": start} if self.bias is None else {"weight": start, "bias": start}

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layer to the last dimension."""
        return linear(x, self.weight, self.bias)
