"""The interface between a block and its feed-forward of any kind.

Shapes: B batch, T tokens in a sequence, D width, A heads, H width of one head, N experts.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from polyad.model.attention import AttentionTrace
from polyad.model.cache import BlockCache
from polyad.model.output import RoutingStats
from polyad.model.padding import RealTokens

Activation: TypeAlias = Literal["gelu", "gelu_tanh", "quick_gelu"]
"""GELU, exact or approximated by tanh, or x sigmoid(1.702 x)."""


@dataclass(frozen=True, kw_only=True)
class FeedForwardContext:
    """Settings of the model that every kind of feed-forward gets."""

    hidden_size: int
    """Width D of the input and the output."""
    bias: bool
    """Whether linear layers have one."""
    dropout: float
    """Dropout probability of the output."""
    initializer_std: float
    """Standard deviation of initial weights, but for those before the residual stream."""
    residual_std: float
    """Standard deviation of initial weights whose output is added to the residual stream."""
    num_heads: int | None = None
    """Heads of the attention in the same block; None in a model without attention."""
    activation: Activation = "gelu_tanh"
    """Of the dense feed-forward."""
    causal: bool = True
    """Whether a token must not depend on later ones, as in a language model."""


class BlockInput(NamedTuple):
    """What a block, its feed-forward and their router may read beside the residual stream.

    A NamedTuple, because DeepSpeed's hooks look for tensors in tuples alone.
    """

    mask_BT: Tensor | None = None
    """True for tokens, False for padding, for an attention that sees later tokens; None: there is
    no padding, or attention is causal and padding comes last."""
    real: RealTokens | None = None
    """The tokens that are not padding, for routing; None: all, or no block routes."""
    cache: BlockCache | None = None
    """In generation: what this block stores of earlier tokens, to which these are added."""
    attention: AttentionTrace | None = None
    """The trace of the block's attention, for a feed-forward whose `attention_head` asks for it.
    The block fills it in."""


NOTHING_ELSE = BlockInput()
"""No padding, no cache, no trace."""


def refuse_autocast(x: Tensor, what: str) -> None:
    """Raises an error where `torch.autocast` would change the precision of some products only.

    Args:
        x: What is computed with.
        what: What the error calls the layer.

    Raises:
        RuntimeError: Autocast is on, on the tensor's device.
    """
    kind = x.device.type
    # Not `torch.amp.is_autocast_available`, where older compilers end their graph.
    if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
        raise RuntimeError(
            f"{what} does not work under torch.autocast, which would mix precisions within its "
            f"products: give the model bf16 weights instead, as train.precision: bf16 does"
        )


class FeedForward(nn.Module, ABC):
    """The base of all feed-forwards."""

    def attention_head(self) -> Tensor | None:
        """The head of the block's attention that `forward` needs the trace of.

        The block asks before attention runs. The answer changes only in `update`.

        Returns:
            [1], its index among those of this process; None: `forward` needs no trace.
        """
        return None

    @abstractmethod
    def forward(
        self,
        normalized_BTD: Tensor,
        residual_BTD: Tensor,
        given: BlockInput = NOTHING_ELSE,
    ) -> tuple[Tensor, RoutingStats | None]:
        """Computes the block's second branch.

        Args:
            normalized_BTD: The residual stream after the block's LayerNorm.
            residual_BTD: The residual stream before it, which the gate of a muMoE reads.
            given: What else there is. Padding takes no part in routing, and its output has no
                meaning.

        Returns:
            The output [B, T, D], before it is added to the residual stream, and the routing
            statistics with an empty name, or None from a feed-forward that does not route.
        """

    def gate_columns(self) -> list[Tensor]:
        """The directions of the gate's input that raise each expert's score.

        Returns:
            For each level of experts [N, D], N experts; empty if it does not route.
        """
        return []

    def update(self, stats: RoutingStats, progress: float) -> None:
        """Prepares the next optimizer step; called once after each, if it routes.

        Args:
            stats: Of this layer, averaged over the step.
            progress: Share of the run's steps that are done.
        """
