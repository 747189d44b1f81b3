"""Base scores: logits over the experts, from each token alone.

A new score is a class here, a line of `SCORES` and a name in the config's `ScoreName`.

Shapes: N tokens, D width, E experts, S width of the cosine score's space.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from model.initialization import ZEROS, Initializer, constant, normal, uniform
from model.interface import FeedForwardContext
from model.smoe.config import SparseMoEConfig

INITIAL_TEMPERATURE = 0.07
"""Initial temperature of the cosine score, as in X-MoE (Chi et al. 2022, section 3.2)."""


def router_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision that routing is computed in: fp32, or the model's if it is higher."""
    return torch.promote_types(dtype, torch.float32)


class Score(nn.Module, ABC):
    """The interface of a base score.

    Args:
        config: Of the layer.
        context: Settings of the model.
    """

    def __init__(self, config: SparseMoEConfig, context: FeedForwardContext) -> None:
        super().__init__()
        self.std = context.initializer_std

    @abstractmethod
    def initializers(self) -> dict[str, Initializer]:
        """Says how each parameter starts; see `model/initialization.py`."""

    @abstractmethod
    def columns(self) -> Tensor:
        """The directions of a token that raise each expert's logit, [E, D]."""

    @abstractmethod
    def forward(self, u_ND: Tensor) -> Tensor:
        """Scores the experts.

        Args:
            u_ND: Tokens.

        Returns:
            Logits [N, E], fp32 at least; their softmax is r.
        """


class LinearScore(Score):
    """Logits W u + b (Shazeer et al. 2017)."""

    def __init__(self, config: SparseMoEConfig, context: FeedForwardContext) -> None:
        super().__init__(config, context)
        self.weight = nn.Parameter(torch.empty(config.num_experts, context.hidden_size))
        has_bias = context.bias and config.router_bias
        self.bias = nn.Parameter(torch.empty(config.num_experts)) if has_bias else None

    def initializers(self) -> dict[str, Initializer]:
        """Normal weight, zero bias."""
        entries = {"weight": normal(self.std)}
        return entries | ({"bias": ZEROS} if self.bias is not None else {})

    def columns(self) -> Tensor:
        """The weight."""
        return self.weight

    def forward(self, u_ND: Tensor) -> Tensor:
        """See `Score.forward`."""
        dtype = router_dtype(u_ND.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return linear(u_ND.to(dtype), self.weight.to(dtype), bias)


class CosineScore(Score):
    """Cosine of the projected token and an embedding of each expert, over a learned temperature.

    Source: Chi et al. 2022, "On the representation collapse of sparse mixture of experts" (X-MoE).
    """

    def __init__(self, config: SparseMoEConfig, context: FeedForwardContext) -> None:
        super().__init__(config, context)
        size = config.score_size()
        self.projection = nn.Parameter(torch.empty(size, context.hidden_size))
        self.embedding = nn.Parameter(torch.empty(config.num_experts, size))
        self.temperature = nn.Parameter(torch.empty(1))  # DeepSpeed takes no scalars

    def initializers(self) -> dict[str, Initializer]:
        """Normal directions, and X-MoE's temperature."""
        return {
            "projection": normal(self.std),
            "embedding": normal(self.std),
            "temperature": constant(INITIAL_TEMPERATURE),
        }

    def columns(self) -> Tensor:
        """Each expert's direction, taken back through the projection: the weight that gives the
        cosine before it is divided by the token's length.
        """
        dtype = router_dtype(self.embedding.dtype)
        directions_ES = normalize(self.embedding.to(dtype), dim=-1)
        return directions_ES @ self.projection.to(dtype)

    def forward(self, u_ND: Tensor) -> Tensor:
        """See `Score.forward`."""
        dtype = router_dtype(u_ND.dtype)
        projected_NS = normalize(linear(u_ND.to(dtype), self.projection.to(dtype)), dim=-1)
        directions_ES = normalize(self.embedding.to(dtype), dim=-1)
        # A learned temperature must not reach zero.
        temperature = self.temperature.to(dtype).clamp_min(0.01)
        return linear(projected_NS, directions_ES) / temperature


class RandomScore(Score):
    """A linear score that is never trained.

    Its weight is a buffer: part of a checkpoint, not of the optimizer. Source: Chen et al. 2023,
    "Sparse MoE as the new dropout" (SMoE-dropout).
    """

    weight: Tensor

    def __init__(self, config: SparseMoEConfig, context: FeedForwardContext) -> None:
        super().__init__(config, context)
        self.bound = context.hidden_size**-0.5
        self.register_buffer("weight", torch.empty(config.num_experts, context.hidden_size))

    def initializers(self) -> dict[str, Initializer]:
        """Uniform, as PyTorch starts a linear layer."""
        return {"weight": uniform(self.bound)}

    def columns(self) -> Tensor:
        """The weight."""
        return self.weight

    def forward(self, u_ND: Tensor) -> Tensor:
        """See `Score.forward`."""
        dtype = router_dtype(u_ND.dtype)
        return linear(u_ND.to(dtype), self.weight.to(dtype))


SCORES: dict[str, Callable[[SparseMoEConfig, FeedForwardContext], Score]] = {
    "linear": LinearScore,
    "cosine": CosineScore,
    "random": RandomScore,
}
