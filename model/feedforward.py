"""The feed-forward of a block: one interface, chosen by `kind`.

A new kind is a config class and a module, one member of the `FeedForwardConfig` union and one line
of `FEED_FORWARDS`; the tests run over that registry.

Shapes: B batch, T tokens in a sequence, D width, F inner width.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, field_validator
from torch import Tensor, nn

from model.config import Config
from model.initialization import Initializer, linear_initializers
from model.output import RoutingStats


@dataclass(frozen=True, kw_only=True)
class FeedForwardContext:
    """What a model tells each of its feed-forwards, whatever their kind."""

    hidden_size: int
    """Width D of the input and the output."""
    bias: bool
    """Whether linear layers have one."""
    dropout: float
    """Probability, of the output."""
    initializer_std: float
    """Of a weight that is not the last before the residual."""
    residual_std: float
    """Of a weight whose output is added to the residual stream."""


class FeedForward(nn.Module, ABC):
    """The interface: two views of the input in, the output and what the router did out."""

    @abstractmethod
    def forward(
        self, normalized_BTD: Tensor, residual_BTD: Tensor
    ) -> tuple[Tensor, RoutingStats | None]:
        """Computes the block's second branch.

        Args:
            normalized_BTD: The residual stream after the block's LayerNorm.
            residual_BTD: The residual stream before it, which the gate of a muMoE reads.

        Returns:
            The output [B, T, D], before it is added to the residual stream, and the routing
            statistics with an empty name, or None from a feed-forward that does not route.
        """


class DenseFeedForwardConfig(Config):
    """GPT-2's own feed-forward: every token through the same two layers."""

    kind: Literal["dense"] = "dense"
    """Which feed-forward this is."""

    @field_validator("kind", mode="before")
    @classmethod
    def _say_what_is_planned(cls, value: object) -> object:
        if value in ("mumoe", "smoe"):
            raise ValueError("this kind is not built yet; dense is the only one so far")
        return value

    hidden_size: Annotated[int, Field(ge=1)] | None = None
    """Inner width F, in units; None: four times the model's width."""

    def inner_size(self, width: int) -> int:
        """The inner width F in a model of the given width D."""
        return 4 * width if self.hidden_size is None else self.hidden_size

    def matmul_parameters_per_token(self, width: int) -> int:
        """Counts the weights that multiply one token; a sparse kind counts the active experts.

        Args:
            width: D.

        Returns:
            A number of weights, without biases.
        """
        return 2 * width * self.inner_size(width)


class DenseFeedForward(FeedForward):
    """Up, GELU (approximated by tanh, as in GPT-2), down.

    Args:
        config: Its own configuration.
        context: What the model says.
    """

    def __init__(self, config: DenseFeedForwardConfig, context: FeedForwardContext) -> None:
        super().__init__()
        inner_size = config.inner_size(context.hidden_size)
        self.context = context
        self.up = nn.Linear(context.hidden_size, inner_size, bias=context.bias)
        self.activation = nn.GELU(approximate="tanh")
        self.down = nn.Linear(inner_size, context.hidden_size, bias=context.bias)
        self.dropout = nn.Dropout(context.dropout)

    def initializers(self) -> dict[str, Initializer]:
        """Says how each parameter starts; see `model/initialization.py`."""
        return {
            **linear_initializers("up", self.up, self.context.initializer_std),
            **linear_initializers("down", self.down, self.context.residual_std),
        }

    def forward(
        self, normalized_BTD: Tensor, residual_BTD: Tensor
    ) -> tuple[Tensor, RoutingStats | None]:
        """Applies both layers to the normalized input; see `FeedForward.forward`."""
        inner_BTF = self.activation(self.up(normalized_BTD))
        return self.dropout(self.down(inner_BTF)), None


# With a second member: Annotated[DenseFeedForwardConfig | ..., Field(discriminator="kind")]. Older
# pydantic refuses a discriminator on a single type.
FeedForwardConfig: TypeAlias = DenseFeedForwardConfig

# A kind's builder takes that kind's own config, which no one signature can say: hence Any.
FEED_FORWARDS: dict[str, Callable[[Any, FeedForwardContext], FeedForward]] = {
    "dense": DenseFeedForward,
}


def build_feedforward(config: FeedForwardConfig, context: FeedForwardContext) -> FeedForward:
    """Builds the feed-forward of one block, on the current default device.

    Args:
        config: Which kind, and its settings.
        context: What the model says.

    Returns:
        A module with the interface of `FeedForward`.
    """
    return FEED_FORWARDS[config.kind](config, context)
