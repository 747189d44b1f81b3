"""What a block asks of its feed-forward, whatever its kind.

Shapes: B batch, T tokens in a sequence, D width, A heads, H width of one head, N experts.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from model.attention import AttentionTrace
from model.cache import LayerCache
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
    num_heads: int | None = None
    """Of the attention in the same block; None in a model without attention."""
    causal: bool = True
    """Whether a token must not know of later ones, as in a language model."""


def refuse_autocast(x: Tensor, what: str) -> None:
    """Raises an error where `torch.autocast` would change the precision of some products only.

    Args:
        x: What is computed with.
        what: Who computes, for the error.

    Raises:
        RuntimeError: Autocast is on, on the tensor's device.
    """
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        raise RuntimeError(
            f"{what} does not work under torch.autocast, which would mix precisions within its "
            f"products: give the model bf16 weights instead, as train.precision: bf16 does"
        )


class FeedForward(nn.Module, ABC):
    """The interface: views of the block's state in, the output and what the router did out."""

    def attention_head(self) -> Tensor | None:
        """Which head of the block's attention `forward` is to be told about, with what attention
        did on the whole.

        Asked before attention runs, and meant until `update` is called.

        Returns:
            [1], its index among those of this process; None: nothing is read of the attention.
        """
        return None

    @abstractmethod
    def forward(
        self,
        normalized_BTD: Tensor,
        residual_BTD: Tensor,
        attention: AttentionTrace | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, RoutingStats | None]:
        """Computes the block's second branch.

        Args:
            normalized_BTD: The residual stream after the block's LayerNorm.
            residual_BTD: The residual stream before it, which the gate of a muMoE reads.
            attention: What the block's attention did, if `attention_head` names one.
            cache: In generation: what this feed-forward keeps of earlier tokens, to which these
                are added.

        Returns:
            The output [B, T, D], before it is added to the residual stream, and the routing
            statistics with an empty name, or None from a feed-forward that does not route.
        """

    def gate_columns(self) -> list[Tensor]:
        """The directions of the gate's input that raise each expert's score.

        Returns:
            Of each level of experts [N, D], N experts; empty if it does not route.
        """
        return []

    def update(self, stats: RoutingStats, progress: float) -> None:
        """Prepares the next optimizer step; called once after each, if it routes.

        Args:
            stats: Of this layer, averaged over the step.
            progress: Share of the run's steps that are done.
        """
