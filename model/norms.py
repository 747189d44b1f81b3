"""RMSNorm, as decoders since Llama have it in place of LayerNorm.

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
    """x / sqrt(mean(x^2) + epsilon), times a learned scale; computed in fp32 at least.

    Args:
        size: Of the last dimension.
        epsilon: Added to the mean square.
        rounded_last: Whether bf16 rounds after the scale, as in gpt-oss; false: before it, as in
            Llama. The difference is below one unit in the last place.
    """

    def __init__(self, size: int, epsilon: float, *, rounded_last: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.epsilon, self.rounded_last = epsilon, rounded_last
        self.mean: Region = same
        """The mean over processes that each have a part of the last dimension."""
        self.shared: Region = same
        """The scale, of which each process has the gradient of its own heads."""

    def initializers(self) -> dict[str, Initializer]:
        """A scale of one."""
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
    """A norm of the last dimension, on the current default device.

    Args:
        name: Which.
        size: Of the last dimension.
        epsilon: Added to the variance or the mean square.
        bias: Whether a LayerNorm has one.
    """
    if name == "layer":
        return LayerNorm(size, eps=epsilon, bias=bias)
    return RMSNorm(size, epsilon, rounded_last=name == "rms_rounded_last")
