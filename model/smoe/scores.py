"""Base scores: logits over the experts, computed from each token alone.

To add a score, write a class here and add a line to `SCORES` and a name to `ScoreName`.

Shapes: N tokens, D width, E experts, S width of the cosine score's space.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from polyad.model.feedforward import FeedForwardContext
from polyad.model.initialization import ZEROS, Initializer, constant, normal, uniform
from polyad.model.smoe.config import SelectingConfig, SparseMoEConfig
from polyad.model.smoe.dispatch import Dispatcher
from polyad.model.smoe.experts import StackedExperts

INITIAL_TEMPERATURE = 0.07
"""Initial temperature of the cosine score, as in X-MoE (Chi et al. 2022, section 3.2)."""


def router_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the precision of routing: fp32, or the model's if higher."""
    return torch.promote_types(dtype, torch.float32)


class Score(nn.Module, ABC):
    """The interface of a base score.

    Args:
        std: Standard deviation of initial weights.
    """

    def __init__(self, std: float) -> None:
        super().__init__()
        self.std = std

    def initializers(self) -> dict[str, Initializer]:
        """Returns the initializer of each parameter; see `model/initialization.py`."""
        return {}

    @abstractmethod
    def columns(self, features: Tensor | None = None) -> Tensor:
        """Returns the directions of a token that raise each expert's logit, [E, D].

        Args:
            features: As in `forward`.
        """

    def features(self, experts: StackedExperts, dispatcher: Dispatcher) -> Tensor | None:
        """Computes the values of the experts that `forward` reads; by default none.

        Args:
            experts: The experts, or this rank's part of them.
            dispatcher: Exchanges values with other ranks.

        Returns:
            [E, ...], for the experts of all ranks; None if nothing is read.
        """
        return None

    @abstractmethod
    def forward(self, u_ND: Tensor, features: Tensor | None = None) -> Tensor:
        """Scores the experts.

        Args:
            u_ND: Tokens.
            features: The result of `features`.

        Returns:
            Logits [N, E], at least fp32; their softmax is r.
        """


class LinearScore(Score):
    """Logits W u + b (Shazeer et al. 2017)."""

    def __init__(self, config: SelectingConfig, context: FeedForwardContext) -> None:
        super().__init__(context.initializer_std)
        self.weight = nn.Parameter(torch.empty(config.num_experts, context.hidden_size))
        has_bias = context.bias and config.scores_have_bias()
        self.bias = nn.Parameter(torch.empty(config.num_experts)) if has_bias else None
        self.in_model_dtype = config.scores_in_model_dtype()

    def initializers(self) -> dict[str, Initializer]:
        """Returns the initializers: normal weight, zero bias."""
        entries = {"weight": normal(self.std)}
        return entries | ({"bias": ZEROS} if self.bias is not None else {})

    def columns(self, features: Tensor | None = None) -> Tensor:
        """Returns the weight."""
        return self.weight

    def forward(self, u_ND: Tensor, features: Tensor | None = None) -> Tensor:
        """See `Score.forward`."""
        dtype = router_dtype(u_ND.dtype)
        if self.in_model_dtype:
            return linear(u_ND, self.weight, self.bias).to(dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return linear(u_ND.to(dtype), self.weight.to(dtype), bias)


class CosineScore(Score):
    """Cosine of the projected token and an embedding per expert, divided by a learned temperature.

    Source: Chi et al. 2022, "On the representation collapse of sparse mixture of experts" (X-MoE).
    """

    def __init__(self, config: SelectingConfig, context: FeedForwardContext) -> None:
        super().__init__(context.initializer_std)
        size = config.score_size()
        self.projection = nn.Parameter(torch.empty(size, context.hidden_size))
        self.embedding = nn.Parameter(torch.empty(config.num_experts, size))
        self.temperature = nn.Parameter(torch.empty(1))  # DeepSpeed rejects scalar parameters

    def initializers(self) -> dict[str, Initializer]:
        """Returns the initializers: normal directions, and X-MoE's temperature."""
        return {
            "projection": normal(self.std),
            "embedding": normal(self.std),
            "temperature": constant(INITIAL_TEMPERATURE),
        }

    def columns(self, features: Tensor | None = None) -> Tensor:
        """Returns each expert's direction mapped back through the projection: the weight that gives
        the cosine before the division by the token's length.
        """
        dtype = router_dtype(self.embedding.dtype)
        directions_ES = normalize(self.embedding.to(dtype), dim=-1)
        return directions_ES @ self.projection.to(dtype)

    def forward(self, u_ND: Tensor, features: Tensor | None = None) -> Tensor:
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
        super().__init__(context.initializer_std)
        self.bound = context.hidden_size**-0.5
        self.register_buffer("weight", torch.empty(config.num_experts, context.hidden_size))

    def initializers(self) -> dict[str, Initializer]:
        """Returns PyTorch's uniform initializer of linear layers."""
        return {"weight": uniform(self.bound)}

    def columns(self, features: Tensor | None = None) -> Tensor:
        """Returns the weight."""
        return self.weight

    def forward(self, u_ND: Tensor, features: Tensor | None = None) -> Tensor:
        """See `Score.forward`."""
        dtype = router_dtype(u_ND.dtype)
        return linear(u_ND.to(dtype), self.weight.to(dtype))


SCORES: dict[str, Callable[[SparseMoEConfig, FeedForwardContext], Score]] = {
    "linear": LinearScore,
    "cosine": CosineScore,
    "random": RandomScore,
}
