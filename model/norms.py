"""RMSNorm, used instead of LayerNorm by decoders since Llama.

Source: Zhang & Sennrich 2019, "Root mean square layer normalization".
"""

from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from polyad.model.initialization import ONES, Initializer
from polyad.model.layers import LayerNorm
from polyad.model.regions import Region, same

NormName: TypeAlias = Literal["rms", "rms_rounded_last", "layer"]


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) times a learned scale; computed in fp32 at least.

    Args:
        size: Size of the last dimension.
        epsilon: Epsilon added to the mean square.
        rounded_last: Whether to round to bf16 after applying the scale, as in gpt-oss, rather than
            before, as in Llama. The difference is below one unit in the last place.
    """

    def __init__(self, size: int, epsilon: float, *, rounded_last: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.epsilon, self.rounded_last = epsilon, rounded_last
        self.mean: Region = same
        """The mean over ranks that each have a part of the last dimension."""
        self.shared: Region = same
        """Applied to the scale, for which each rank has the gradient of its own heads."""

    def initializers(self) -> dict[str, Initializer]:
        """Returns the initializer of the scale: ones."""
        return {"weight": ONES}

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes the last dimension."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean_square = self.mean(wide.square().mean(-1, keepdim=True))
        normalized = wide * torch.rsqrt(mean_square + self.epsilon)
        weight = self.shared(self.weight)
        if self.rounded_last:
            return (weight * normalized).to(x.dtype)
        return weight * normalized.to(x.dtype)


def build_norm(name: NormName, size: int, epsilon: float, bias: bool = True) -> nn.Module:
    """Builds a norm of the last dimension, on the current default device.

    Args:
        name: The kind of norm.
        size: Size of the last dimension.
        epsilon: Epsilon added to the variance or the mean square.
        bias: Whether a LayerNorm has a bias.
    """
    if name == "layer":
        return LayerNorm(size, eps=epsilon, bias=bias)
    return RMSNorm(size, epsilon, rounded_last=name == "rms_rounded_last")
