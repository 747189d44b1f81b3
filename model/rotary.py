"""Rotary positions: queries and keys are rotated by angles that grow with the position, so that
their product depends only on the distance.

Sources: Su et al. 2021, "RoFormer"; Peng et al. 2023, "YaRN: Efficient context window extension of
large language models"; Llama 3.1's released code.

Shapes: T positions, R half of the rotated units of a head.
"""

import math
from typing import Annotated, Literal, NamedTuple, TypeAlias

import torch
from pydantic import Field
from torch import Tensor

from polyad.model.config import Config, Count

Positive = Annotated[float, Field(ge=1e-6, le=1e12)]


class LinearScaling(Config):
    """Position interpolation: all angles are divided by a factor (Chen et al. 2023)."""

    kind: Literal["linear"] = "linear"
    """The kind of scaling."""
    factor: Positive
    """Factor by which the context is extended."""


class Llama3Scaling(Config):
    """Scaling of Llama 3.1: slow rotations are divided by a factor, fast ones stay unchanged."""

    kind: Literal["llama3"] = "llama3"
    """The kind of scaling."""
    factor: Positive
    """Factor by which the context is extended."""
    original_length: Count
    """Context length before the extension, in tokens."""
    low_frequency_factor: Positive = 1.0
    """Rotations with fewer turns than this over the original context are divided by the full
    factor."""
    high_frequency_factor: Positive = 4.0
    """Rotations with more turns than this over the original context stay unchanged."""


class YarnScaling(Config):
    """YaRN scaling: like llama3, it interpolates between two numbers of turns, and also scales
    attention."""

    kind: Literal["yarn"] = "yarn"
    """The kind of scaling."""
    factor: Positive
    """Factor by which the context is extended."""
    original_length: Count
    """Context length before the extension, in tokens."""
    beta_fast: Positive = 32.0
    """Rotations with more turns than this over the original context stay unchanged."""
    beta_slow: Positive = 1.0
    """Rotations with fewer turns than this over the original context are divided by the full
    factor."""
    rounded: bool = True
    """Whether the first and last pair of units whose rotation is interpolated are rounded to whole
    numbers; gpt-oss: false."""
    attention_factor: Positive | None = None
    """Factor of cosines and sines; null: computed from mscale and mscale_all_dim."""
    mscale: Positive | None = None
    """If both mscale and mscale_all_dim are set, cosines and sines are multiplied by m(mscale) /
    m(mscale_all_dim), with m(a) = 0.1 a ln(factor) + 1; otherwise by m(1)."""
    mscale_all_dim: Positive | None = None
    """Second argument of the formula of mscale, which also scales the logits if scaled_logits is
    set."""
    scaled_logits: bool = False
    """Whether attention logits are multiplied by m(mscale_all_dim) squared, as in DeepSeek."""

    def magnitude(self) -> float:
        """Returns the factor of cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is not None and self.mscale_all_dim is not None:
            return self._m(self.mscale) / self._m(self.mscale_all_dim)
        return self._m(1.0)

    def logit_scale(self) -> float:
        """Returns the additional factor of attention logits."""
        if not self.scaled_logits or self.mscale_all_dim is None:
            return 1.0
        return self._m(self.mscale_all_dim) ** 2

    def _m(self, weight: float) -> float:
        """Returns m of Peng et al. 2023, equation 22; 1 if the context is not extended."""
        return 1.0 if self.factor <= 1 else 0.1 * weight * math.log(self.factor) + 1.0


Scaling: TypeAlias = Annotated[
    LinearScaling | Llama3Scaling | YarnScaling, Field(discriminator="kind")
]


class RotaryConfig(Config):
    """Rotary position embedding (RoPE)."""

    theta: Annotated[float, Field(gt=1, le=1e12)] = 10000.0
    """Base of the angles: pair i of R is rotated by theta^(-i / R) per token."""
    scaling: Scaling | None = None
    """How angles are scaled for a context longer than the original training context; null:
    unscaled."""
    pairs: Literal["halves", "neighbours"] = "halves"
    """Which two units of a head are rotated together: `halves`, units i and i + R, or `neighbours`,
    units 2 i and 2 i + 1, as in DeepSeek."""
    dtype: Literal["model", "fp32"] = "model"
    """Precision in which queries and keys are rotated: that of the `model`, as in most families, or
    `fp32`, as in DeepSeek-V2. The angles are always fp32."""


class Rotation(NamedTuple):
    """Cosines and sines for a set of positions."""

    cos_TR: Tensor
    sin_TR: Tensor

    def turn(self, x: Tensor, config: RotaryConfig) -> Tensor:
        """Rotates the units of heads.

        Args:
            x: [..., T, 2 R].
            config: Which units are rotated together, and in which precision.

        Returns:
            [..., T, 2 R] with the first units of all pairs before the second units: products of
            queries and keys do not depend on the order.
        """
        dtype = x.dtype
        if config.dtype == "fp32":
            x = x.to(torch.promote_types(dtype, torch.float32))
        cos_TR, sin_TR = self.cos_TR.to(x.dtype), self.sin_TR.to(x.dtype)
        if config.pairs == "halves":
            first, second = x.chunk(2, -1)
        else:
            first, second = x[..., ::2], x[..., 1::2]
        turned = first * cos_TR - second * sin_TR, second * cos_TR + first * sin_TR
        return torch.cat(turned, -1).to(dtype)


def rotation(config: RotaryConfig, size: int, positions_T: Tensor, dtype: torch.dtype) -> Rotation:
    """Computes the cosines and sines of positions.

    Args:
        config: The rotary settings.
        size: 2 R, the number of rotated units per head.
        positions_T: Positions of tokens.
        dtype: The model's precision; the computation uses fp32 at least.
    """
    dtype = torch.promote_types(dtype, torch.float32)
    rates_R, magnitude = _rates(config, size, positions_T.device, dtype)
    angles_TR = positions_T.to(dtype).unsqueeze(1) * rates_R
    return Rotation(angles_TR.cos() * magnitude, angles_TR.sin() * magnitude)


def logit_scale(config: RotaryConfig) -> float:
    """Returns the factor of attention logits in addition to 1 / sqrt(head size)."""
    return config.scaling.logit_scale() if isinstance(config.scaling, YarnScaling) else 1.0


def _rates(
    config: RotaryConfig, size: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, float]:
    """Returns the angle per token of each pair, in radians, and the factor of cosines and sines."""
    exponents_R = torch.arange(0, size, 2, device=device).to(dtype) / size
    powers_R = config.theta**exponents_R
    rates_R = 1.0 / powers_R
    scaling = config.scaling
    if scaling is None:
        return rates_R, 1.0
    if isinstance(scaling, LinearScaling):
        return rates_R / scaling.factor, 1.0
    if isinstance(scaling, Llama3Scaling):
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        turns_R = scaling.original_length * rates_R / (2 * math.pi)
        kept_R = ((turns_R - low) / (high - low)).clamp(0, 1)
        return (1 - kept_R) * rates_R / scaling.factor + kept_R * rates_R, 1.0
    first, last = (
        size
        * math.log(scaling.original_length / (turns * 2 * math.pi))
        / (2 * math.log(config.theta))
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.rounded:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    numbers_R = torch.arange(size // 2, device=device).to(dtype)
    kept_R = 1 - ((numbers_R - first) / ((last - first) or 0.001)).clamp(0, 1)
    rates_R = (1 - kept_R) / (scaling.factor * powers_R) + kept_R * rates_R
    return rates_R, scaling.magnitude()
